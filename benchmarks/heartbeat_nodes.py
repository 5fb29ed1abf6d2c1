"""Nodes of `heartbeats.py`: gRPC streams on one TCP connection each, many per process.

Each node does what an agent does on its link: it dials, says hello, sends heartbeats at its
interval and at once on change, obeys desired states without running anything, and reports steps if
it has rank 0. The parent gives orders on stdin, one JSON object per line, and gets answers on
stdout.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import uvloop

from megascale.v1 import link_pb2, types_pb2
from megascale_common.node.link_limits import HELLO_S
from megascale_common.node.process import arm_parent_death
from megascale_common.service.identity.peers import HEADER, bearer
from megascale_common.service.tasks import Backoff

RANKS = 8
SLOTS = 2  # sealed snapshots per rank that a heartbeat names
STEP_S = 1.0
BACKOFF_S = (0.2, 2.0)  # an agent's; so are the limits of one attempt to connect and of the hello
MAX_SENT = 64  # heartbeats whose acknowledgement may still come
CONNECT_S = 5.0
CONNECT = "/megascale.v1.ExecutorLinkService/Connect"
REPORT_STEPS = "/megascale.v1.ExecutorLinkService/ReportSteps"


class Fleet:
    """The nodes of this process, and what they have measured since the last order."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.interval_s: float = options["interval_s"]
        self.token: str = options["token"]
        self.address_file = Path(options["address_file"])
        self.latencies_s: list[float] = []
        self.greeted = 0
        self.gave_up = 0  # waits for a hello that was not sent in time
        self.hello_max_s = 0.0  # the longest wait for one that was
        self.nodes = [
            Node(self, number, options["nodes"], options["ranks"])
            for number in range(options["first"], options["first"] + options["count"])
        ]
        for node in self.nodes if options["running"] else ():
            node.work_as_if_ordered()

    def address(self) -> str:
        """The present address of the driver."""
        return self.address_file.read_text().strip()


class Node:
    """One node on its link."""

    def __init__(self, fleet: Fleet, number: int, nodes: int, ranks: int) -> None:
        self._fleet = fleet
        self.name = f"n{number:05d}"
        self._phase_s = fleet.interval_s * number / nodes
        self._sent: dict[int, float] = {}  # when each heartbeat left
        self._request = link_pb2.ConnectRequest()
        self._beat = self._request.heartbeat
        self._beat.host.load_1min = 1.5
        self._ranks = ranks
        self._steps: asyncio.Task[None] | None = None
        self._step = self._filled_step = 0
        self._wire: Wire | None = None
        self._linked = False
        self._dialled_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def hello(self) -> link_pb2.ExecutorHello:
        """The hello of this node."""
        devices = [
            types_pb2.Device(
                index=index, kind=types_pb2.DEVICE_KIND_CUDA, uuid=f"GPU-{self.name}-{index}",
                model="NVIDIA H200", memory_bytes=141 << 30,
            )
            for index in range(self._ranks)
        ]  # fmt: skip
        return link_pb2.ExecutorHello(
            protocol=link_pb2.ProtocolRange(lowest=1, highest=2),
            build="benchmark",
            node=self.name,
            incarnation=f"{self.name}-1",
            devices=devices,
            topology={"switch": f"s{int(self.name[1:]) // 32}"},
            # Without ports: a probe of one that refuses would prove the agent dead.
            hostname=self.name,
        )

    async def run(self) -> None:
        """Dial for ever."""
        metadata = ((HEADER, bearer(self._fleet.token)),)
        loop = asyncio.get_running_loop()
        backoff = Backoff(*BACKOFF_S)
        while True:
            ended = asyncio.Event()
            try:
                async with asyncio.timeout(CONNECT_S):
                    host, _, port = self._fleet.address().rpartition(":")
                    _, wire = await loop.create_connection(
                        lambda ended=ended: Wire(CONNECT, metadata, self._taken, ended.set),  # type: ignore[misc]
                        host, int(port),
                    )  # fmt: skip
            except (OSError, TimeoutError, ValueError):
                await backoff.sleep()
                continue
            self._wire, self._dialled_s = wire, time.monotonic()
            hello = link_pb2.ConnectRequest(hello=self.hello())
            wire.send(hello.SerializeToString())
            patience = loop.call_later(HELLO_S, self._give_up, wire)
            await ended.wait()
            patience.cancel()
            self._wire = None
            if self._linked:
                backoff.reset()
            self._leave()
            await backoff.sleep()

    def _give_up(self, wire: Wire) -> None:
        """The driver's hello has not come in time."""
        if not self._linked:
            self._fleet.gave_up += 1
            wire.close()

    def _taken(self, data: bytes) -> None:
        """A message of the driver has arrived."""
        message = link_pb2.ConnectResponse.FromString(data)
        if message.HasField("heartbeat_ack"):
            self._acknowledged(message.heartbeat_ack)
        elif message.HasField("desired_state"):
            self._obey(message.desired_state)
        elif message.HasField("hello"):
            self._linked = True
            fleet = self._fleet
            fleet.greeted += 1
            fleet.hello_max_s = max(fleet.hello_max_s, time.monotonic() - self._dialled_s)
            self._beat.epoch_seen.CopyFrom(message.hello.epoch)
            self._beat.desired_version = 0
            # Nodes beat at their own moments of the interval, as agents that started apart do.
            now_s, interval_s = time.monotonic(), self._fleet.interval_s
            self._due_s = now_s - (now_s - self._phase_s) % interval_s
            self._beat_when_due()

    def _leave(self) -> None:
        if self._linked:
            self._fleet.greeted -= 1
        self._linked = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat_when_due(self) -> None:
        """Send the heartbeat of this moment, and let the next one follow after the interval."""
        now_s = time.monotonic()
        self._due_s = max(self._due_s + self._fleet.interval_s, now_s)
        wait_s = self._due_s - now_s
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._beat_when_due)
        self._send()

    def _send(self) -> None:
        if self._wire is None or not self._linked:
            return
        self._fill()
        self._sent[self._beat.seq] = time.perf_counter()
        if len(self._sent) > MAX_SENT:
            del self._sent[next(iter(self._sent))]
        self._wire.send(self._request.SerializeToString())

    def _fill(self) -> None:
        beat, now_ns = self._beat, time.time_ns()
        beat.seq += 1
        seconds, nanos = divmod(now_ns, 1_000_000_000)
        beat.sent_at.seconds, beat.sent_at.nanos = seconds, nanos
        beat.host.network_sent_bytes = now_ns
        for worker in beat.workers:
            worker.step = self._step
            worker.status_age.nanos = nanos
        if self._step != self._filled_step:
            self._filled_step = self._step
            for item in beat.checkpoints:
                for sealed in item.sealed:
                    sealed.step = max(0, self._step - sealed.rank % SLOTS)

    def _acknowledged(self, ack: link_pb2.HeartbeatAck) -> None:
        sent = self._sent.pop(ack.seq, None)
        if sent is None:
            return
        self._fleet.latencies_s.append(time.perf_counter() - sent)
        self._beat.ack_driver_received_at.CopyFrom(ack.received_at)
        self._beat.ack_driver_sent_at.CopyFrom(ack.sent_at)
        self._beat.ack_received_at.FromNanoseconds(time.time_ns())

    def _obey(self, desired: link_pb2.DesiredState) -> None:
        beat, assignment = self._beat, desired.assignment
        beat.desired_version = desired.version
        beat.epoch_seen.CopyFrom(desired.epoch)
        beat.job, beat.attempt = assignment.job, assignment.attempt
        if self._steps is not None:
            self._steps.cancel()
            self._steps = None
        beat.phase = {
            link_pb2.DESIRED_PHASE_PREPARE: link_pb2.ATTEMPT_PHASE_PREPARED,
            link_pb2.DESIRED_PHASE_START: link_pb2.ATTEMPT_PHASE_RUNNING,
        }.get(desired.phase, link_pb2.ATTEMPT_PHASE_IDLE)
        beat.store_endpoint = "127.0.0.1:9" if assignment.job and 0 in assignment.ranks else ""
        del beat.workers[:], beat.checkpoints[:]
        if desired.phase == link_pb2.DESIRED_PHASE_START:
            self._work(assignment.job, assignment.ranks)
            self._steps = asyncio.ensure_future(self._train(assignment.job, assignment.attempt))
        self._send()

    def work_as_if_ordered(self) -> None:
        """Send the heartbeats of a node that trains, though no driver asks for it."""
        first = int(self.name[1:]) * self._ranks
        self._beat.job, self._beat.attempt = "bench", 1
        self._beat.phase = link_pb2.ATTEMPT_PHASE_RUNNING
        self._work("bench", range(first, first + self._ranks))

    def _work(self, job: str, ranks: Iterable[int]) -> None:
        item = self._beat.checkpoints.add(job=job)
        for rank in ranks:
            self._beat.workers.add(
                rank=rank, state=link_pb2.WORKER_STATE_RUNNING, pid=1000 + rank, phase="STEP"
            )
            for slot in range(SLOTS):
                item.sealed.add(rank=rank, attempt=1, step=slot, layout_digest="0" * 64)
        self._step = max(self._step, 1)

    async def _train(self, job: str, attempt: int) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            self._step += 1
            if self._beat.workers[0].rank != 0 or self._wire is None:
                continue
            record = types_pb2.StepRecord(attempt=attempt, step=self._step, loss=2.0)
            record.step_time.FromMilliseconds(int(1000 * STEP_S))
            report = link_pb2.ReportStepsRequest(job=job, records=[record])
            self._wire.call(REPORT_STEPS, report.SerializeToString())


async def _main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    fleet = Fleet(json.loads(await reader.readline()))
    tasks = [asyncio.ensure_future(node.run()) for node in fleet.nodes]
    while line := await reader.readline():
        answer: dict[str, Any] = {
            "greeted": fleet.greeted, "gave_up": fleet.gave_up, "hello_max_s": fleet.hello_max_s,
        }  # fmt: skip
        if json.loads(line).get("latencies"):
            answer["latencies_s"], fleet.latencies_s = fleet.latencies_s, []
        print(json.dumps(answer), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, PADDED, ACK = 1, 4, 8, 1
INITIAL_WINDOW_SIZE = 4  # an identifier of SETTINGS
WINDOW_BYTES = 1 << 24  # what the server may send before the next window update
DEFAULT_WINDOW_BYTES = 65_535
FRAME_BYTES = 16_384  # the least that every server takes
MAX_WAITING = 64  # messages for a window that is full; beyond, the newest is dropped
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_HEAD = struct.Struct(">BHBBI")
_U32 = struct.Struct(">I")


class Wire(asyncio.Protocol):
    """One connection: the stream of a node, and short calls whose answers are dropped."""

    def __init__(
        self,
        path: str,
        metadata: Iterable[tuple[str, str]],
        taken: Callable[[bytes], None],
        ended: Callable[[], None],
    ) -> None:
        self._path, self._metadata, self._taken, self._ended = path, tuple(metadata), taken, ended
        self._transport: asyncio.Transport | None = None
        self._received, self._message = bytearray(), bytearray()
        self._windows = {0: DEFAULT_WINDOW_BYTES, 1: DEFAULT_WINDOW_BYTES}
        self._initial = DEFAULT_WINDOW_BYTES
        self._waiting: list[bytes] = []
        self._unconfirmed = 0  # bytes received since the last update of our window
        self._next_stream = 3

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Open the stream."""
        self._transport = cast("asyncio.Transport", transport)
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, WINDOW_BYTES)
        more = _U32.pack(WINDOW_BYTES - DEFAULT_WINDOW_BYTES)
        self._transport.write(
            _PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, more)
            + _frame(HEADERS, END_HEADERS, 1, self._headers(self._path))
        )  # fmt: skip

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.close()

    def close(self) -> None:
        """End the connection; ``ended`` is called once."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
            self._ended()

    def send(self, message: bytes) -> None:
        """Send one message on the stream, or when the server's windows allow it."""
        self._waiting.append(b"\0" + _U32.pack(len(message)) + message)
        if len(self._waiting) > MAX_WAITING:
            self._waiting.pop()
        self._flush()

    def call(self, path: str, message: bytes) -> None:
        """Send a call with one request."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        data = b"\0" + _U32.pack(len(message)) + message
        if self._transport is None or len(data) > min(self._windows[0], FRAME_BYTES):
            return
        self._windows[0] -= len(data)
        self._transport.write(
            _frame(HEADERS, END_HEADERS, stream, self._headers(path))
            + _frame(DATA, END_STREAM, stream, data)
        )

    def data_received(self, data: bytes) -> None:
        """Take what has arrived, frame by frame."""
        received = self._received
        received += data
        at = 0
        while len(received) - at >= _HEAD.size:
            high, low, kind, flags, stream = _HEAD.unpack_from(received, at)
            end = at + _HEAD.size + (high << 16 | low)
            if len(received) < end:
                break
            self._take(kind, flags, stream, bytes(received[at + _HEAD.size : end]))
            at = end
        del received[:at]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._confirm(len(payload))
            if flags & PADDED:
                payload = payload[1 : len(payload) - payload[0]]
            if stream == 1:
                self._add(payload)
        elif kind == WINDOW_UPDATE and stream in self._windows:
            self._windows[stream] += _U32.unpack(payload)[0]
            self._flush()
        elif kind == SETTINGS and not flags & ACK:
            self._settle(payload)
        elif kind == PING and not flags & ACK and self._transport is not None:
            self._transport.write(_frame(PING, ACK, 0, payload))
        ends = kind in (DATA, HEADERS) and flags & END_STREAM
        if kind == GOAWAY or (stream == 1 and (ends or kind == RST_STREAM)):
            self.close()

    def _settle(self, payload: bytes) -> None:
        for name, value in struct.iter_unpack(">HI", payload):
            if name == INITIAL_WINDOW_SIZE:
                self._windows[1] += value - self._initial
                self._initial = value
        if self._transport is not None:
            self._transport.write(_frame(SETTINGS, ACK, 0, b""))
        self._flush()

    def _confirm(self, count: int) -> None:
        self._unconfirmed += count
        if self._unconfirmed > WINDOW_BYTES // 4 and self._transport is not None:
            more = _U32.pack(self._unconfirmed)
            self._transport.write(
                _frame(WINDOW_UPDATE, 0, 0, more) + _frame(WINDOW_UPDATE, 0, 1, more)
            )
            self._unconfirmed = 0

    def _add(self, payload: bytes) -> None:
        message = self._message
        message += payload
        while len(message) >= 5:
            end = 5 + _U32.unpack_from(message, 1)[0]
            if len(message) < end:
                return
            taken = bytes(message[5:end])
            del message[:end]
            self._taken(taken)

    def _flush(self) -> None:
        while self._waiting and self._transport is not None:
            data = self._waiting[0]
            room = min(self._windows[0], self._windows[1])
            if len(data) > room:
                return
            self._waiting.pop(0)
            self._windows[0] -= len(data)
            self._windows[1] -= len(data)
            for first in range(0, len(data), FRAME_BYTES):
                part = data[first : first + FRAME_BYTES]
                self._transport.write(_frame(DATA, 0, 1, part))

    def _headers(self, path: str) -> bytes:
        # :method POST and :scheme http are entries 3 and 6 of the static table (RFC 7541).
        fields = (
            (":path", path), (":authority", "driver"), ("content-type", "application/grpc"),
            ("te", "trailers"), *self._metadata,
        )  # fmt: skip
        return b"\x83\x86" + b"".join(b"\0" + _text(k) + _text(v) for k, v in fields)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return _HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def _text(value: str) -> bytes:
    """A string without Huffman coding, behind its length (RFC 7541, 5.1 and 5.2)."""
    data = value.encode()
    size = len(data)
    if size < 127:
        return bytes([size]) + data
    head, size = [127], size - 127
    while size >= 128:
        head.append(size % 128 + 128)
        size //= 128
    return bytes([*head, size]) + data


if __name__ == "__main__":
    arm_parent_death()
    uvloop.run(_main())

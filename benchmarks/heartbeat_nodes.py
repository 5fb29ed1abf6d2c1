"""Nodes of `heartbeats.py`: gRPC streams on one TCP connection each, many per process.

Each node does what an agent does on its link: it dials, says hello, sends heartbeats at its
interval and at once on change, obeys desired states without running anything, and reports steps if
it has rank 0. The parent gives orders on stdin, one JSON object per line, and gets answers on
stdout.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import uvloop
from heartbeat_wire import Wire

from megascale.v1 import link_pb2, types_pb2
from megascale_common.node.link_limits import HELLO_S
from megascale_common.node.process import arm_parent_death
from megascale_common.service.identity.certificates import in_folder
from megascale_common.service.identity.peers import HEADER, Role, bearer
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
        # The folder of the cluster's certificates; each node shows one of its own.
        self.certificates = Path(options["certificates"]) if options.get("certificates") else None
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
        """Where the driver serves now."""
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
        self._context: ssl.SSLContext | None = None
        if fleet.certificates is not None:
            files = in_folder(fleet.certificates, Role.EXECUTOR, self.name)
            self._context = files.context(ssl.PROTOCOL_TLS_CLIENT)
            self._context.set_alpn_protocols(["h2"])

    def hello(self) -> link_pb2.ExecutorHello:
        """Who this node is."""
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
                        host, int(port), ssl=self._context,
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


if __name__ == "__main__":
    arm_parent_death()
    uvloop.run(_main())

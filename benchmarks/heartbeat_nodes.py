"""Nodes of `heartbeats.py`: real gRPC streams, one TCP connection each, many per process.

Each node does what an agent does on its link: it dials, says hello, sends heartbeats at its
interval and at once on change, obeys desired states without running anything, and reports steps if
it has rank 0. The parent gives orders on stdin, one JSON object per line, and gets answers on
stdout.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import grpc
import uvloop

from megascale.v1 import link_pb2, link_pb2_grpc, types_pb2
from megascale_common.node.process import arm_parent_death
from megascale_common.service.token import HEADER, bearer

RANKS = 8
SLOTS = 2  # sealed snapshots per rank that a heartbeat names
STEP_S = 1.0
RETRY_S = (0.2, 2.0)
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.use_local_subchannel_pool", 1),  # a TCP connection of its own for each node
    ("grpc.enable_http_proxy", 0),
    ("grpc.min_reconnect_backoff_ms", 5_000),
]


class Fleet:
    """The nodes of this process, and what they have measured since the last order."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.interval_s: float = options["interval_s"]
        self.token: str = options["token"]
        self.address_file = Path(options["address_file"])
        self.latencies_s: list[float] = []
        self.greeted = 0
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
        self._sent: dict[int, tuple[float, int]] = {}
        self._beat = link_pb2.Heartbeat(host=link_pb2.HostCounters(load_1min=1.5))
        self._request = link_pb2.ConnectRequest()
        self._changed = asyncio.Event()
        self._ranks = ranks
        self._steps: asyncio.Task[None] | None = None
        self._step = 0
        self._channel: grpc.aio.Channel | None = None

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
            executor_endpoint="127.0.0.1:9",
            checkpoint_endpoint="127.0.0.1:9",
            hostname=self.name,
        )

    async def run(self) -> None:
        """Dial for ever."""
        metadata = ((HEADER, bearer(self._fleet.token)),)
        while True:
            try:
                address = self._fleet.address()
                async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
                    self._channel = channel
                    stub = link_pb2_grpc.ExecutorLinkServiceStub(channel)
                    await self._session(stub.Connect(metadata=metadata))
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, OSError):
                pass
            await asyncio.sleep(random.uniform(*RETRY_S))

    async def _session(self, call: Any) -> None:
        await call.write(link_pb2.ConnectRequest(hello=self.hello()))
        first = await call.read()
        if first is grpc.aio.EOF or first.WhichOneof("message") != "hello":
            return
        self._fleet.greeted += 1
        self._beat.epoch_seen.CopyFrom(first.hello.epoch)
        self._beat.desired_version = 0
        beats = asyncio.ensure_future(self._send(call))
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                if message.HasField("heartbeat_ack"):
                    self._acknowledged(message.heartbeat_ack)
                elif message.HasField("desired_state"):
                    self._obey(message.desired_state)
        finally:
            self._fleet.greeted -= 1
            beats.cancel()

    async def _send(self, call: Any) -> None:
        # Nodes beat at their own moments of the interval, as agents that started apart do.
        interval_s, now_s = self._fleet.interval_s, time.monotonic()
        due_s = now_s + interval_s - (now_s - self._phase_s) % interval_s
        while True:
            self._changed.clear()
            self._fill()
            self._sent[self._beat.seq] = (time.perf_counter(), time.time_ns())
            await call.write(self._request)
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, due_s - time.monotonic()))
            except TimeoutError:
                due_s = max(due_s + interval_s, time.monotonic())

    def _fill(self) -> None:
        beat, now_ns = self._beat, time.time_ns()
        beat.seq += 1
        beat.sent_at.FromNanoseconds(now_ns)
        beat.host.network_sent_bytes = now_ns
        for worker in beat.workers:
            worker.step = self._step
            worker.status_age.FromNanoseconds(now_ns % 1_000_000_000)
        for item in beat.checkpoints:
            for sealed in item.sealed:
                sealed.step = max(0, self._step - sealed.rank % SLOTS)
        self._request.heartbeat.CopyFrom(beat)

    def _acknowledged(self, ack: link_pb2.HeartbeatAck) -> None:
        sent = self._sent.pop(ack.seq, None)
        if sent is None:
            return
        self._fleet.latencies_s.append(time.perf_counter() - sent[0])
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
        self._changed.set()

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
        metadata = ((HEADER, bearer(self._fleet.token)),)
        while True:
            await asyncio.sleep(STEP_S)
            self._step += 1
            if self._beat.workers[0].rank != 0 or self._channel is None:
                continue
            record = types_pb2.StepRecord(attempt=attempt, step=self._step, loss=2.0)
            record.step_time.FromMilliseconds(int(1000 * STEP_S))
            stub = link_pb2_grpc.ExecutorLinkServiceStub(self._channel)
            report = link_pb2.ReportStepsRequest(job=job, records=[record])
            try:
                await stub.ReportSteps(iter([report]), metadata=metadata, timeout=5.0)
            except grpc.aio.AioRpcError:
                continue


async def _main() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    fleet = Fleet(json.loads(await reader.readline()))
    tasks = [asyncio.ensure_future(node.run()) for node in fleet.nodes]
    while line := await reader.readline():
        answer: dict[str, Any] = {"greeted": fleet.greeted}
        if json.loads(line).get("latencies"):
            answer["latencies_s"], fleet.latencies_s = fleet.latencies_s, []
        print(json.dumps(answer), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    arm_parent_death()
    uvloop.run(_main())

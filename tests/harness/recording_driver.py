"""A driver for tests of the node's side of the link, over real gRPC; it records what nodes send."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from tests.harness.waiting import LOOK_INTERVAL_S, ProgressWatch

from megascale.v1 import link_pb2, link_pb2_grpc, types_pb2
from megascale_common.service.server import RpcServer
from megascale_job.config import JobConfig
from megascale_job.wire.spec import to_proto


def whole_on_one_node(config: JobConfig, attempt: int = 1) -> link_pb2.AttemptAssignment:
    """An attempt of ``config`` that restores nothing, with all its ranks on node n0."""
    size = config.layout.world_size
    return link_pb2.AttemptAssignment(
        job=config.name,
        attempt=attempt,
        spec_revision=1,
        spec=to_proto(config),
        ranks=range(size),
        devices=range(size),
        rank_table_digest="d" * 32,
        restore=link_pb2.RestorePlan(source=types_pb2.RESTORE_SOURCE_NONE),
    )


class RecordingDriver(link_pb2_grpc.ExecutorLinkServiceServicer):
    """Serves one node: sends ``desired`` on connect and on :meth:`want`, keeps what it receives."""

    def __init__(
        self, cluster: str, token: str, *, revision: int = 1, interval_s: float = 0.5
    ) -> None:
        self.cluster, self.epoch = (
            cluster,
            types_pb2.Epoch(cluster_generation=1, create_revision=revision),
        )
        self.interval_s = interval_s
        self.hellos: list[link_pb2.ExecutorHello] = []
        self.beats: list[link_pb2.Heartbeat] = []
        self.beat_times: list[float] = []
        self.steps: list[types_pb2.StepRecord] = []
        self.desired: link_pb2.DesiredState | None = None
        self.connections = 0
        self.refusal: grpc.StatusCode | None = None
        self.refused = 0
        self.spans: list[link_pb2.ReportSpansRequest] = []
        self.reads_spans = asyncio.Event()
        self.reads_spans.set()
        self._version = 0
        self._news = asyncio.Condition()
        self._outbox: asyncio.Queue[link_pb2.ConnectResponse] | None = None
        self._server = RpcServer(token)
        link_pb2_grpc.add_ExecutorLinkServiceServicer_to_server(self, self._server.server)

    async def start(self, address_file: Path, bind: str = "127.0.0.1:0") -> str:
        """Serve and write the address to a file."""
        address = await self._server.start(bind, ["megascale.v1.ExecutorLinkService"])
        address_file.write_text(address + "\n")
        return address

    async def stop(self) -> None:
        """Cut every connection."""
        await self._server.stop(grace_s=0)

    async def Connect(
        self, request_iterator: AsyncIterator[link_pb2.ConnectRequest], context: Any
    ) -> AsyncIterator[link_pb2.ConnectResponse]:
        """Hello both ways, then desired states and acknowledgements."""
        outbox: asyncio.Queue[link_pb2.ConnectResponse] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, outbox))
        self.connections += 1
        self._outbox = outbox
        interval = Duration()
        interval.FromNanoseconds(round(self.interval_s * 1e9))
        hello = link_pb2.DriverHello(
            protocol=link_pb2.ProtocolRange(lowest=1, highest=2),
            cluster=self.cluster,
            epoch=self.epoch,
            heartbeat_interval=interval,
        )
        try:
            yield link_pb2.ConnectResponse(hello=hello)
            if self.desired is not None:
                yield link_pb2.ConnectResponse(desired_state=self.desired)
            while True:
                yield await outbox.get()
        finally:
            reader.cancel()

    async def ReportSteps(
        self, request_iterator: AsyncIterator[link_pb2.ReportStepsRequest], context: Any
    ) -> link_pb2.ReportStepsResponse:
        """Accept all records, or refuse them with the status ``refusal``; known ones are dropped.

        A link that breaks, as on a machine that stands still, has records sent again.
        """
        if self.refusal is not None:
            self.refused += 1
            await context.abort(self.refusal, "refused by the test")
        taken = [record async for request in request_iterator for record in request.records]
        async with self._news:
            known = {(record.attempt, record.step) for record in self.steps}
            self.steps += [each for each in taken if (each.attempt, each.step) not in known]
            self._news.notify_all()
        return link_pb2.ReportStepsResponse(accepted=len(taken))

    async def ReportSpans(
        self, request_iterator: AsyncIterator[link_pb2.ReportSpansRequest], context: Any
    ) -> link_pb2.ReportSpansResponse:
        """Keep all batches, but read none while ``reads_spans`` is cleared."""
        await self.reads_spans.wait()
        async for batch in request_iterator:
            async with self._news:
                self.spans.append(batch)
                self._news.notify_all()
            await self.reads_spans.wait()
        return link_pb2.ReportSpansResponse()

    async def _read(
        self,
        requests: AsyncIterator[link_pb2.ConnectRequest],
        outbox: asyncio.Queue[link_pb2.ConnectResponse],
    ) -> None:
        async for request in requests:
            async with self._news:
                if request.WhichOneof("message") == "hello":
                    self.hellos.append(request.hello)
                else:
                    self.beats.append(request.heartbeat)
                    self.beat_times.append(asyncio.get_running_loop().time())
                    ack = link_pb2.HeartbeatAck(seq=request.heartbeat.seq)
                    ack.received_at.GetCurrentTime()
                    ack.sent_at.GetCurrentTime()
                    outbox.put_nowait(link_pb2.ConnectResponse(heartbeat_ack=ack))
                self._news.notify_all()

    def want(
        self,
        phase: link_pb2.DesiredPhase.ValueType,
        assignment: link_pb2.AttemptAssignment | None = None,
    ) -> int:
        """Send a new desired state; returns its version."""
        self._version += 1
        self.desired = link_pb2.DesiredState(
            epoch=self.epoch, version=self._version, phase=phase, assignment=assignment
        )
        self.send(self.desired)
        return self._version

    def send(self, desired: link_pb2.DesiredState) -> None:
        """Send any desired state, now."""
        if self._outbox is not None:
            self._outbox.put_nowait(link_pb2.ConnectResponse(desired_state=desired))

    async def until(self, condition: Callable[[], bool], what: str = "news of the node") -> None:
        """Wait for ``condition``, checked at each message, as long as the attempt advances."""
        watch = ProgressWatch(what, self._moves, story=lambda: f"last heartbeat: {self.beats[-1:]}")
        async with self._news:
            while not condition():
                watch.check()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), LOOK_INTERVAL_S)

    async def until_joined(self) -> None:
        """Wait for the node's first heartbeat, and for the hello that names its checkpoint daemon.

        An agent whose daemon is slow to start links without it, and again when the daemon serves.
        """
        await self.until(
            lambda: bool(self.beats and self.hellos[-1].checkpoint_endpoint),
            "the node and its daemon",
        )

    async def until_phase(
        self, phase: link_pb2.AttemptPhase.ValueType, *, attempt: int | None = None
    ) -> link_pb2.Heartbeat:
        """Wait until the newest heartbeat shows ``phase`` (of ``attempt``); returns it."""
        await self.until(
            lambda: (
                bool(self.beats)
                and self.beats[-1].phase == phase
                and (attempt is None or self.beats[-1].attempt == attempt)
            ),
            f"phase {link_pb2.AttemptPhase.Name(phase)}",
        )
        return self.beats[-1]

    def _moves(self) -> tuple[object, ...]:
        """What changes as the attempt advances; a repeated heartbeat changes nothing."""
        last = self.beats[-1] if self.beats else link_pb2.Heartbeat()
        workers = [
            (worker.rank, worker.state, worker.step, worker.phase) for worker in last.workers
        ]
        return (
            len(self.hellos),
            len(self.steps),
            self.connections,
            last.attempt,
            last.phase,
            len(last.checks),
            workers,
        )

"""An executor without workers, on a real link to a real driver: it obeys, or does as a test sets.

Use it in the test's process (:class:`FakeExecutor`) or as a process of its own that can be killed
and stopped: ``python -m tests.harness.fake_executor --node n1 --driver-file F --token-file F``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp
from tests.harness.waiting import eventually

from megascale.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    driver_pb2,
    executor_pb2,
    executor_pb2_grpc,
    link_pb2,
    link_pb2_grpc,
    types_pb2,
)
from megascale_common.node.process import arm_parent_death, boot_id, new_incarnation
from megascale_common.service.channel import open_channel
from megascale_common.service.server import RpcServer
from megascale_common.service.start import build_version

RETRY_S = 0.1


class _Checkpoints(checkpoint_pb2_grpc.CheckpointServiceServicer):
    """A checkpoint daemon with the answers that the test has set."""

    def __init__(self) -> None:
        self.opened: list[checkpoint_pb2.OpenAttemptRequest] = []
        self.restore = link_pb2.RestorePlan(source=types_pb2.RESTORE_SOURCE_NONE)
        self.open_failures = 0
        self.commits: list[driver_pb2.Checkpoint] = []

    async def OpenAttempt(self, request: checkpoint_pb2.OpenAttemptRequest, context: Any) -> Any:
        if self.open_failures:
            self.open_failures -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "storage is away")
        self.opened.append(request)
        return checkpoint_pb2.OpenAttemptResponse(restore=self.restore, log_seq=len(self.opened))

    async def ReportPrepared(
        self, request: checkpoint_pb2.ReportPreparedRequest, context: Any
    ) -> Any:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this executor has no workers")

    async def WatchProgress(
        self, request: checkpoint_pb2.WatchProgressRequest, context: Any
    ) -> AsyncIterator[checkpoint_pb2.WatchProgressResponse]:
        yield checkpoint_pb2.WatchProgressResponse()

    async def ListCommits(self, request: checkpoint_pb2.ListCommitsRequest, context: Any) -> Any:
        return checkpoint_pb2.ListCommitsResponse(checkpoints=self.commits)


class FakeExecutor(executor_pb2_grpc.ExecutorServiceServicer):
    """One node. ``steps`` > 0: an attempt finishes after that many steps, one every ``step_s``."""

    def __init__(
        self,
        node: str,
        token: str,
        find_driver: Callable[[], str],
        *,
        devices: int = 4,
        kind: types_pb2.DeviceKind.ValueType = types_pb2.DEVICE_KIND_CPU,
        switch: str = "s0",
        steps: int = 0,
        step_s: float = 0.02,
        interval_s: float = 1.0,
        protocol: int = 2,
    ) -> None:
        self.protocol = protocol
        self.node, self.incarnation = node, new_incarnation()
        self.checkpoints = _Checkpoints()
        self.desired = link_pb2.DesiredState()
        self.history: list[link_pb2.DesiredState] = []
        self.phase: link_pb2.AttemptPhase.ValueType = link_pb2.ATTEMPT_PHASE_IDLE
        self.job, self.attempt = "", 0
        self.workers: list[link_pb2.WorkerStatus] = []
        self.checks: list[types_pb2.CheckResult] = []
        self.progress: list[link_pb2.CheckpointProgress] = []
        self.acks: list[link_pb2.HeartbeatAck] = []
        self.obeys = True
        self.gives_way = False
        self.steps, self._step_s, self._interval_s = steps, step_s, interval_s
        self._token, self._find_driver = token, find_driver
        self._devices = [
            types_pb2.Device(index=i, kind=kind, uuid=f"{node}-{i}") for i in range(devices)
        ]
        self._switch = switch
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._training: asyncio.Task[None] | None = None
        self._server: RpcServer | None = None
        self._endpoint = ""
        self._seq = 0

    async def __aenter__(self) -> FakeExecutor:
        self._server = RpcServer(self._token)
        executor_pb2_grpc.add_ExecutorServiceServicer_to_server(self, self._server.server)
        checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server(
            self.checkpoints, self._server.server
        )
        self._endpoint = await self._server.start("127.0.0.1:0", ["megascale.v1.ExecutorService"])
        self._tasks.append(asyncio.create_task(self._dial()))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._training is not None:
            self._tasks.append(self._training)
        pending = set(self._tasks)
        while pending:  # a library may swallow a cancellation: cancel again
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=1.0)
        if self._server is not None:
            await self._server.stop(0)

    def report(
        self,
        phase: link_pb2.AttemptPhase.ValueType | None = None,
        *,
        workers: list[link_pb2.WorkerStatus] | None = None,
        checks: list[types_pb2.CheckResult] | None = None,
        progress: list[link_pb2.CheckpointProgress] | None = None,
    ) -> None:
        """Change the content of the heartbeat and send one at once."""
        self.phase = self.phase if phase is None else phase
        self.workers = self.workers if workers is None else workers
        self.checks = self.checks if checks is None else checks
        self.progress = self.progress if progress is None else progress
        self._changed.set()

    def fail(self, rank: int, *, status: int = 1, kind: str = "", error: str = "") -> None:
        """One worker fails; the node reports the attempt as failed."""
        if self._training is not None:
            self._training.cancel()
        stamp = Timestamp()
        stamp.FromNanoseconds(time.time_ns())
        worker = link_pb2.WorkerStatus(
            rank=rank, state=link_pb2.WORKER_STATE_EXITED, exit_status=status, error=error,
            error_kind=kind, exited_at=stamp,
        )  # fmt: skip
        self.report(link_pb2.ATTEMPT_PHASE_FAILED, workers=[worker])

    def hello(self) -> link_pb2.ExecutorHello:
        return link_pb2.ExecutorHello(
            protocol=link_pb2.ProtocolRange(lowest=1, highest=self.protocol),
            build=build_version(),
            node=self.node,
            incarnation=self.incarnation,
            boot_id=boot_id(),
            devices=self._devices,
            topology={"switch": self._switch},
            executor_endpoint=self._endpoint,
            checkpoint_endpoint=self._endpoint,
        )

    async def until_usable(self) -> None:
        """Wait until the driver may give this node work: it is alive with its hello, but only its
        first report shows that it is idle.
        """
        await eventually(lambda: bool(self.acks), f"a heartbeat of {self.node} is acknowledged")

    def heartbeat(self) -> link_pb2.Heartbeat:
        self._seq += 1
        return link_pb2.Heartbeat(
            seq=self._seq,
            epoch_seen=self.desired.epoch,
            desired_version=self.desired.version,
            job=self.job,
            attempt=self.attempt,
            phase=self.phase,
            workers=self.workers,
            checks=self.checks,
            checkpoints=self.progress,
            store_endpoint="127.0.0.1:1" if self.job else "",
        )

    async def GetNodeStatus(self, request: executor_pb2.GetNodeStatusRequest, context: Any) -> Any:
        return executor_pb2.GetNodeStatusResponse(hello=self.hello())

    async def RunNodeDiagnostics(
        self, request: executor_pb2.RunNodeDiagnosticsRequest, context: Any
    ) -> Any:
        if self.gives_way:
            await context.abort(grpc.StatusCode.ABORTED, "the node was given work")
        checks = [
            types_pb2.CheckResult(name=name, verdict=types_pb2.CHECK_VERDICT_PASS)
            for name in request.checks or ("device_present", "compute")
        ]
        return executor_pb2.RunNodeDiagnosticsResponse(checks=checks)

    async def TailWorkerLogs(
        self, request: executor_pb2.TailWorkerLogsRequest, context: Any
    ) -> AsyncIterator[executor_pb2.TailWorkerLogsResponse]:
        for number in range(request.lines):
            line = f"{request.job} attempt {request.attempt} rank {request.rank} line {number}"
            yield executor_pb2.TailWorkerLogsResponse(line=line)

    async def _dial(self) -> None:
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, OSError, ValueError):
                channel = open_channel(self._find_driver(), self._token)
                try:
                    await self._link(channel)
                finally:
                    await channel.close()
            await asyncio.sleep(RETRY_S)

    async def _link(self, channel: grpc.aio.Channel) -> None:
        call = link_pb2_grpc.ExecutorLinkServiceStub(channel).Connect(self._outgoing())
        async for message in call:
            if message.WhichOneof("message") == "desired_state":
                self._obey(message.desired_state, channel)
            elif message.WhichOneof("message") == "heartbeat_ack":
                self.acks.append(message.heartbeat_ack)

    async def _outgoing(self) -> AsyncIterator[link_pb2.ConnectRequest]:
        yield link_pb2.ConnectRequest(hello=self.hello())
        while True:
            self._changed.clear()
            yield link_pb2.ConnectRequest(heartbeat=self.heartbeat())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()

    def _obey(self, desired: link_pb2.DesiredState, channel: grpc.aio.Channel) -> None:
        self.desired = desired
        self.history.append(desired)
        if not self.obeys:
            return
        assignment = desired.assignment
        if desired.phase == link_pb2.DESIRED_PHASE_IDLE:
            self._stop()
            self.job, self.attempt, self.workers = "", 0, []
            self.report(link_pb2.ATTEMPT_PHASE_IDLE)
        elif desired.phase == link_pb2.DESIRED_PHASE_PREPARE:
            self._stop()
            self.job, self.attempt, self.workers = assignment.job, assignment.attempt, []
            self.report(link_pb2.ATTEMPT_PHASE_PREPARED)
        elif self._training is None or self._training.done() or self.attempt != assignment.attempt:
            if (self.job, self.attempt) == (assignment.job, assignment.attempt) and self.phase in (
                link_pb2.ATTEMPT_PHASE_RUNNING,
                link_pb2.ATTEMPT_PHASE_FINISHED,
            ):
                return  # a new driver repeats the order that is carried out already
            self.job, self.attempt = assignment.job, assignment.attempt
            self.report(link_pb2.ATTEMPT_PHASE_RUNNING)
            self._training = asyncio.create_task(self._train(assignment))

    def _stop(self) -> None:
        if self._training is not None:
            self._training.cancel()
            self._training = None

    async def _train(self, assignment: link_pb2.AttemptAssignment) -> None:
        first = assignment.restore.step
        for step in range(first + 1, self.steps + 1):
            await asyncio.sleep(self._step_s)
            if 0 in assignment.ranks:
                await self._report_step(assignment, step)
        if self.steps:
            self.report(link_pb2.ATTEMPT_PHASE_FINISHED)

    async def _report_step(self, assignment: link_pb2.AttemptAssignment, step: int) -> None:
        record = types_pb2.StepRecord(attempt=assignment.attempt, step=step, loss=1.0 / step)

        async def records() -> AsyncIterator[link_pb2.ReportStepsRequest]:
            yield link_pb2.ReportStepsRequest(job=assignment.job, records=[record])

        while True:
            with contextlib.suppress(grpc.aio.AioRpcError, OSError):
                channel = open_channel(self._find_driver(), self._token)
                try:
                    await link_pb2_grpc.ExecutorLinkServiceStub(channel).ReportSteps(
                        records(), timeout=2.0
                    )
                    return
                finally:
                    await channel.close()
            await asyncio.sleep(RETRY_S)


async def _main(options: argparse.Namespace) -> None:
    def find() -> str:
        return str(options.driver_file.read_text()).strip()

    token = options.token_file.read_text().strip()
    executor = FakeExecutor(options.node, token, find, steps=options.steps, step_s=options.step_s)
    async with executor:
        await executor.until_usable()
        if options.usable_file is not None:
            options.usable_file.touch()
        await asyncio.Event().wait()


if __name__ == "__main__":
    arm_parent_death()
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", required=True)
    parser.add_argument("--driver-file", required=True, type=Path)
    parser.add_argument("--token-file", required=True, type=Path)
    parser.add_argument("--usable-file", type=Path, help="made once the driver may use the node")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--step-s", type=float, default=0.02)
    asyncio.run(_main(parser.parse_args()))

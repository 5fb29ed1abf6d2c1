"""A driver with scripted answers on a real socket, for tests of clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from megascale.v1 import driver_pb2, driver_pb2_grpc, job_pb2, types_pb2
from megascale_common.service.errors import ServiceError
from megascale_common.service.server import RpcServer
from megascale_common.service.status import abort, of_code

TOKEN = "token-of-the-tests"
POLL_INTERVAL_S = 0.01


class ScriptedDriver(driver_pb2_grpc.DriverServiceServicer):
    """Answers with the errors of the test, each once, and then with success."""

    def __init__(self) -> None:
        self.errors: list[ServiceError] = []
        self.requests: list[Any] = []
        self.updates: list[int] = []
        self.break_after: int | None = None
        self.forgets_tokens = False
        self.phase = types_pb2.JOB_PHASE_SUCCEEDED
        self.address = ""
        self.open_streams = 0
        self.profiles: list[driver_pb2.Profile] = []  # as GetJob shows them, one after the other
        self.jobs: list[driver_pb2.Job] = []  # as ListJobs and GetJob show them
        self.phases: list[types_pb2.JobPhase.ValueType] = []  # as WatchJob shows them
        self.unknown: set[str] = set()  # names of jobs that do not exist
        self.lost_ranks: set[int] = set()  # whose node does not answer
        self.checkpoints: list[driver_pb2.Checkpoint] = []
        self.hostile = ""  # text at the end of each event and of each line of a log
        self.verdicts: dict[str, types_pb2.CheckVerdict.ValueType] = {}
        self.streamed_note = ""  # the driver says so at the begin of each stream
        self.server = RpcServer(TOKEN)

    async def start(self) -> str:
        driver_pb2_grpc.add_DriverServiceServicer_to_server(self, self.server.server)
        self.address = await self.server.start("127.0.0.1:0", ["megascale.v1.DriverService"])
        return self.address

    async def _note(self, request: Any, context: Any) -> None:
        self.requests.append(request)
        if self.errors:
            await abort(context, self.errors.pop(0))

    async def SubmitJob(self, request: Any, context: Any) -> driver_pb2.SubmitJobResponse:
        await self._note(request, context)
        return driver_pb2.SubmitJobResponse(job=driver_pb2.Job(spec=request.spec))

    async def GetJob(self, request: Any, context: Any) -> driver_pb2.GetJobResponse:
        await self._note(request, context)
        if request.name in self.unknown:
            await abort(context, of_code("NOT_FOUND", "JOB_NOT_FOUND", f"no job {request.name}"))
        job = driver_pb2.Job(spec=job_pb2.JobSpec(name=request.name), phase=self.phase)
        for known in self.jobs:
            if known.spec.name == request.name:
                job.CopyFrom(known)
        if self.profiles:
            job.profile.CopyFrom(self.profiles.pop(0))
        return driver_pb2.GetJobResponse(job=job)

    async def ListJobs(self, request: Any, context: Any) -> driver_pb2.ListJobsResponse:
        await self._note(request, context)
        return driver_pb2.ListJobsResponse(jobs=self.jobs)

    async def ProfileJob(self, request: Any, context: Any) -> driver_pb2.ProfileJobResponse:
        await self._note(request, context)
        return driver_pb2.ProfileJobResponse(
            profile=driver_pb2.Profile(id="p1", first_step=7, last_step=8)
        )

    async def CordonNode(self, request: Any, context: Any) -> driver_pb2.CordonNodeResponse:
        await self._note(request, context)
        cordoned = types_pb2.NODE_DISPOSITION_CORDONED
        node = driver_pb2.Node(
            name=request.name, disposition=cordoned, disposition_reason=request.reason
        )
        return driver_pb2.CordonNodeResponse(node=node, consequence="job x goes on there")

    async def UncordonNode(self, request: Any, context: Any) -> driver_pb2.UncordonNodeResponse:
        await self._note(request, context)
        node = driver_pb2.Node(
            name=request.name, disposition=types_pb2.NODE_DISPOSITION_SCHEDULABLE
        )
        return driver_pb2.UncordonNodeResponse(node=node)

    async def RunDiagnostics(self, request: Any, context: Any) -> driver_pb2.RunDiagnosticsResponse:
        await self._note(request, context)
        names = request.checks or ["device_present", "matrix_product"]
        verdicts = dict(self.verdicts)
        checks = [
            types_pb2.CheckResult(
                name=name,
                verdict=verdicts.get(name, types_pb2.CHECK_VERDICT_PASS),
                detail="as it is",
            )
            for name in names
        ]
        return driver_pb2.RunDiagnosticsResponse(checks=checks)

    async def ListEvents(self, request: Any, context: Any) -> driver_pb2.ListEventsResponse:
        await self._note(request, context)
        return driver_pb2.ListEventsResponse(events=[self._event(seq) for seq in self.updates])

    async def WatchEvents(
        self, request: Any, context: Any
    ) -> AsyncIterator[driver_pb2.WatchEventsResponse]:
        await self._note(request, context)
        index = int(request.resume_token or 0)
        if self.streamed_note:
            yield driver_pb2.WatchEventsResponse(note=self.streamed_note)
        self.open_streams += 1
        try:
            while True:
                while index < len(self.updates):
                    await self._break(index, context)
                    event = self._event(self.updates[index])
                    index += 1
                    yield driver_pb2.WatchEventsResponse(resume_token=str(index), event=event)
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            self.open_streams -= 1

    async def TailLogs(
        self, request: Any, context: Any
    ) -> AsyncIterator[driver_pb2.TailLogsResponse]:
        await self._note(request, context)
        if request.rank in self.lost_ranks:
            await abort(context, of_code("UNAVAILABLE", "NODE_UNREACHABLE", "node n2 is lost"))
        for number in range(min(request.lines, 1000)):
            yield driver_pb2.TailLogsResponse(line=f"line {number}{self.hostile}")
        if request.follow:
            await self._hang()

    async def ListCheckpoints(
        self, request: Any, context: Any
    ) -> driver_pb2.ListCheckpointsResponse:
        await self._note(request, context)
        return driver_pb2.ListCheckpointsResponse(checkpoints=self.checkpoints)

    async def GetClusterInfo(self, request: Any, context: Any) -> driver_pb2.GetClusterInfoResponse:
        await self._note(request, context)
        return driver_pb2.GetClusterInfoResponse(cluster="scripted", leader=self.address)

    def _event(self, seq: int) -> types_pb2.Event:
        return types_pb2.Event(
            seq=seq,
            subject="nodes/n1",
            reason="NODE_CORDONED",
            message=f"event {seq}{self.hostile}",
        )

    async def _break(self, index: int, context: Any) -> None:
        if index == self.break_after:
            self.break_after = None
            await abort(context, of_code("UNAVAILABLE", "GOING", "the driver stops"))

    async def _hang(self) -> None:
        """Keep a stream open until its client has gone."""
        self.open_streams += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.open_streams -= 1

    async def ListNodes(self, request: Any, context: Any) -> driver_pb2.ListNodesResponse:
        await self._note(request, context)
        page = int(request.page_token or 0)
        nodes = [driver_pb2.Node(name=f"n{page}")]
        return driver_pb2.ListNodesResponse(
            nodes=nodes, next_page_token=str(page + 1) if page < 2 else ""
        )

    async def WatchJob(
        self, request: Any, context: Any
    ) -> AsyncIterator[driver_pb2.WatchJobResponse]:
        await self._note(request, context)
        if self.streamed_note:
            yield driver_pb2.WatchJobResponse(note=self.streamed_note)
        for phase in self.phases:
            job = driver_pb2.Job(spec=job_pb2.JobSpec(name=request.name), phase=phase)
            yield driver_pb2.WatchJobResponse(job=job)
        if self.phases and self.phases[-1] < types_pb2.JOB_PHASE_SUCCEEDED:
            await self._hang()
        start = 0 if self.forgets_tokens else int(request.resume_token or 0)
        for index, step in enumerate(self.updates):
            if index < start:
                continue
            await self._break(index, context)
            yield driver_pb2.WatchJobResponse(
                resume_token=str(index + 1), step=types_pb2.StepRecord(step=step, attempt=1)
            )


async def start_driver() -> ScriptedDriver:
    """A driver that serves; a call without a script fails with UNIMPLEMENTED."""
    scripted = ScriptedDriver()  # type: ignore[abstract]
    await scripted.start()
    return scripted

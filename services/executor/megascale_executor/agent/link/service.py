"""ExecutorService, the calls that a node answers itself: status, diagnostics, logs of its ranks.

The driver also probes a silent node with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from megascale.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from megascale_common.node.addresses import joined
from megascale_common.service.errors import LimitError, NotFoundError, StateError, invalid
from megascale_common.service.identity.gate import OpenStreams, caller
from megascale_common.service.status import answers, streams
from megascale_executor.agent.attempt import AttemptKey
from megascale_executor.agent.checks.diagnosis import GroupChecks
from megascale_executor.agent.processes import folders
from megascale_executor.agent.reports.logs import (
    DEFAULT_LINES,
    MAX_LINES,
    between,
    ending,
    follow,
)
from megascale_executor.diagnostics.finding import Finding
from megascale_executor.diagnostics.registry import UnknownDiagnostic
from megascale_job.names import is_dns_label

SERVICE_NAME = "megascale.v1.ExecutorService"
# Concurrent readers of logs, per caller and in all: each has a block of its log in memory.
MAX_LOG_STREAMS_OF_ONE, MAX_LOG_STREAMS = 64, 128
_Context = grpc.aio.ServicerContext[Any, Any]


class ExecutorService(executor_pb2_grpc.ExecutorServiceServicer):
    """Serves one node.

    Args:
        node_folder: where the ranks' logs are.
        status: builds the response of GetNodeStatus.
        is_active: whether an attempt still has workers, so that its logs may grow.
        holder: the attempt that the node has, or has been ordered to have, if any.
        diagnose: runs the diagnostics named, or without names the quick set or the full one.
        groups: this node's part in checks of several nodes.
    """

    def __init__(
        self,
        node_folder: Path,
        status: Callable[[], executor_pb2.GetNodeStatusResponse],
        is_active: Callable[[AttemptKey], bool],
        holder: Callable[[], AttemptKey | None],
        diagnose: Callable[[Sequence[str], bool], Awaitable[list[Finding]]],
        groups: GroupChecks,
    ) -> None:
        self._node_folder = node_folder
        self._status = status
        self._is_active = is_active
        self._holder = holder
        self._diagnose = diagnose
        self._groups = groups
        self._log_streams = OpenStreams(MAX_LOG_STREAMS_OF_ONE, MAX_LOG_STREAMS)

    @answers
    async def GetNodeStatus(
        self, request: executor_pb2.GetNodeStatusRequest, context: _Context
    ) -> executor_pb2.GetNodeStatusResponse:
        """Identity and present state of the node."""
        return self._status()

    @answers
    async def RunNodeDiagnostics(
        self, request: executor_pb2.RunNodeDiagnosticsRequest, context: _Context
    ) -> executor_pb2.RunNodeDiagnosticsResponse:
        """Check the node now; refused if it has an attempt."""
        self._refuse_if_busy()
        try:
            findings = await self._diagnose(
                request.checks, request.set == types_pb2.DIAGNOSTIC_SET_FULL
            )
        except UnknownDiagnostic as error:
            raise invalid("checks", str(error), "leave it out to run all") from error
        return executor_pb2.RunNodeDiagnosticsResponse(
            checks=[finding.to_proto() for finding in findings]
        )

    @streams
    async def CheckGroup(
        self, request: executor_pb2.CheckGroupRequest, context: _Context
    ) -> AsyncIterator[executor_pb2.CheckGroupResponse]:
        """Check this node together with others; refused if it has an attempt."""
        self._refuse_if_busy()
        with self._groups.part(request) as part:
            if part.meeting.listener is not None:
                endpoint = joined(part.meeting.host, part.meeting.port)
                yield executor_pb2.CheckGroupResponse(store_endpoint=endpoint)
            findings = await self._groups.run(part)
            yield executor_pb2.CheckGroupResponse(checks=[found.to_proto() for found in findings])

    @streams
    async def TailWorkerLogs(
        self, request: executor_pb2.TailWorkerLogsRequest, context: _Context
    ) -> AsyncIterator[executor_pb2.TailWorkerLogsResponse]:
        """Last lines of a rank's log; with ``follow`` also new ones until the attempt ends here."""
        if not is_dns_label(request.job):
            problem = f"{request.job!r} is not the name of a job"
            raise invalid("job", problem, "`megascale jobs` lists the names")
        if not 0 <= request.lines <= MAX_LINES:
            problem = f"{request.lines} is out of range"
            raise invalid("lines", problem, f"give 0 (the default) to {MAX_LINES}")
        number = request.attempt or folders.newest_attempt(self._node_folder, request.job)
        path = folders.attempt_folder(self._node_folder, request.job, number).log(request.rank)
        if problem := self._log_streams.problem(caller()):
            raise LimitError(problem, reason="TOO_MANY_STREAMS")
        with self._log_streams.one_more(caller()):
            try:
                begin, end = await asyncio.to_thread(ending, path, request.lines or DEFAULT_LINES)
            except OSError as error:
                raise NotFoundError(
                    f"this node has no log of rank {request.rank} of job {request.job}, attempt "
                    f"{number}; use `megascale logs`, which finds the node of each rank",
                    reason="LOG_NOT_FOUND",
                ) from error
            async for line in between(path, begin, end):
                yield executor_pb2.TailWorkerLogsResponse(line=line)
            if request.follow:
                key = AttemptKey(request.job, number)
                async for line in follow(path, end, is_over=lambda: not self._is_active(key)):
                    yield executor_pb2.TailWorkerLogsResponse(line=line)

    def _refuse_if_busy(self) -> None:
        holder = self._holder()
        if holder is not None:
            raise StateError(
                f"the node has attempt {holder.attempt} of job {holder.job}; "
                "cancel the job or evict the node first",
                reason="NODE_BUSY",
                metadata={"job": holder.job},
            )

"""The driver's calls to nodes: their agents (logs, diagnostics) and checkpoint daemons (commits).

Desired states do not use these calls but the links that the nodes dial. Each call opens its own
channel: calls are rare, and a node may have a new address after a restart.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc

from megascale.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    driver_pb2,
    executor_pb2,
    executor_pb2_grpc,
    link_pb2,
    types_pb2,
)
from megascale_common.service import status
from megascale_common.service.channel import open_channel
from megascale_common.service.clock import Clock
from megascale_common.service.errors import (
    ForbiddenError,
    NotFoundError,
    RequestError,
    SupersededError,
    UnusableError,
)
from megascale_driver.analysis.baselines import MAX_NODES
from megascale_driver.core.values.attempt import NodeSlot
from megascale_driver.core.values.cluster import Check, Cluster, Identity, Node
from megascale_driver.core.values.events import (
    AttemptOpened,
    CheckCompared,
    CheckGroup,
    GroupChecked,
    NodeReport,
    OpenAttempt,
    OpenFailed,
)
from megascale_driver.nodes import checks
from megascale_driver.nodes.checks import FleetFigures, Outcome, Slow, outcomes
from megascale_driver.presence import reports
from megascale_job.wire import restore

OPEN_TIMEOUT_S = 20.0
LIST_TIMEOUT_S = 10.0
STATUS_TIMEOUT_S = 2.0
# A whole set ends within 110 s on the node; named checks also include the first use of CUDA and
# NCCL.
DIAGNOSE_TIMEOUT_S = 125.0
_REFUSED_SHOWN = 16
# Errors of OpenAttempt that are caused by the request: a foreign folder, no checkpoint to start
# from.
_FINAL = (RequestError, NotFoundError, ForbiddenError)


class NodeCalls:
    """Calls over short-lived channels, with the cluster's token."""

    def __init__(self, token: str, clock: Clock) -> None:
        self._token = token
        self._clock = clock
        self.figures = FleetFigures()
        # Called with comparisons that matter to the core; the engine sets it.
        self.compared: Callable[[CheckCompared], None] = lambda _: None
        # By node, the checks of its newest PREPARE, as reported and as compared.
        self._prepared: dict[str, tuple[tuple[Check, ...], tuple[Check, ...]]] = {}

    async def open_attempt(
        self, wanted: OpenAttempt, slots: Sequence[NodeSlot], node: Node, epoch: types_pb2.Epoch
    ) -> AttemptOpened | OpenFailed:
        """Let the committer open an attempt; a failed call becomes an OpenFailed event.

        ``slots``: those of the attempt; only their nodes can report that ranks have saved.
        """
        endpoint = await self._daemon_endpoint(node) or wanted.endpoint
        if not endpoint:
            return self._failed(wanted, f"node {wanted.node} has no checkpoint daemon")
        settings = wanted.checkpoint
        request = checkpoint_pb2.OpenAttemptRequest(
            job=wanted.job,
            uri=settings.uri,
            load_uri=settings.load_uri,
            load_weights=settings.load == "weights",
            attempt=wanted.attempt,
            world_size=wanted.world_size,
            sealed_step=wanted.sealed_step,
            sealed_by_attempt=wanted.sealed_by_attempt,
            refused_steps=wanted.refused_steps,
            keep_latest=settings.keep_latest,
            keep_every_steps=settings.keep_every_steps,
            keep_every_hours=settings.keep_every_hours,
            epoch=epoch,
            held=[checkpoint_pb2.HeldRanks(node=s.node, ranks=s.ranks) for s in slots],
        )
        try:
            async with self._daemon(endpoint) as stub:
                reply = await stub.OpenAttempt(request, timeout=OPEN_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            # Any other error (no answer, superseded, another call in progress) may be gone at the
            # next call.
            refusal = status.read(error)
            final = isinstance(refusal, _FINAL) or refusal.reason == UnusableError.default_reason
            text = str(refusal) if final else f"{error.code().name}: {error.details()}"
            superseded = refusal.reason == SupersededError.default_reason
            newest = refusal.metadata.get("attempt", "") if superseded else ""
            newest_number = int(newest) if newest.isdecimal() else 0
            return self._failed(wanted, text, refused=final, newest=newest_number)
        refused = tuple(reply.refused[:_REFUSED_SHOWN])
        plan = restore.from_proto(reply.restore)
        return AttemptOpened(
            self._clock.now_s(), wanted.job, wanted.attempt, plan, endpoint, refused
        )

    async def list_commits(self, node: Node, job: str, uri: str) -> list[driver_pb2.Checkpoint]:
        """Complete checkpoints of a job, read by the node's daemon, newest first.

        Raises:
            grpc.aio.AioRpcError: the daemon does not answer or refuses.
        """
        endpoint = await self._daemon_endpoint(node) or node.identity.checkpoint_endpoint
        request = checkpoint_pb2.ListCommitsRequest(job=job, uri=uri)
        async with self._daemon(endpoint) as stub:
            return list((await stub.ListCommits(request, timeout=LIST_TIMEOUT_S)).checkpoints)

    async def check_storage(self, node: Node, uri: str) -> None:
        """Let the node's daemon check whether it can reach and write a checkpoint.uri.

        Raises:
            grpc.aio.AioRpcError: it cannot, or the daemon does not answer.
        """
        endpoint = await self._daemon_endpoint(node) or node.identity.checkpoint_endpoint
        request = checkpoint_pb2.CheckStorageRequest(uri=uri)
        async with self._daemon(endpoint) as stub:
            await stub.CheckStorage(request, timeout=LIST_TIMEOUT_S)

    async def tail(
        self, node: Node, request: executor_pb2.TailWorkerLogsRequest
    ) -> AsyncIterator[str]:
        """Lines of a rank's log, read on its node.

        Raises:
            grpc.aio.AioRpcError: the node does not answer or has no such log.
        """
        async with self._agent(node) as stub:
            async for part in stub.TailWorkerLogs(request):
                yield part.line

    async def diagnose(
        self,
        node: Node,
        checks: Sequence[str],
        of_set: types_pb2.DiagnosticSet.ValueType = types_pb2.DIAGNOSTIC_SET_UNSPECIFIED,
    ) -> list[types_pb2.CheckResult]:
        """Run the node's self-checks now, and compare what they measured with the fleet.

        Raises:
            grpc.aio.AioRpcError: the node does not answer or refuses.
        """
        request = executor_pb2.RunNodeDiagnosticsRequest(checks=checks, set=of_set)
        async with self._agent(node) as stub:
            reply = await stub.RunNodeDiagnostics(request, timeout=DIAGNOSE_TIMEOUT_S)
        slow = _slow(node)
        found = self.figures.compare(node.name, _model(node.identity), reply.checks, slow)
        self._post_outcomes(node.name, outcomes(found, slow), "")
        return found

    def compared_with_fleet(
        self, event: NodeReport, beat: Callable[[], link_pb2.Heartbeat | None], state: Cluster
    ) -> NodeReport:
        """The report with the checks that follow a fault compared with the fleet, once.

        A FAIL by comparison becomes DEGRADED: one result condemns no node, and a FAIL during
        preparation would. ``beat``: the heartbeat of the report.
        """
        node, job = state.nodes.get(event.node), state.jobs.get(event.report.job)
        if node is None or job is None or event.report.attempt != job.attempt:
            return event
        raw, asked = event.report.checks, job.current.checks
        if not asked:
            return event
        # Heartbeats repeat the checks of a PREPARE; each set is compared and counted once.
        if self._prepared.get(event.node, ((), ()))[0] != raw:
            if (whole := beat()) is None:
                return event
            slow, measured = _slow(node), [each for each in whole.checks if each.name in asked]
            found = self.figures.annotated(event.node, _model(node.identity), measured, slow)
            self._post_outcomes(event.node, outcomes(found, slow), f"{job.name}/{job.attempt}")
            warned = iter(map(_warned, found))
            checks = tuple(next(warned) if each.name in asked else each for each in raw)
            if len(self._prepared) >= MAX_NODES:
                self._prepared.clear()
            self._prepared[event.node] = raw, checks
        checks = self._prepared[event.node][1]
        return replace(event, report=replace(event.report, checks=checks))

    def _post_outcomes(self, node: str, found: Sequence[Outcome], origin: str) -> None:
        now_s = self._clock.now_s()
        for each in found:
            of = (each.check, each.target, each.failed, each.detail, origin)
            self.compared(CheckCompared(now_s, node, *of))

    def learn(
        self, node: str, identity: Identity, measured: Sequence[link_pb2.MeasuredFigure]
    ) -> None:
        """Take in figures that a node has measured under an earlier leader."""
        self.figures.learn(node, _model(identity), measured)

    async def check_group(self, wanted: CheckGroup) -> GroupChecked:
        """Let nodes check each other; each of them has an answer within two minutes."""
        found = await checks.check_group(
            wanted, lambda endpoint: open_channel(endpoint, self._token)
        )
        return GroupChecked(
            self._clock.now_s(),
            wanted.job,
            wanted.attempt,
            wanted.round,
            wanted.group,
            {node: each.answer for node, each in found.items()},
            {node: each.detail for node, each in found.items() if each.detail},
        )

    def _failed(
        self, wanted: OpenAttempt, error: str, *, refused: bool = False, newest: int = 0
    ) -> OpenFailed:
        return OpenFailed(self._clock.now_s(), wanted.job, wanted.attempt, error, refused, newest)

    async def _daemon_endpoint(self, node: Node) -> str:
        """The current address of the node's checkpoint daemon; empty if the agent does not answer.

        The address in the node's hello may be outdated: the agent restarts its daemon on a new
        port.
        """
        if not node.identity.executor_endpoint:
            return ""
        request = executor_pb2.GetNodeStatusRequest()
        try:
            async with self._agent(node) as stub:
                reply = await stub.GetNodeStatus(request, timeout=STATUS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return ""
        return reply.hello.checkpoint_endpoint

    @asynccontextmanager
    async def _agent(self, node: Node) -> AsyncIterator[executor_pb2_grpc.ExecutorServiceAsyncStub]:
        channel = open_channel(node.identity.executor_endpoint, self._token)
        try:
            yield executor_pb2_grpc.ExecutorServiceStub(channel)
        finally:
            await channel.close()

    @asynccontextmanager
    async def _daemon(
        self, endpoint: str
    ) -> AsyncIterator[checkpoint_pb2_grpc.CheckpointServiceAsyncStub]:
        channel = open_channel(endpoint, self._token)
        try:
            yield checkpoint_pb2_grpc.CheckpointServiceStub(channel)
        finally:
            await channel.close()


def _model(identity: Identity) -> str:
    return identity.devices[0].model if identity.devices else ""


def _slow(node: Node) -> Slow:
    return {(each.check, each.target): each.times for each in node.slow_checks}


def _warned(check: types_pb2.CheckResult) -> Check:
    if check.baseline_source and check.verdict == types_pb2.CHECK_VERDICT_FAIL:
        check.verdict = types_pb2.CHECK_VERDICT_DEGRADED
    return reports.check(check)

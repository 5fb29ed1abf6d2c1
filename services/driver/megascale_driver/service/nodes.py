"""DriverService calls about nodes: list, evict, cordon, uncordon, drain, diagnose."""

from __future__ import annotations

import grpc
from google.protobuf import duration_pb2

from megascale.v1 import driver_pb2
from megascale_common.service.errors import StateError, invalid
from megascale_common.service.status import answers
from megascale_driver.core import draft
from megascale_driver.core.checkpoints import replicas
from megascale_driver.core.orders.orders import leaves_after_save, origin
from megascale_driver.core.values.cluster import Disposition, Node
from megascale_driver.core.values.events import (
    CordonRequested,
    DrainRequested,
    EvictRequested,
    PlatformReport,
    RequestKey,
    UncordonRequested,
)
from megascale_driver.core.values.job import Job
from megascale_driver.service.driver import (
    Calls,
    Context,
    actor_of,
    first_page,
    from_node,
    request_key,
    required_reason,
)
from megascale_job.visible import counted

MAX_UNREACHABLE = 50_000  # nodes of one report: above any cluster that Kubernetes supports
MAX_CONDITION = 200  # characters: as much as tables of platforms show


class FleetCalls(Calls):
    """Orders of operators about nodes, and reports of platforms."""

    @answers
    async def ListNodes(
        self, request: driver_pb2.ListNodesRequest, context: Context
    ) -> driver_pb2.ListNodesResponse:
        """All nodes by name."""
        self._driver.require_state()
        names = sorted(name for name in self._engine.state.nodes if name > request.page_token)
        page, token = first_page(names, request.page_size)
        nodes = [self._driver.node_message(name) for name in page]
        return driver_pb2.ListNodesResponse(nodes=nodes, next_page_token=token)

    @answers
    async def EvictNode(
        self, request: driver_pb2.EvictNodeRequest, context: Context
    ) -> driver_pb2.EvictNodeResponse:
        """Quarantine a node; its job moves to another node without further requests."""
        reason = required_reason(request.reason)
        node = self._driver.node(request.name)
        actor = actor_of(context)

        def event(now_s: float, key: RequestKey | None = None) -> EvictRequested:
            return EvictRequested(now_s, node.name, reason, actor, key, now=request.now)

        consequence = self._consequence(node)
        if not request.now and leaves_after_save(self._engine.state, node.name):
            consequence = self._driver.preview_leaving(event(self._engine.clock.now_s()))
        if not request.validate_only:
            key, now_s = request_key(request, request.request_id), self._engine.clock.now_s()
            await self._driver.call(event(now_s, key))
        message = self._driver.node_message(request.name)
        return driver_pb2.EvictNodeResponse(node=message, consequence=consequence)

    @answers
    async def CordonNode(
        self, request: driver_pb2.CordonNodeRequest, context: Context
    ) -> driver_pb2.CordonNodeResponse:
        """Give a node no new work; a job that runs there continues."""
        event = CordonRequested(node=request.name, **self._driver.asked(request, context))
        consequence = await self._driver.carried_out(request, event, "NODE_CORDONED", "node")
        node = self._driver.node_message(request.name)
        return driver_pb2.CordonNodeResponse(node=node, consequence=consequence)

    @answers
    async def UncordonNode(
        self, request: driver_pb2.UncordonNodeRequest, context: Context
    ) -> driver_pb2.UncordonNodeResponse:
        """Make a cordoned or quarantined node schedulable again."""
        event = UncordonRequested(node=request.name, **self._driver.asked(request, context))
        consequence = await self._driver.carried_out(request, event, "NODE_UNCORDONED", "node")
        if not request.validate_only:
            # The node may have been repaired, so its earlier measurements no longer count.
            self._engine.node_calls.figures.forget(request.name)
        node = self._driver.node_message(request.name)
        return driver_pb2.UncordonNodeResponse(node=node, consequence=consequence)

    @answers
    async def DrainNode(
        self, request: driver_pb2.DrainNodeRequest, context: Context
    ) -> driver_pb2.DrainNodeResponse:
        """Empty a node; its job saves before it leaves."""
        asked = self._driver.asked(request, context)
        event = DrainRequested(node=self._driver.node(request.name).name, **asked)
        consequence = self._driver.preview_leaving(event)
        if not request.validate_only:
            await self._driver.call(event)
        node = self._driver.node_message(request.name)
        return driver_pb2.DrainNodeResponse(node=node, consequence=consequence)

    @answers
    async def ReportUnreachableNodes(
        self, request: driver_pb2.ReportUnreachableNodesRequest, context: Context
    ) -> driver_pb2.ReportUnreachableNodesResponse:
        """Receive the nodes that their platform cannot reach: a second witness of silence."""
        self._driver.require_state()
        unreachable = _unreachable(request)
        event = PlatformReport(self._engine.clock.now_s(), unreachable, actor_of(context))
        await self._driver.call(event)
        valid_s = self._engine.policy.platform_report_s
        return driver_pb2.ReportUnreachableNodesResponse(
            valid_for=duration_pb2.Duration(seconds=int(valid_s))
        )

    @answers
    async def RunDiagnostics(
        self, request: driver_pb2.RunDiagnosticsRequest, context: Context
    ) -> driver_pb2.RunDiagnosticsResponse:
        """Run the self-checks of a node now; refused while a job runs there."""
        node = self._driver.node(request.node)
        job = self._engine.state.holder_of(node.name)
        if job is not None:
            slot = job.slot_of(node.name)
            ranks = f"ranks {slot.ranks[0]}-{slot.ranks[-1]}" if slot is not None else "ranks"
            raise StateError(
                f"node {node.name} runs {ranks} of job {job.name}; "
                "cancel the job or evict the node first",
                reason="NODE_BUSY",
                metadata={"job": job.name},
            )
        try:
            checks = await self._engine.node_calls.diagnose(node, list(request.checks), request.set)
        except grpc.aio.AioRpcError as error:
            raise from_node(node.name, error) from error
        return driver_pb2.RunDiagnosticsResponse(checks=checks)

    def _consequence(self, node: Node) -> str:
        """The outcome of evicting the node, in one sentence."""
        if node.disposition is Disposition.QUARANTINED:
            return f"node {node.name} is quarantined already: {node.disposition_reason}"
        job = self._engine.state.holder_of(node.name)
        if unread := draft.unreadable_job_on(self._engine.state.unreadable, node):
            return f"its workers of job {unread}, which cannot be read, stop"
        if job is None:
            jobs = [
                other.name
                for other in self._engine.state.jobs.values()
                if node.name in other.spares
            ]
            loss = f", job {jobs[0]} loses it as a spare" if jobs else ""
            return f"it runs nothing{loss}; it gets no work from now on"
        copied = replicas.replicated_step(job, self._engine.state.nodes)
        return f"job {job.name} stops, {_successor(job)}, and a new attempt {origin(job, copied)}"


def _unreachable(request: driver_pb2.ReportUnreachableNodesRequest) -> dict[str, str]:
    """The reported nodes with their conditions; raises for an invalid report."""
    if len(request.nodes) > MAX_UNREACHABLE:
        problem = counted(len(request.nodes), "node")
        raise invalid("nodes", problem, f"report at most {MAX_UNREACHABLE}")
    found: dict[str, str] = {}
    for node in request.nodes:
        if node.name in found or not node.condition.strip():
            problem = f"node {node.name[:63]!r} is named twice, or without a condition"
            raise invalid("nodes", problem, "name each once, with the platform's words for it")
        found[node.name] = node.condition.strip()[:MAX_CONDITION]
    return found


def _successor(job: Job) -> str:
    if job.spares:
        return f"spare {job.spares[0]} takes its place"
    return "it has no spare and waits for a node"

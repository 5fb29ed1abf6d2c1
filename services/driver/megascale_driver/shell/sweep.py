"""The sweep: runs the full diagnostics of idle nodes, one node at a time, while a driver leads.

A spare that was idle for weeks may be broken when it is needed. The node that was checked least
recently comes next; if a node gets work meanwhile, its check ends. A result by itself changes
nothing: it is in the log and the metrics, and only a check before an attempt quarantines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from megascale.v1 import types_pb2
from megascale_common.service import logs
from megascale_driver.core.values.cluster import Cluster, Disposition, Liveness, Node
from megascale_driver.nodes.node_calls import NodeCalls

_log = logs.get(__name__)


def next_node(state: Cluster, swept_at_s: dict[str, float]) -> Node | None:
    """The idle node that was checked least recently; None if there is no idle node."""
    idle = [
        node
        for node in state.nodes.values()
        if node.connected
        and node.liveness is Liveness.ALIVE
        and node.disposition is Disposition.SCHEDULABLE
        and state.holder_of(node.name) is None
    ]
    return min(idle, key=lambda node: (swept_at_s.get(node.name, 0.0), node.name), default=None)


class Sweep:
    """Checks one idle node every ``period_s``, at most one at a time."""

    def __init__(
        self,
        calls: NodeCalls,
        state: Callable[[], Cluster],
        now_s: Callable[[], float],
        period_s: float,
    ) -> None:
        self._calls = calls
        self._state = state
        self._now_s = now_s
        self._period_s = period_s
        self._swept_at_s: dict[str, float] = {}

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(self._period_s)
            await self.once()

    async def once(self) -> None:
        """Check the next idle node, if there is one; never raises for faults of the node."""
        state = self._state()
        for gone in [name for name in self._swept_at_s if name not in state.nodes]:
            del self._swept_at_s[gone]
        node = next_node(state, self._swept_at_s)
        if node is None:
            return
        self._swept_at_s[node.name] = self._now_s()
        try:
            checks = await self._calls.diagnose(node, (), types_pb2.DIAGNOSTIC_SET_FULL)
        except grpc.aio.AioRpcError as error:
            _log.info("a sweep was not finished", node=node.name, reason=error.details())
            return
        for check in checks:
            if check.verdict in (types_pb2.CHECK_VERDICT_FAIL, types_pb2.CHECK_VERDICT_DEGRADED):
                _log.warning(
                    "a sweep found an idle node slow or broken",
                    node=node.name,
                    check=check.name,
                    target=check.target,
                    verdict=types_pb2.CheckVerdict.Name(check.verdict),
                    detail=check.detail,
                )

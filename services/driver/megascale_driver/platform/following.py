"""Keeps a platform like the driver: evicted nodes are drained there, missing ones are asked for.

It asks the driver and the platform at an interval and remembers nothing that it could not ask for
once more, so it may be ended and started at any time, and beside any number of drivers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from megascale.v1 import driver_pb2, driver_pb2_grpc, types_pb2
from megascale_common.service.errors import ClusterError, OptionError, UnavailableError
from megascale_driver.platform.evictions import Evictions, Report
from megascale_driver.platform.interface import Platform
from megascale_driver.platform.local_node import nodes_of
from megascale_driver.platform.providing import AFTER_S, Providing

CALL_TIMEOUT_S = 10.0


class Follower:
    """One process's view of one cluster; :meth:`look` is called again and again.

    Args:
        record: a file that outlives this process: which drains are done.
        replace_after_s: how long a node is lost, or evicted, before another is asked for; None:
            none is.
        provide_up_to: nodes in all that are asked for where jobs lack some; 0: none are.
        provide_after_s: how long they have to be missing.
    """

    def __init__(
        self,
        platform: Platform,
        record: Path,
        replace_after_s: float | None,
        report: Report,
        *,
        provide_up_to: int = 0,
        provide_after_s: float = AFTER_S,
    ) -> None:
        self._platform = platform
        self._report = report
        self._replace_after_s = replace_after_s
        self._evictions = Evictions(platform, record, self._take_back, report)
        self._providing: Providing | None = None
        if provide_up_to:  # else a platform of before `provide` will do
            self._providing = Providing(platform.provide, provide_up_to, provide_after_s, report)
        self._stub: Any = None
        self._lost_since_s: dict[str, float] = {}
        self._asked: set[str] = set()

    async def look(self, channel: Any) -> None:
        """Compare once, through a channel to the driver that leads; nothing while none does.

        Raises:
            ClusterError: the driver refuses to list its nodes.
        """
        self._stub = driver_pb2_grpc.DriverServiceStub(channel)
        if nodes := await nodes_of(self._stub):
            await self._settle(nodes)
        if self._providing is not None:
            await self._provide(self._providing)

    async def _settle(self, nodes: Sequence[driver_pb2.Node]) -> None:
        evicted = {
            node.name: node.disposition_reason
            for node in nodes
            if node.disposition == types_pb2.NODE_DISPOSITION_QUARANTINED
        }
        await self._witness(nodes)
        await self._evictions.settle(evicted)
        dead = [node.name for node in nodes if node.liveness == types_pb2.NODE_LIVENESS_DEAD]
        if self._replace_after_s is not None:
            await self._replace(sorted({*dead, *evicted}), self._replace_after_s)

    async def _provide(self, providing: Providing) -> None:
        """Ask for what is missing, before any node is there, too."""
        try:
            request = driver_pb2.GetClusterInfoRequest()
            info = await self._stub.GetClusterInfo(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:  # none leads now
            return
        await providing.settle(info.nodes_wanted, info.nodes_missing)

    async def _witness(self, nodes: Sequence[driver_pb2.Node]) -> None:
        """Where a node is silent, report which nodes the platform does not reach either.

        Without a suspect the platform is not asked: nothing would follow from its answer.
        """
        if all(node.liveness != types_pb2.NODE_LIVENESS_SUSPECT for node in nodes):
            return
        request = driver_pb2.ReportUnreachableNodesRequest()
        try:
            for node in await self._platform.nodes():
                if not node.reached:
                    condition = " ".join(node.conditions) or "not reached"
                    request.nodes.add(name=node.name, condition=condition)
            await self._stub.ReportUnreachableNodes(request, timeout=CALL_TIMEOUT_S)
        except UnavailableError as error:
            self._report("refused", {"node": "", "error": str(error)})
        except grpc.aio.AioRpcError as error:  # of a build without this call, or none leads
            self._report("refused", {"node": "", "error": str(error.details())})

    async def _replace(self, lost: Sequence[str], after_s: float) -> None:
        """Once for each node that is lost, until it is back."""
        now_s = time.monotonic()
        self._lost_since_s = {name: self._lost_since_s.get(name, now_s) for name in lost}
        self._asked &= set(lost)
        for name, since_s in self._lost_since_s.items():
            if name in self._asked or now_s - since_s < after_s:
                continue
            self._asked.add(name)
            try:
                provides = await self._platform.replace(name)
            except (ClusterError, OptionError, UnavailableError) as error:
                self._report("refused", {"node": name, "error": str(error)})
            else:
                self._report("replaced" if provides else "not_replaced", {"node": name})

    async def _take_back(self, name: str) -> bool:
        request = driver_pb2.UncordonNodeRequest(name=name, reason="its platform has it again")
        try:
            await self._stub.UncordonNode(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self._report("refused", {"node": name, "error": str(error.details())})
            return False
        return True

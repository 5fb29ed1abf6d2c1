"""The controller that keeps Kubernetes and the driver in agreement.

The driver decides which nodes work. The controller carries that out on the machines, and reports
the state of the machines to the driver. It keeps no state of its own: if it is killed at any point,
the next one continues from the state of Kubernetes and the driver (Note [Level-triggered platforms]
in :mod:`megascale_driver.platform.follower`). Two controllers at the same time do no harm, because
preconditions make the server refuse the later write.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import grpc
import grpc.aio

from megascale.v1 import driver_pb2, driver_pb2_grpc, types_pb2
from megascale_common.service import logs, status
from megascale_common.service.channel import open_channel
from megascale_common.service.errors import (
    NotFoundError,
    ServiceError,
    StateError,
    TimedOutError,
    UnavailableError,
)
from megascale_driver.platform.follower import NodeProvider
from megascale_driver.platform.interface import MAX_NODES
from megascale_driver.platform.kubernetes import decisions
from megascale_driver.platform.kubernetes.cluster import KubernetesCluster
from megascale_driver.platform.kubernetes.decisions import (
    PREFIX,
    Cordon,
    DeletePod,
    Disposition,
    DriverNode,
    GiveBack,
    MarkMachine,
    Order,
    SetTopology,
    ShowCondition,
    Uncordon,
    UnmarkMachine,
)

CALL_TIMEOUT_S = 10.0
PAGE = 1000
MAX_HINTS = 3  # standbys in a row that name a leader; after that the next pass tries
# Most orders per pass: so a defect or a storm shows before it has affected all machines.
MAX_ORDERS = 200
_DISPOSITION, _LIVENESS = types_pb2.NodeDisposition, types_pb2.NodeLiveness
_log = logs.get(__name__)


class Driver:
    """A client of the leading driver, found through ``addresses``; one can be a Service.

    The connection to the leader is kept. A connection to another driver is closed, so that a
    Service selects a driver again, and the leader that this driver names is tried next.
    """

    def __init__(self, addresses: Sequence[str], token: str) -> None:
        self._addresses = tuple(addresses)
        self._token = token
        self._leader: tuple[str, grpc.aio.Channel] | None = None

    async def close(self) -> None:
        """Close the connection."""
        if self._leader is not None:
            await self._leader[1].close()
            self._leader = None

    async def nodes(self) -> list[DriverNode]:
        """All nodes.

        Raises:
            UnavailableError: no driver leads, or it refuses.
        """
        found: list[DriverNode] = []
        token = ""
        while len(found) < MAX_NODES:
            request = driver_pb2.ListNodesRequest(page_size=PAGE, page_token=token)
            page = await self._call("ListNodes", request)
            found += map(_node, page.nodes)
            token = page.next_page_token
            if not token:
                break
        return found

    async def lacking(self) -> tuple[int, int]:
        """The total of nodes that jobs need, and how many are missing; raises as :meth:`nodes`."""
        info = await self._call("GetClusterInfo", driver_pb2.GetClusterInfoRequest())
        return info.nodes_wanted, info.nodes_missing

    async def cordon(self, node: str, why: str) -> None:
        """Give a node no new work; raises as :meth:`nodes`."""
        request = driver_pb2.CordonNodeRequest(
            name=node, reason=f"{PREFIX}{why}", request_id=uuid.uuid4().hex
        )
        await self._call("CordonNode", request)

    async def uncordon(self, node: str, why: str, once: str = "") -> None:
        """Make a node schedulable, at most once for each ``once``; raises as :meth:`nodes`."""
        request_id = uuid.uuid5(uuid.NAMESPACE_OID, once) if once else uuid.uuid4()
        request = driver_pb2.UncordonNodeRequest(
            name=node, reason=f"{PREFIX}{why}", request_id=request_id.hex
        )
        await self._call("UncordonNode", request)

    async def report_unreachable(self, nodes: Mapping[str, str]) -> None:
        """Report the nodes that Kubernetes cannot reach, and why; raises as :meth:`nodes`."""
        request = driver_pb2.ReportUnreachableNodesRequest()
        for name, condition in nodes.items():
            request.nodes.add(name=name, condition=condition)
        await self._call("ReportUnreachableNodes", request)

    async def _call(self, method: str, request: Any) -> Any:
        problem = "none is named"
        left = [self._leader[0] if self._leader is not None else "", *self._addresses]
        for _ in range(len(left) + MAX_HINTS):
            if not left:
                break
            if not (address := left.pop(0)):
                continue
            try:
                return await self._call_at(address, method, request)
            except (UnavailableError, TimedOutError) as error:
                await self.close()
                problem = f"{address}: {error.message}"
                # A standby names the leader; follow the hint before the remaining addresses.
                if (hint := error.metadata.get("leader", "")) and hint != address:
                    left.insert(0, hint)
            except ServiceError as error:
                raise UnavailableError(f"the driver refuses {method}: {error.message}") from None
        raise UnavailableError(f"no driver answers: {problem}")

    async def _call_at(self, address: str, method: str, request: Any) -> Any:
        """Call the driver at ``address``, through the open connection if it goes there.

        Raises:
            UnavailableError: the driver does not lead, or cannot be reached; the metadata can name
                the leader.
            TimedOutError: the driver does not answer.
            ServiceError: the driver refuses.
        """
        if self._leader is None or self._leader[0] != address:
            await self.close()
            self._leader = (address, open_channel(address, self._token, shares=False))
        stub = driver_pb2_grpc.DriverServiceStub(self._leader[1])
        try:
            return await getattr(stub, method)(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise status.read(error) from None


def _node(found: driver_pb2.Node) -> DriverNode:
    name = _DISPOSITION.Name(found.disposition).removeprefix("NODE_DISPOSITION_").lower()
    return DriverNode(
        name=found.name,
        disposition=cast(Disposition, name),
        reason=found.disposition_reason,
        alive=found.liveness == _LIVENESS.Value("NODE_LIVENESS_ALIVE"),
        dead=found.liveness == _LIVENESS.Value("NODE_LIVENESS_DEAD"),
        host=found.topology.get("host", ""),
    )


class Controller:
    """``run()`` until cancelled: one pass after each change, and at least every ``interval_s``.

    ``providing`` requests missing nodes; None: they are not requested.
    """

    def __init__(
        self,
        cluster: KubernetesCluster,
        driver: Driver,
        interval_s: float,
        providing: NodeProvider | None = None,
    ) -> None:
        self._cluster = cluster
        self._driver = driver
        self._interval_s = interval_s
        self._providing = providing
        self._said: dict[str, str] = {}
        self._reported = False  # the newest report had nodes that cannot be reached

    async def run(self) -> None:
        """Follow the cluster and make passes, without end."""
        async with self._cluster.followed():
            await self.agree_for_ever()

    async def agree_for_ever(self) -> None:
        """Make a pass, wait for a change or the interval, and start again."""
        while True:
            # Cleared before the pass: a change during it starts another pass.
            self._cluster.changed.clear()
            if self._cluster.known:
                await self.agree()
            with contextlib.suppress(TimeoutError):
                # Not wait_for, which can lose a cancellation before Python 3.12.
                async with asyncio.timeout(self._interval_s):
                    await self._cluster.changed.wait()

    async def agree(self) -> None:
        """One pass: read the present state, decide the orders for it, carry them out."""
        try:
            nodes = await self._driver.nodes()
        except UnavailableError as error:
            self._say("driver", str(error))
            nodes = []
        else:
            self._say("driver", "")
        pods, machines = self._cluster.pods(), self._cluster.machines()
        if nodes:
            await self._report(decisions.unreachable(nodes, pods, machines))
        orders = decisions.decide(nodes, pods, machines)
        # An order that is refused is decided again in the next pass; the others do not wait for it.
        for order in orders[:MAX_ORDERS]:
            try:
                await self._carry_out(order)
            except (StateError, NotFoundError) as error:
                _log.info("decided again", order=repr(order)[:200], why=str(error))
            except UnavailableError as error:
                self._say(type(order).__name__, str(error))
        if self._providing is not None:
            await self._provide(self._providing)

    async def _provide(self, providing: NodeProvider) -> None:
        try:
            await providing.settle(*await self._driver.lacking())
        except UnavailableError as error:
            self._say("nodes", str(error))
        except StateError as error:
            _log.info("asked again", why=str(error))

    async def _report(self, unreachable: Mapping[str, str]) -> None:
        """Report unreachable nodes at each pass, and once more when all are reachable again."""
        if not unreachable and not self._reported:
            return
        try:
            await self._driver.report_unreachable(unreachable)
        except UnavailableError as error:  # an earlier build of the driver refuses this call too
            self._say("unreachable", str(error))
        else:
            self._reported = bool(unreachable)
            self._say("unreachable", "")

    async def _carry_out(self, order: Order) -> None:
        cluster, driver = self._cluster, self._driver
        match order:
            case MarkMachine(machine, mark):
                await cluster.mark(machine, mark)
                _log.warning(
                    "machine marked", machine=machine.name, state=mark.state, why=mark.reason
                )
            case UnmarkMachine(machine, mark):
                await cluster.unmark(machine, mark)
                _log.warning("machine given back", machine=machine.name, node=mark.node)
            case ShowCondition(machine):
                await cluster.show_condition(machine)
            case DeletePod(pod, why, force):
                await cluster.delete_pod(pod, why, force=force)
                _log.warning("pod deleted", pod=pod.name, machine=pod.machine, why=why, force=force)
            case SetTopology(pod, topology):
                await cluster.set_topology(pod, topology)
                _log.info("pod placed", pod=pod.name, topology=topology)
            case Cordon(node, why):
                await driver.cordon(node, why)
                _log.warning("node cordoned", node=node, why=why)
            case Uncordon(node, why):
                await driver.uncordon(node, why)
                _log.warning("node uncordoned", node=node, why=why)

            case GiveBack(node, why, once, machine, mark, repaired):
                await driver.uncordon(node, why, once)
                if repaired:
                    await cluster.unmark(machine, mark)
                else:
                    await cluster.mark(machine, replace(mark, state="moved"))
                _log.warning("node given back", node=node, machine=machine.name, why=why)

    def _say(self, subject: str, problem: str) -> None:
        """Log a problem once, until another problem replaces it or it is over."""
        if problem and self._said.get(subject) != problem:
            _log.warning("not now", subject=subject, problem=problem)
        self._said[subject] = problem

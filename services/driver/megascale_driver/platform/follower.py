"""Makes a platform follow the driver: drains evicted nodes there, and requests missing nodes.

Note [Level-triggered platforms]. The follower never reacts to events ("n3 was evicted"). At each
interval it reads the driver's and the platform's whole state and asks for what differs. An event
that is lost in a crash or a cut connection is gone for good; a state can be read again. So the
follower can be killed and started at any time, next to any number of drivers, and one pass corrects
what an earlier one missed. This works because every request to a platform has the same effect twice
as once:

- **More nodes**: the driver's journal holds the intent, since its jobs and nodes determine how many
  nodes there should be. The follower requests that total, never "one more", so a repeated request
  after a crash provides no node twice.
- **Evicted nodes** are drained on their platform. The journal holds the intent here too: the driver
  decides an eviction before the drain is requested. A record on disk lists the completed drains. It
  is written after the call, so after a crash in between the next run repeats the drain, which does
  no harm. A recorded node that the platform no longer has as drained was repaired, and the driver
  takes it back.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from megascale.v1 import driver_pb2, driver_pb2_grpc, types_pb2
from megascale_common.node.files import replace_file
from megascale_common.service.errors import (
    ClusterError,
    DamagedError,
    OptionError,
    UnavailableError,
)
from megascale_driver.platform.interface import PREFIX, Platform
from megascale_driver.platform.local.node import nodes_of

# Grace time: a restarting agent, or a node that is on its way, is not a missing node.
AFTER_S = 60.0


class NodeProvider:
    """Requests missing nodes from a platform; :meth:`settle` is called at an interval.

    Args:
        provide: requests a total number of nodes from the platform (``Platform.provide``).
        up_to: the largest total that is requested; 0: nodes are never requested.
        after_s: how long nodes must be missing before they are requested.
    """

    def __init__(
        self,
        provide: Callable[[int], Awaitable[int]],
        up_to: int,
        after_s: float,
        report: Callable[[str, dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._provide = provide
        self._up_to = up_to
        self._after_s = after_s
        self._report = report
        self._clock = clock
        self._missing_since_s: float | None = None
        self._said: tuple[str, dict[str, Any]] | None = None

    async def settle(self, wanted: int, missing: int) -> None:
        """Request a total of ``wanted`` nodes if nodes have been missing for long enough.

        The result is reported when it changes. After a refusal the next call requests again.
        """
        if not missing or not self._up_to:
            self._missing_since_s = None
            self._said = None
            return
        now_s = self._clock()
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        if now_s - self._missing_since_s < self._after_s:
            return
        count = min(wanted, self._up_to)
        try:
            there = await self._provide(count)
        except (OptionError, UnavailableError) as error:
            self._say("not_provided", {"count": count, "error": error.message})
        else:
            bound = self._up_to if wanted > self._up_to else 0
            self._say("provided", {"count": count, "there": there, "bound": bound})

    def _say(self, event: str, fields: dict[str, Any]) -> None:
        if self._said != (event, fields):
            self._said = (event, fields)
            self._report(event, fields)


MAX_REASON_CHARACTERS = 200  # SLURM and Kubernetes show it in tables
Report = Callable[[str, dict[str, Any]], None]


class Evictions:
    """Drains on a platform the nodes that the driver has evicted, and no others.

    Args:
        record: the file of completed drains, which outlives this process.
        take_back: asks the driver to give a node work again; False if that failed.

    Raises:
        DamagedError: the record cannot be read.
    """

    def __init__(
        self,
        platform: Platform,
        record: Path,
        take_back: Callable[[str], Awaitable[bool]],
        report: Report,
    ) -> None:
        self._platform = platform
        self._record = record
        self._take_back = take_back
        self._report = report
        self._drained = _read(record)
        self._refused: dict[str, str] = {}

    async def settle(self, evicted: Mapping[str, str]) -> None:
        """Drain and restore nodes until the platform agrees with the driver.

        A refusal of the platform is reported once; the next call tries again.

        Args:
            evicted: all nodes that are evicted now, each with the driver's reason.
        """
        for name in sorted(self._drained - evicted.keys()):
            # An operator has uncordoned the node in the driver.
            if await self._ask(name, self._platform.restore(name)):
                self._keep("restored", name, self._drained - {name})
        # Only nodes that were drained in earlier passes can have been repaired. A platform can
        # still show a node as healthy that is drained in this pass.
        known = sorted(self._drained)
        for name in sorted(evicted.keys() - self._drained):
            reason = f"{PREFIX}{evicted[name] or 'evicted'}"[:MAX_REASON_CHARACTERS]
            if await self._ask(name, self._platform.drain(name, reason)):
                self._keep("drained", name, self._drained | {name})
        if known:
            await self._take_back_repaired(known)

    async def _take_back_repaired(self, names: Collection[str]) -> None:
        try:
            nodes = await self._platform.nodes()
        except UnavailableError:
            return
        for node in nodes:
            repaired = node.name in names and node.ready and not node.drained
            if repaired and await self._take_back(node.name):
                self._keep("returned", node.name, self._drained - {node.name})

    async def _ask(self, name: str, call: Awaitable[None]) -> bool:
        try:
            await call
        except (OptionError, UnavailableError) as error:
            if self._refused.get(name) != str(error):
                self._refused[name] = str(error)
                self._report("refused", {"node": name, "error": str(error)})
            return False
        self._refused.pop(name, None)
        return True

    def _keep(self, event: str, name: str, drained: set[str]) -> None:
        self._drained = drained
        replace_file(self._record, json.dumps(sorted(drained)) + "\n")
        self._report(event, {"node": name})


def _read(record: Path) -> set[str]:
    """The nodes in the record; none if a crash of the host has left an empty file."""
    try:
        names = json.loads(record.read_text() or "[]")
    except FileNotFoundError:
        return set()
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise DamagedError(str(record), "no list of nodes; remove it, and drains are repeated")
    return set(names)


CALL_TIMEOUT_S = 10.0


class Follower:
    """Makes one platform follow one cluster; :meth:`look` is called at an interval.

    See Note [Level-triggered platforms] above.

    Args:
        record: the file of completed drains, which outlives this process.
        replace_after_s: how long a node is dead or evicted before a replacement is requested;
            None: never.
        provide_up_to: the largest total of nodes that is requested if jobs lack nodes; 0: none.
        provide_after_s: how long nodes must be missing before they are requested.
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
        self._providing: NodeProvider | None = None
        if provide_up_to:  # without it, platforms of earlier versions without `provide` work too
            self._providing = NodeProvider(platform.provide, provide_up_to, provide_after_s, report)
        self._stub: Any = None
        self._lost_since_s: dict[str, float] = {}
        self._asked: set[str] = set()

    async def look(self, channel: Any) -> None:
        """Compare once, through a channel to the leading driver; does nothing while none leads.

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

    async def _provide(self, providing: NodeProvider) -> None:
        """Request missing nodes; this also works before the first node has joined."""
        try:
            request = driver_pb2.GetClusterInfoRequest()
            info = await self._stub.GetClusterInfo(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError:  # no driver leads now
            return
        await providing.settle(info.nodes_wanted, info.nodes_missing)

    async def _witness(self, nodes: Sequence[driver_pb2.Node]) -> None:
        """If a node is silent, report the nodes that the platform cannot reach either.

        Without a silent node the platform is not asked, because its answer would change nothing.
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
        except grpc.aio.AioRpcError as error:  # an earlier build, or no driver leads
            self._report("refused", {"node": "", "error": str(error.details())})

    async def _replace(self, lost: Sequence[str], after_s: float) -> None:
        """Request one replacement for each lost node; again only after it has come back."""
        now_s = time.monotonic()
        self._lost_since_s = {name: self._lost_since_s.get(name, now_s) for name in lost}
        # A node that came back and is lost again gets a replacement again.
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

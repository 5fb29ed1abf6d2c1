"""This node's part in a check of several nodes: from the request, its ranks and where they meet."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence

from megascale.v1 import executor_pb2
from megascale_common.node.addresses import listen, split
from megascale_common.service.errors import StateError, invalid
from megascale_executor.agent.checks.diagnosis import GroupPart
from megascale_executor.agent.processes.rank_probe import Meeting
from megascale_executor.diagnostics.finding import Finding

MAX_WORLD_SIZE = 1 << 20


class GroupChecks:
    """Checks of groups on one node.

    Args:
        incarnation: the agent's; a request for another one is refused.
        host: the address on which rank 0's store listens.
        devices: those that the node has.
        run: runs the node's part.
    """

    def __init__(
        self,
        incarnation: str,
        host: str,
        devices: Sequence[int],
        run: Callable[[GroupPart], Awaitable[list[Finding]]],
    ) -> None:
        self._incarnation, self._host, self._devices = incarnation, host, tuple(devices)
        self.run = run

    @contextlib.contextmanager
    def part(self, request: executor_pb2.CheckGroupRequest) -> Iterator[GroupPart]:
        """The node's part; where rank 0 is here, the store's socket listens until the end.

        Raises:
            RequestError: a device that the node lacks, ranks that do not fit, a bad address.
            StateError: another incarnation is meant.
        """
        if request.incarnation not in ("", self._incarnation):
            raise StateError(
                "the agent was restarted since; ask the driver for its new incarnation",
                reason="NODE_RESTARTED",
            )
        devices = tuple(request.devices) or self._devices
        if len(set(devices)) != len(devices) or not set(devices) <= set(self._devices):
            problem = f"{list(devices)} are not devices of this node"
            raise invalid("devices", problem, f"choose from {list(self._devices)}")
        first, world = request.first_rank, request.world_size
        if not 0 <= first <= first + len(devices) <= world <= MAX_WORLD_SIZE:
            problem = f"ranks {first} to {first + len(devices) - 1} do not fit into {world}"
            raise invalid("world_size", problem, "give the number of devices of all nodes")
        if first == 0:
            with listen(self._host, backlog=world + 8) as listener:
                port = listener.getsockname()[1]
                yield GroupPart(devices, Meeting(0, world, self._host, port, listener))
            return
        try:
            host, port = split(request.store_endpoint)
        except ValueError:
            problem = f"{request.store_endpoint!r} is not an address"
            raise invalid("store_endpoint", problem, "give host:port of rank 0's node") from None
        yield GroupPart(devices, Meeting(first, world, host, port))

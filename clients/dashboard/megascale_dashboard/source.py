"""What the pages read: the calls of the client that change nothing.

:class:`megascale_client.AsyncClient` is one; tests replay recorded answers through another.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from megascale.v1 import driver_pb2, types_pb2
from megascale_client import Job, Node
from megascale_client.messages import WatchJobResponse


class Source(Protocol):
    """A cluster as the pages read it; the methods are those of AsyncClient and raise its errors."""

    notes: list[str]  # what the driver says with its newest answer

    async def cluster_info(self) -> driver_pb2.GetClusterInfoResponse:
        """The leader, counts, rules, the breaker."""
        ...

    async def get(self, name: str) -> Job:
        """One job."""
        ...

    async def explain(self, name: str) -> driver_pb2.ExplainJobResponse:
        """Why a job is in its phase."""
        ...

    async def topology(self, name: str) -> driver_pb2.GetTopologyResponse:
        """Where each rank is, for whom it waits, and who holds the others up."""
        ...

    async def heat_map(self, name: str) -> driver_pb2.GetHeatMapResponse:
        """What each rank takes for each operation, and the nodes that are slow by that."""
        ...

    async def mfu_decline(self, name: str) -> driver_pb2.GetMfuDeclineResponse:
        """Why the steps of a job take longer than before."""
        ...

    def timeline(
        self, name: str, *, steps: int = 0, first_step: int = 0, ranks: Sequence[int] = ()
    ) -> AsyncIterator[bytes]:
        """A trace of these ranks on one clock: parts of a .json.gz."""
        ...

    def jobs(self) -> AsyncIterator[Job]:
        """All jobs by name."""
        ...

    def nodes(self) -> AsyncIterator[Node]:
        """All nodes by name."""
        ...

    def events(self, subject: str = "") -> AsyncIterator[types_pb2.Event]:
        """The lines of the audit log that the driver holds, oldest first."""
        ...

    def checkpoints(self, name: str) -> AsyncIterator[driver_pb2.Checkpoint]:
        """Complete checkpoints of a job, newest first."""
        ...

    def watch(self, name: str) -> AsyncIterator[WatchJobResponse]:
        """A job's state, step records and events as they happen."""
        ...

"""What lies in a node's staging memory: snapshots of its own ranks, and replicas of other nodes'.

It outlives attempts, and is lost with the agent's host. A job without replicas has its newest
snapshot there. With replicas all ranks copy the same steps, and hold each until the next one is
whole everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from megascale.v1 import link_pb2

Snapshot = tuple[int, int]  # (attempt, step)
Held = dict[Snapshot, tuple[int, ...]]  # with the ranks whose state it is
LAYOUT = "layout"  # the digest of every snapshot's: the driver counts none without one


class Memory:
    """The staging memory of one node."""

    def __init__(self) -> None:
        self.sealed: dict[str, Held] = {}  # by job
        self.replicas: dict[str, Held] = {}

    def clear(self) -> None:
        """The host has lost its memory."""
        self.sealed.clear()
        self.replicas.clear()

    def seal(self, job: str, snapshot: Snapshot, ranks: tuple[int, ...], *, holds: bool) -> None:
        """The node's own ranks have a snapshot; ``holds``: those before stay for now."""
        held = self.sealed.setdefault(job, {})
        if not holds:
            held.clear()
        held[snapshot] = ranks

    def keep(self, job: str, snapshot: Snapshot, ranks: tuple[int, ...]) -> None:
        """Another node's snapshot has been copied to here."""
        held = self.replicas.setdefault(job, {})
        held[snapshot] = (*held.get(snapshot, ()), *ranks)

    def drop_before(self, job: str, snapshot: Snapshot) -> None:
        """A snapshot is whole everywhere: older ones are not needed."""
        for part in (self.sealed, self.replicas):
            for older in [each for each in part.get(job, {}) if each < snapshot]:
                del part[job][older]

    def own(self, job: str, snapshot: Snapshot) -> set[int]:
        """The ranks whose state the node has sealed itself."""
        return set(self.sealed.get(job, {}).get(snapshot, ()))

    def copies(self, job: str, snapshot: Snapshot) -> set[int]:
        """The ranks of other nodes whose replica it keeps."""
        return set(self.replicas.get(job, {}).get(snapshot, ()))

    def jobs(self) -> Iterable[str]:
        """Jobs of which anything is here."""
        return dict.fromkeys((*self.sealed, *self.replicas))

    def report(self, job: str, message: link_pb2.CheckpointProgress) -> None:
        """Add it to a heartbeat's progress of the job."""
        for part, target in ((self.sealed, message.sealed), (self.replicas, message.replicas)):
            for (attempt, step), ranks in part.get(job, {}).items():
                for rank in ranks:
                    seal = target.add()
                    seal.rank, seal.attempt, seal.step = rank, attempt, step
                    seal.layout_digest = LAYOUT

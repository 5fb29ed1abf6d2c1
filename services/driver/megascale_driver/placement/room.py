"""How many ranks some nodes could take: a histogram, so that a question costs no pass over nodes.

A gang fits if the nodes of one kind have room for all its ranks in whole tensor-parallel groups.
That is exactly when :func:`megascale_driver.placement.gang.place` finds a placement, at a cost that
depends on how many sizes of nodes there are, not on how many nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megascale_driver.placement.gang import KINDS, Candidate


class Room:
    """Nodes by kind and number of devices."""

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        self._sizes = Counter((c.kind, len(c.devices)) for c in candidates)

    def copy(self) -> Room:
        """The same nodes, counted separately from now on."""
        other = Room()
        other._sizes = self._sizes.copy()
        return other

    def add(self, candidate: Candidate) -> None:
        """One more node."""
        self._sizes[candidate.kind, len(candidate.devices)] += 1

    def remove(self, candidate: Candidate) -> None:
        """One node less; it must have been counted."""
        self._sizes[candidate.kind, len(candidate.devices)] -= 1

    def plus(self, others: Iterable[Room]) -> Room:
        """The nodes of this room and of others that have none in common with it."""
        total = self.copy()
        for other in others:
            total._sizes.update(other._sizes)
        return total

    def ranks(self, kind: str, tp: int) -> int:
        """How many ranks the nodes of ``kind`` take in whole groups of ``tp``."""
        return sum(
            count * (size // tp * tp) for (each, size), count in self._sizes.items() if each == kind
        )

    def most(self, tp: int) -> int:
        """The most ranks that one kind takes in whole groups of ``tp``."""
        return max((self.ranks(kind, tp) for kind in KINDS), default=0)

    def fits(self, world_size: int, tp: int) -> bool:
        """Whether a gang of ``world_size`` ranks has room."""
        return self.most(tp) >= world_size

    def largest(self) -> int:
        """Devices of the largest node; 0 without any."""
        return max((size for (_, size), count in self._sizes.items() if count > 0), default=0)


def ranks_on(candidate: Candidate, tp: int) -> int:
    """How many ranks the node takes in whole groups of ``tp``."""
    return len(candidate.devices) // tp * tp

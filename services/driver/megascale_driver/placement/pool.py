"""The idle nodes during one decision of the queue, and which jobs can take them.

Spares of a running job and survivors of a recovering one are guarded with that job's priority. Only
the job itself and jobs of strictly higher priority can take them, and the latter only if nothing
else suffices.

Whether a gang fits is answered from a histogram of node sizes (:class:`Room`). A gang fits if the
nodes of one kind have room for all its ranks in whole groups that share a node. This is true
exactly when :func:`megascale_driver.placement.gang.place` finds a placement, but the cost depends
on the number of different node sizes instead of the number of nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from megascale_driver.placement.gang import KINDS, Candidate
from megascale_driver.placement.queue_values import RunningJob, WaitingJob


class Room:
    """Counts of nodes by kind and number of devices."""

    def __init__(self, candidates: Iterable[Candidate] = ()) -> None:
        self._sizes = Counter((c.kind, len(c.devices)) for c in candidates)

    def copy(self) -> Room:
        """An independent copy."""
        other = Room()
        other._sizes = self._sizes.copy()
        return other

    def add(self, candidate: Candidate) -> None:
        """Count one more node."""
        self._sizes[candidate.kind, len(candidate.devices)] += 1

    def remove(self, candidate: Candidate) -> None:
        """Count one node less; it must have been counted before."""
        self._sizes[candidate.kind, len(candidate.devices)] -= 1

    def plus(self, others: Iterable[Room]) -> Room:
        """The nodes of this room and of the others, which must not share any node with it."""
        total = self.copy()
        for other in others:
            total._sizes.update(other._sizes)
        return total

    def ranks(self, kind: str, group: int) -> int:
        """Number of ranks that the nodes of ``kind`` take in whole groups of ``group``."""
        return sum(
            count * (size // group * group)
            for (each, size), count in self._sizes.items()
            if each == kind
        )

    def most(self, group: int) -> int:
        """The most ranks that the nodes of any one kind take in whole groups of ``group``."""
        return max((self.ranks(kind, group) for kind in KINDS), default=0)

    def fits(self, world_size: int, group: int) -> bool:
        """True if there is room for a gang of ``world_size`` ranks."""
        return self.most(group) >= world_size

    def largest(self) -> int:
        """Devices of the largest node; 0 without nodes."""
        return max((size for (_, size), count in self._sizes.items() if count > 0), default=0)


@dataclass(frozen=True, slots=True)
class Tier:
    """Some idle nodes, and their room."""

    nodes: dict[str, Candidate]
    room: Room

    def without(self, names: frozenset[str]) -> Tier:
        """The tier without these nodes."""
        if names.isdisjoint(self.nodes):
            return self
        nodes = {name: c for name, c in self.nodes.items() if name not in names}
        return Tier(nodes, Room(nodes.values()))


class Pool:
    """The idle nodes that are left after the decisions made so far."""

    def __init__(
        self,
        idle: Mapping[str, Candidate],
        waiting: Iterable[WaitingJob],
        running: Iterable[RunningJob],
    ) -> None:
        self.free = dict(idle)
        self.room = Room(idle.values())
        # By node name: the owner's priority and name, and the node.
        self._guarded: dict[str, tuple[int, str, Candidate]] = {}
        # A node is guarded for the first job that claims it: running jobs come before recovering
        # ones, and higher priorities before lower ones.
        for job in sorted(running, key=lambda each: (-each.priority, each.name)):
            self._guard(job.priority, job.name, job.spares)
        for waiter in sorted(waiting, key=lambda each: each.order):
            if waiter.recovering:
                kept = (*(part.node for part in waiter.last), *waiter.spares)
                names = [name for name in kept if name not in waiter.evicted]
                self._guard(waiter.priority, waiter.name, names)

    def own(self, job: WaitingJob) -> dict[str, Candidate]:
        """The idle nodes that are guarded for this job."""
        return {n: c for n, (_, owner, c) in self._guarded.items() if owner == job.name}

    def tiers(self, job: WaitingJob) -> Iterator[Tier]:
        """Growing sets of nodes that the job can take; a later tier is used only if needed.

        The first tier has the job's own nodes and those without an owner. The next adds the
        reserves of jobs of lower priority. The last adds the nodes that this job was moved away
        from, because using one of them is better than waiting for ever.
        """
        mine, lower = self.own(job), self._lower(job.priority)
        first = Tier({**self.free, **mine}, self.room.plus([Room(mine.values())]))
        tiers = [first]
        if lower:
            tiers.append(Tier({**first.nodes, **lower}, first.room.plus([Room(lower.values())])))
        for tier in tiers:
            yield tier.without(job.evicted)
        if not job.evicted.isdisjoint(tiers[-1].nodes):
            yield tiers[-1]

    def room_for(self, job: WaitingJob) -> Room:
        """Room of all nodes that the job can take, as in its last tier."""
        room = self.room.copy()
        for _, (priority, owner, candidate) in self._guarded.items():
            if owner == job.name or priority < job.priority:
                room.add(candidate)
        return room

    def open_to(self, job: WaitingJob) -> dict[str, Candidate]:
        """All nodes that the job can take."""
        return {**self.free, **self._lower(job.priority), **self.own(job)}

    def take(self, names: Iterable[str]) -> None:
        """Remove these nodes: a job starts on them, or they are held."""
        for name in names:
            candidate = self.free.pop(name, None)
            if candidate is not None:
                self.room.remove(candidate)
            self._guarded.pop(name, None)

    def release(self, job: WaitingJob, but: Collection[str] = ()) -> None:
        """Stop guarding the job's survivors and spares, except those in ``but``."""
        for name, candidate in self.own(job).items():
            if name in but:
                continue
            del self._guarded[name]
            self.free[name] = candidate
            self.room.add(candidate)

    def _lower(self, priority: int) -> dict[str, Candidate]:
        return {n: c for n, (held, _, c) in self._guarded.items() if held < priority}

    def _guard(self, priority: int, owner: str, names: Iterable[str]) -> None:
        for name in names:
            candidate = self.free.pop(name, None)
            if candidate is not None:
                self.room.remove(candidate)
                self._guarded[name] = (priority, owner, candidate)

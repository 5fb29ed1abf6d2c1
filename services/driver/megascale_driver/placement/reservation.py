"""Reservation and preemption for a gang that cannot start yet.

Reservation: held nodes keep small jobs from starving the gang. It is expected to start on idle
nodes and on nodes of the running jobs that end first. If these ends are known, idle nodes that the
gang will not need then are left to other jobs (backfill). If they are unknown, or the gang has
waited for long, every idle node that it could use is held, so the number of its nodes only grows.

Preemption: as few running jobs as possible leave for a job of higher priority, the lowest priority
first. A job leaves only if it can save and then stop, so its work is kept. No job leaves if the
waiting job could not start even then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from megascale_driver.placement.gang import KINDS, Candidate, ranks_on
from megascale_driver.placement.pool import Room
from megascale_driver.placement.queue_values import RunningJob, WaitingJob


@dataclass(slots=True)
class Holding:
    """A running job, with those of its nodes that no earlier job in the queue expects."""

    job: RunningJob
    nodes: dict[str, Candidate]
    room: Room

    @classmethod
    def of(cls, job: RunningJob, nodes: dict[str, Candidate]) -> Holding:
        """A holding with all of these nodes."""
        return cls(job, nodes, Room(nodes.values()))

    def count_on(self, name: str) -> None:
        """Remove a node that an earlier job expects."""
        candidate = self.nodes.pop(name, None)
        if candidate is not None:
            self.room.remove(candidate)


def victims(
    job: WaitingJob, room: Room, busy: Sequence[Holding], *, short: int
) -> tuple[RunningJob, ...] | None:
    """Jobs that must leave; () if those that leave already suffice; None if it would not help.

    Args:
        room: the idle nodes that ``job`` can take.
        short: devices by which its tenant's quota is short; only jobs of the same tenant help.
    """
    leaving = [each for each in busy if each.job.leaving]
    room = room.plus(each.room for each in leaving)
    short -= sum(each.job.world_size for each in leaving if each.job.tenant == job.tenant)
    willing = [each for each in busy if _may_leave(each.job, job)]
    # The lowest priority first; among equals the youngest, which has the least work to repeat.
    willing.sort(key=lambda each: (each.job.priority, -each.job.started_s, each.job.name))
    chosen: list[Holding] = []
    freed, quota = room, short
    for each in willing:
        fits = freed.fits(job.world_size, job.node_group)
        if fits and quota <= 0:
            break
        # Once the nodes suffice, only jobs of the same tenant still help, by freeing its quota.
        if not fits or each.job.tenant == job.tenant:
            chosen.append(each)
            freed = freed.plus([each.room])
            quota -= each.job.world_size if each.job.tenant == job.tenant else 0
    if not _enough(job, room, chosen, short):
        return None
    # Jobs that were chosen first may have become unnecessary: spare the most valuable ones.
    for each in reversed(list(chosen)):
        others = [other for other in chosen if other is not each]
        if _enough(job, room, others, short):
            chosen = others
    return tuple(each.job for each in chosen)


def _may_leave(running: RunningJob, job: WaitingJob) -> bool:
    return running.preemptible and not running.leaving and running.priority < job.priority


def _enough(job: WaitingJob, room: Room, gone: Sequence[Holding], short: int) -> bool:
    given_up = sum(each.job.world_size for each in gone if each.job.tenant == job.tenant)
    return given_up >= short and room.plus(each.room for each in gone).fits(
        job.world_size, job.node_group
    )


UNKNOWN_END_S = float("inf")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Idle nodes that are held, busy nodes that the job expects, and the jobs that have them."""

    idle: tuple[str, ...]
    busy: tuple[str, ...]
    behind: tuple[str, ...]


def ends_at(job: RunningJob, now_s: float, soon: Set[str]) -> float:
    """When the job's nodes are expected to be free; jobs in ``soon`` are about to leave."""
    if job.leaving or job.name in soon:
        return now_s
    return UNKNOWN_END_S if job.ends_s is None else max(now_s, job.ends_s)


def reserve(
    job: WaitingJob,
    idle: Mapping[str, Candidate],
    busy: Sequence[Holding],
    *,
    soon: Set[str],
    now_s: float,
    backfill: bool,
) -> Reservation | None:
    """Reserve nodes for a job without room among ``idle``; None if ``busy`` is not enough either.

    Args:
        idle: nodes that it can take; its survivors and spares are held first.
        soon: names of busy jobs that are about to leave.
        backfill: True if idle nodes that it will not need are left to others.
    """
    order = sorted(
        busy,
        key=lambda item: (ends_at(item.job, now_s, soon), item.job.started_s, item.job.name),
    )
    room, behind, counted = Room(idle.values()), [], dict[str, Candidate]()
    end_s = now_s
    for held in order:
        if room.fits(job.world_size, job.node_group):
            break
        if held.nodes:
            end_s = ends_at(held.job, now_s, soon)
            behind.append(held.job.name)
            counted.update(held.nodes)
            room = room.plus([held.room])
    # A gang runs on devices of one kind; nodes of the other kind are not held.
    kind = next((k for k in KINDS if room.ranks(k, job.node_group) >= job.world_size), None)
    if kind is None:
        return None
    mine = {*(part.node for part in job.last), *job.spares}
    usable = sorted(
        (c for c in idle.values() if c.kind == kind and ranks_on(c, job.node_group)),
        key=lambda c: (c.name not in mine, c.name),
    )
    coming = [c for c in counted.values() if c.kind == kind and ranks_on(c, job.node_group)]
    # The ends are known: of the idle nodes, hold only as many as the coming ones will not cover.
    if backfill and end_s != UNKNOWN_END_S:
        missing = job.world_size - sum(ranks_on(c, job.node_group) for c in coming)
        usable = _first(usable, missing, job)
    left = job.world_size - sum(ranks_on(c, job.node_group) for c in usable)
    busy_nodes = _first(coming, left, job)
    return Reservation(names(usable), names(busy_nodes), tuple(behind))


def names(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    """Names of the nodes, in their order."""
    return tuple(c.name for c in candidates)


def _first(candidates: Sequence[Candidate], ranks: int, job: WaitingJob) -> list[Candidate]:
    """As many of the first nodes as are needed for ``ranks`` ranks; none for 0 or less."""
    chosen = []
    for candidate in candidates:
        if ranks <= 0:
            break
        chosen.append(candidate)
        ranks -= ranks_on(candidate, job.node_group)
    return chosen

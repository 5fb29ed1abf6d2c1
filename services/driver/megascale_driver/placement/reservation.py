"""What a gang that cannot start yet brings about: nodes held for it, and jobs that leave for it.

Held nodes keep small jobs from starving it. The gang is expected to start on the idle nodes and
those of the running jobs that end first. Where these ends are known, idle nodes that it will not
need then are left to others (backfill). Where they are not, or once it has waited for long, every
idle node that it could use is held: the number of its nodes only grows from then on.

For a job of higher priority as few running jobs leave as possible, the least first. A job leaves
only if it can save and then stop; what it computed is kept. No job leaves for one that would not
start then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from megascale_driver.placement.gang import KINDS, Candidate, ranks_on
from megascale_driver.placement.pool import Room
from megascale_driver.placement.queue_values import RunningJob, WaitingJob


@dataclass(slots=True)
class Holding:
    """A running job with those of its nodes that no earlier job in the queue counts on."""

    job: RunningJob
    nodes: dict[str, Candidate]
    room: Room

    @classmethod
    def of(cls, job: RunningJob, nodes: dict[str, Candidate]) -> Holding:
        """All of these nodes."""
        return cls(job, nodes, Room(nodes.values()))

    def count_on(self, name: str) -> None:
        """An earlier job counts on this node, if it is one of these."""
        candidate = self.nodes.pop(name, None)
        if candidate is not None:
            self.room.remove(candidate)


def victims(
    job: WaitingJob, room: Room, busy: Sequence[Holding], *, short: int
) -> tuple[RunningJob, ...] | None:
    """Jobs that must be ordered to leave; () if those that leave already suffice; None: no use.

    Args:
        room: room of the idle nodes that ``job`` may take.
        short: devices by which the quota of its tenant is short (jobs of other tenants do not
            help).
    """
    leaving = [each for each in busy if each.job.leaving]
    room = room.plus(each.room for each in leaving)
    short -= sum(each.job.world_size for each in leaving if each.job.tenant == job.tenant)
    willing = [each for each in busy if _may_leave(each.job, job)]
    # The lowest priority first, and among equals the youngest: it has the least to repeat.
    willing.sort(key=lambda each: (each.job.priority, -each.job.started_s, each.job.name))
    chosen: list[Holding] = []
    freed, quota = room, short
    for each in willing:
        fits = freed.fits(job.world_size, job.tp)
        if fits and quota <= 0:
            break
        if not fits or each.job.tenant == job.tenant:
            chosen.append(each)
            freed = freed.plus([each.room])
            quota -= each.job.world_size if each.job.tenant == job.tenant else 0
    if not _enough(job, room, chosen, short):
        return None
    for each in reversed(list(chosen)):  # the dearest first: perhaps the others suffice
        others = [other for other in chosen if other is not each]
        if _enough(job, room, others, short):
            chosen = others
    return tuple(each.job for each in chosen)


def _may_leave(running: RunningJob, job: WaitingJob) -> bool:
    return running.preemptible and not running.leaving and running.priority < job.priority


def _enough(job: WaitingJob, room: Room, gone: Sequence[Holding], short: int) -> bool:
    given_up = sum(each.job.world_size for each in gone if each.job.tenant == job.tenant)
    return given_up >= short and room.plus(each.room for each in gone).fits(job.world_size, job.tp)


UNKNOWN_END_S = float("inf")


@dataclass(frozen=True, slots=True)
class Reservation:
    """Idle nodes that are held, busy nodes that the job counts on, and the jobs that have them."""

    idle: tuple[str, ...]
    busy: tuple[str, ...]
    behind: tuple[str, ...]


def ends_at(job: RunningJob, now_s: float, soon: Set[str]) -> float:
    """When the job's nodes are expected to be free; those in ``soon`` are about to be."""
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
    """The reservation of a job that has no room among ``idle``; None if it has none with ``busy``.

    Args:
        idle: nodes that it may take; its survivors and spares are held first.
        soon: jobs among them that are about to leave.
        backfill: whether idle nodes that it will not need may be left to others.
    """
    order = sorted(
        busy,
        key=lambda item: (ends_at(item.job, now_s, soon), item.job.started_s, item.job.name),
    )
    room, behind, counted = Room(idle.values()), [], dict[str, Candidate]()
    end_s = now_s
    for held in order:
        if room.fits(job.world_size, job.tp):
            break
        if held.nodes:
            end_s = ends_at(held.job, now_s, soon)
            behind.append(held.job.name)
            counted.update(held.nodes)
            room = room.plus([held.room])
    kind = next((k for k in KINDS if room.ranks(k, job.tp) >= job.world_size), None)
    if kind is None:
        return None
    mine = {*(part.node for part in job.last), *job.spares}
    usable = sorted(
        (c for c in idle.values() if c.kind == kind and ranks_on(c, job.tp)),
        key=lambda c: (c.name not in mine, c.name),
    )
    coming = [c for c in counted.values() if c.kind == kind and ranks_on(c, job.tp)]
    if backfill and end_s != UNKNOWN_END_S:
        missing = job.world_size - sum(ranks_on(c, job.tp) for c in coming)
        usable = _first(usable, missing, job)
    left = job.world_size - sum(ranks_on(c, job.tp) for c in usable)
    busy_nodes = _first(coming, left, job)
    return Reservation(names(usable), names(busy_nodes), tuple(behind))


def names(candidates: Iterable[Candidate]) -> tuple[str, ...]:
    """Names of the nodes, in their order."""
    return tuple(c.name for c in candidates)


def _first(candidates: Sequence[Candidate], ranks: int, job: WaitingJob) -> list[Candidate]:
    """The first of the nodes that take ``ranks`` ranks together; none for 0 or less."""
    chosen = []
    for candidate in candidates:
        if ranks <= 0:
            break
        chosen.append(candidate)
        ranks -= ranks_on(candidate, job.tp)
    return chosen

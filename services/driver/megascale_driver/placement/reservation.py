"""Which nodes are held for a gang that cannot start yet, so that small jobs do not starve it.

The gang is expected to start on the idle nodes and those of the running jobs that end first. Where
these ends are known, idle nodes that it will not need then are left to others (backfill). Where
they are not, or once it has waited for long, every idle node that it could use is held: the number
of its nodes only grows from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from megascale_driver.placement.gang import KINDS, Candidate
from megascale_driver.placement.preemption import Holding
from megascale_driver.placement.queue_values import RunningJob, WaitingJob
from megascale_driver.placement.room import Room, ranks_on

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

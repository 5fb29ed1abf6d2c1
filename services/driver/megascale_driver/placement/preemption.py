"""Which running jobs must leave for one of higher priority: as few as possible, the least first.

A job leaves only if it can save and then stop; what it computed is kept. Nobody leaves for a job
that would not start then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megascale_driver.placement.gang import Candidate
from megascale_driver.placement.queue_values import RunningJob, WaitingJob
from megascale_driver.placement.room import Room


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

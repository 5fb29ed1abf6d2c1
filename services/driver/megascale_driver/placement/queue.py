"""Decisions of the queue: where a waiting job starts, what it waits for, what it displaces. Pure.

Jobs are taken by priority, then recovering jobs first, then by age. Each gets what the jobs before
it have left. For a gang that cannot start yet, nodes are held, or jobs of lower priority are
displaced (:mod:`megascale_driver.placement.reservation`). Later jobs start at the same time on
nodes that it cannot use. A job that no known nodes could run holds nothing, except for a while the
survivors of its last attempt, so it does not block other jobs.

Note [Repeatable decisions]. The plan is a function of the present view alone: no decision depends
on an earlier one that is not in the view. So a new leader decides the same as the old one would
have, a decision that was lost with a leader is made again, and a held node needs no release: once
the view has changed, the next plan simply does not hold it. All ties are broken by name.
"""

from __future__ import annotations

from collections.abc import Sequence

from megascale_driver.placement import reservation
from megascale_driver.placement.cost import cheapest, rescored
from megascale_driver.placement.gang import Candidate, replace_lost
from megascale_driver.placement.pool import Pool, Room
from megascale_driver.placement.queue_values import (
    STARTS,
    Choice,
    Decision,
    Kind,
    Ledger,
    Placer,
    Plan,
    RunningJob,
    View,
    WaitingJob,
)
from megascale_driver.placement.reservation import Holding, victims
from megascale_job.visible import counted

# Placing a job on thousands of nodes takes milliseconds; further jobs start with the next tick.
MAX_STARTS = 32
MAX_NAMED = 4  # most names in a sentence
_SAME = "the same nodes, whose memory may hold its snapshots"


def decide(view: View, place: Placer = cheapest) -> Plan:
    """All decisions about the waiting jobs; equal views give equal plans."""
    return _Round(view, place).plan()


class _Round:
    """One plan in progress: nodes and quotas that are left after the jobs decided so far."""

    def __init__(self, view: View, place: Placer) -> None:
        self._view = view
        self._place = place
        self._pool = Pool(view.idle, view.waiting, view.running)
        self._known = Room(view.known.values())
        self._busy = [Holding.of(job, _nodes_of(job, view)) for job in view.running]
        # A gang can expect nodes that are about to be idle, or it would displace a job for them.
        between = _between(view)
        if between:
            self._busy.append(Holding.of(_NOBODY, between))
        self._holder = {name: each for each in self._busy for name in each.nodes}
        self._quota = Ledger(view.quotas, view.running)
        self._decisions: list[Decision] = []
        self._holding: list[str] = []  # names of jobs for which nodes are held
        self._displaced: set[str] = set()

    def plan(self) -> Plan:
        starts = 0
        for job in sorted(self._view.waiting, key=lambda each: each.order):
            decision = self._decide(job)
            self._decisions.append(decision)
            starts += decision.kind in STARTS
            if starts == MAX_STARTS:
                break
        return Plan(tuple(self._decisions), dict(self._pool.free))

    def _decide(self, job: WaitingJob) -> Decision:
        # A job that backs off keeps its survivors: they hold its newest snapshots in memory.
        if self._view.now_s < job.not_before_s:
            own = tuple(self._pool.own(job))
            self._pool.take(own)
            return Decision(Kind.KEEP, job.name, "", nodes=own)
        if why := self._quota.never(job):
            self._pool.release(job)
            return Decision(Kind.WAIT, job.name, why)
        if not self._known.fits(job.world_size, job.node_group):
            return self._unplaceable(job)
        short = self._quota.short(job)
        room = self._pool.room_for(job)
        if not short and room.fits(job.world_size, job.node_group):
            found = self._choose(job)
            if found is not None:
                return self._start(job, found)
        return self._hold(job, room, short)

    def _unplaceable(self, job: WaitingJob) -> Decision:
        """The job waits for nodes to join or return, and does not block other jobs."""
        lack = self._lack(job)
        waited_s = self._view.now_s - job.waiting_since_s
        own = tuple(self._pool.own(job))
        if own and waited_s < self._view.rules.survivors_s:
            self._pool.take(own)
            limit_s = self._view.rules.survivors_s
            kept = f"it keeps {_list(own)} for {limit_s:g} s after its last attempt"
            return Decision(Kind.KEEP, job.name, f"{lack}; {kept}", nodes=own)
        self._pool.release(job)
        return Decision(Kind.WAIT, job.name, lack)

    def _lack(self, job: WaitingJob) -> str:
        """The devices that all known nodes lack for the job, as a clause."""
        if not self._view.known:
            needs = f"it needs {counted(job.world_size, 'device')}"
            # Nodes that have joined can be cordoned or away.
            return f"{needs}, and no node may be used yet: `megascale nodes` has those that joined"
        largest = self._known.largest()
        if job.node_group > largest:
            return (
                f"it needs nodes of at least {counted(job.node_group, 'device')}, and the largest "
                f"that may be used has {largest}"
            )
        most = self._known.most(job.node_group)
        return f"{_need(job)}, and the nodes that may be used can give {most}"

    def _choose(self, job: WaitingJob) -> Choice | None:
        """The cheapest placement; for a recovering job one that keeps its survivors, if any."""
        tiers = list(self._pool.tiers(job))
        if job.recovering:
            for tier in tiers:
                if (kept := _with_survivors(job, tier.nodes)) is not None:
                    return kept
        for tier in tiers:
            if tier.room.fits(job.world_size, job.node_group):
                return self._place(job, tier.nodes.values())
        return None

    def _start(self, job: WaitingJob, found: Choice) -> Decision:
        used = tuple(part.node for part in found.parts)
        self._pool.take(used)
        self._quota.use(job)
        self._pool.release(job, but=job.spares)  # survivors that it does not use
        if self._holding:
            why = (
                f"{found.why}; beside what is held for {_jobs(self._holding)}, without delaying it"
            )
            return _started(Kind.BACKFILL, job, found, why)
        return _started(Kind.PLACE, job, found, found.why)

    def _hold(self, job: WaitingJob, room: Room, short: int) -> Decision:
        """For a job that cannot start yet: displace others, hold nodes, or wait."""
        rules = self._view.rules
        busy = [each for each in self._busy if each.job.name not in self._displaced]
        leave = victims(job, room, busy, short=short) if rules.preempt else None
        for victim in leave or ():
            self._displaced.add(victim.name)
            why = f"job {job.name} of priority {job.priority} needs its nodes"
            self._decisions.append(
                Decision(Kind.PREEMPT, victim.name, why, makes_room_for=job.name)
            )
        why = self._quota.why(job) if short else self._missing(job, room)
        self._quota.promise(job)
        # Held nodes would not help a job that its tenant's quota keeps from starting.
        if short and leave is None:
            self._pool.release(job)
            return Decision(Kind.WAIT, job.name, why)
        # After backfill_s idle nodes are no longer left to others: estimates of when running jobs
        # end can be wrong again and again, and the job must not starve.
        found = reservation.reserve(
            job,
            self._pool.open_to(job),
            self._counted_on(leave or ()),
            soon={victim.name for victim in leave or ()},
            now_s=self._view.now_s,
            backfill=self._view.now_s - job.waiting_since_s < rules.backfill_s,
        )
        if found is None:
            own = tuple(self._pool.own(job))
            self._pool.take(own)
            first = f"held for {_jobs(self._holding)}" if self._holding else "given away first"
            why = f"{why}; the nodes that it needs are {first}"
            return Decision(Kind.KEEP if own else Kind.WAIT, job.name, why, nodes=own)
        for name in found.busy:
            self._uncount(name)
        held = (*found.idle, *(n for n in self._pool.own(job) if n not in found.idle))
        self._pool.take(held)
        self._holding.append(job.name)
        why += self._awaits(job, found, leave)
        return Decision(Kind.RESERVE, job.name, why, nodes=held)

    def _missing(self, job: WaitingJob, room: Room) -> str:
        """The devices that are missing now, as a clause."""
        free, most = room.most(job.node_group), self._known.most(job.node_group)
        return f"{_need(job)}, {free} of {most} are free"

    def _awaits(
        self,
        job: WaitingJob,
        found: reservation.Reservation,
        leave: Sequence[RunningJob] | None,
    ) -> str:
        text = f"; {_list(found.idle)} held for it" if found.idle else ""
        if leave:
            gone = [victim.name for victim in leave]
            return f"{text}; {_jobs(gone)} of lower priority must save and leave"
        ahead = [name for name in found.behind if name]
        text += f" until {_jobs(ahead)} ends or leaves" if ahead else ""
        cannot = [
            f"job {each.job.name} is not displaced: {each.job.cannot}"
            for each in self._busy
            if each.job.cannot and each.job.priority < job.priority and not each.job.leaving
        ]
        return "; ".join([text, *cannot[:1]]) if self._view.rules.preempt else text

    def _counted_on(self, leave: Sequence[RunningJob]) -> list[Holding]:
        """Jobs whose nodes this job can expect; if some leave for it, only those that leave."""
        if not leave:
            return [each for each in self._busy if each.nodes]
        names = {victim.name for victim in leave}
        return [each for each in self._busy if each.job.name in names or each.job.leaving]

    def _uncount(self, name: str) -> None:
        """Later jobs must not expect this node."""
        if name in self._holder:
            self._holder[name].count_on(name)


def _with_survivors(job: WaitingJob, usable: dict[str, Candidate]) -> Choice | None:
    """The last placement with its lost nodes replaced; None if it cannot be completed.

    Survivors keep their ranks, because their memory holds the snapshots of those ranks.
    """
    mine = {part.node for part in job.last}
    welcome = {name: c for name, c in usable.items() if name not in job.evicted}
    survivors = {name: c for name, c in welcome.items() if name in mine}
    named = [welcome[name] for name in job.spares if name in welcome and name not in mine]
    others = [c for name, c in welcome.items() if name not in mine and name not in job.spares]
    parts = replace_lost(job.last, survivors, named, others, job.traffic)
    if parts is None:
        return None
    fresh = tuple(part.node for part in parts if part.node not in mine)
    if not fresh:
        return rescored(job, Choice(parts, _SAME), (), welcome)
    kept = len(parts) - len(fresh)
    spares = [name for name in fresh if name in job.spares]
    origin = "spare" if len(spares) == len(fresh) else "node"
    text = (
        f"{kept} of {counted(len(parts), 'node')} keep their ranks, {origin} {_list(fresh)} "
        "joins them"
    )
    return rescored(job, Choice(parts, text), fresh, welcome)


def _started(kind: Kind, job: WaitingJob, found: Choice, why: str) -> Decision:
    return Decision(kind, job.name, why, found.parts, order=found.order, score=found.score)


def _nodes_of(job: RunningJob, view: View) -> dict[str, Candidate]:
    """Nodes of a running job that will be usable once the job has left them."""
    return {name: view.known[name] for name in job.nodes if name in view.known}


# A placeholder that owns the nodes which a job has left and which have not yet reported idle.
_NOBODY = RunningJob(name="", world_size=0, nodes=(), leaving=True)


def _between(view: View) -> dict[str, Candidate]:
    """Nodes that belong to no job and are not idle: they are about to become idle."""
    held = {name for job in view.running for name in job.nodes}
    names = sorted(n for n in view.known if n not in held and n not in view.idle)
    return {name: view.known[name] for name in names}


def _need(job: WaitingJob) -> str:
    groups = f" in groups of {job.node_group} on one node" if job.node_group > 1 else ""
    return f"it needs {counted(job.world_size, 'device')}{groups}"


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"


def _jobs(names: Sequence[str]) -> str:
    return f"job {names[0]}" if len(names) == 1 else f"jobs {_list(names)}"

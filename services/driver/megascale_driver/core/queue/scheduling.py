"""The queue in the core: the view that it decides from, and the decisions carried out.

:mod:`megascale_driver.placement.queue` decides which jobs start, wait or leave. This module gives
it waiting jobs, running jobs, nodes and quotas, carries out what it decides, and names spares.

:func:`demand` is what a platform should provide: how many nodes the jobs ask for, and how many are
missing. It follows from jobs and nodes as they are recorded, so every leader asks for the same
number. Jobs that no number of nodes would help are left out: those above the quota of their tenant,
and those whose tensor-parallel group is larger than any known node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from megascale_driver.core.draft import Draft
from megascale_driver.core.nodes import departures
from megascale_driver.core.queue import quotas
from megascale_driver.core.values import reasons
from megascale_driver.core.values.accounting import failure_rate
from megascale_driver.core.values.attempt import Attempt, LeaveKind, NodeSlot, Placement
from megascale_driver.core.values.cluster import (
    Cluster,
    Disposition,
    Liveness,
    Node,
    candidate,
    promising,
    usable,
)
from megascale_driver.core.values.job import AttemptRecord, Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.placement.gang import Candidate, Part, spares
from megascale_driver.placement.queue import MAX_STARTS, decide
from megascale_driver.placement.queue_values import (
    STARTS,
    Decision,
    Kind,
    Rules,
    RunningJob,
    View,
    WaitingJob,
)
from megascale_job.sizes.failures import wanted_spares
from megascale_job.visible import counted
from megascale_planner.placement_cost import traffic_of

RECHECK_S = 1.0  # interval at which the queue is decided again although nothing has changed
# A decision goes through all nodes. While the nodes of a large fleet link or stop a job one by one,
# the queue is decided once per pause, which is this long per node (1.25 s at 12,500), instead of
# once per node.
PAUSE_PER_NODE_S = 1e-4
LARGE = 256  # nodes


def schedule(draft: Draft, changed: Mapping[str, Node | None] | None = None) -> None:
    """Decide the queue, if something that it depends on has changed; then name the spares.

    ``changed``: the nodes that have changed since the last call, as they were then; None: all that
    the draft has changed.
    """
    if changed is None:
        changed = {name: draft.state.nodes.get(name) for name in draft.nodes.touched}
    if draft.now_s < draft.queue_due_s and not _stirred(draft, changed):
        return
    waiting = [job for job in draft.jobs.values() if job.phase is JobPhase.QUEUED]
    if not waiting and not any(_lacks_spares(draft, job, changed) for job in draft.jobs.values()):
        draft.queue_due_s = float("inf")
        return
    count = len(draft.state.nodes)
    again_s = draft.queue_decided_s + PAUSE_PER_NODE_S * count
    if count > LARGE and draft.queue_decided_s <= draft.now_s < again_s and not _urgent(draft):
        _drop_spares(draft, _stands_by)
        draft.queue_due_s = again_s
        return
    draft.queue_decided_s = draft.now_s
    # Checked only if there is something to place: a whole fleet links to a new leader at once.
    if draft.now_s < draft.grace_until_s and any(
        node.liveness is Liveness.UNKNOWN for node in draft.nodes.values()
    ):
        # The nodes that the previous leader knew are still linking to this one. A job that is
        # placed now would go to worse nodes than in a moment, or its old nodes would look lost.
        _drop_spares(draft, _may_work)
        draft.queue_due_s = draft.now_s
        return
    draft.queue_due_s = draft.now_s + RECHECK_S if waiting else float("inf")
    for job in waiting:
        if draft.now_s < job.not_before_s < draft.queue_due_s:
            draft.queue_due_s = job.not_before_s
    # Pure, from a copy of the facts: nothing that it reads changes while decisions are carried out.
    plan = decide(view_of(draft))
    starts = 0
    for decision in plan.decisions:
        starts += decision.kind in STARTS
        _carry_out(draft, decision)
    # More jobs may be able to start; one decision does not take all of them.
    if starts == MAX_STARTS:
        draft.queue_due_s = draft.now_s
    _name_spares(draft, plan.free)


def _stirred(draft: Draft, changed: Mapping[str, Node | None]) -> bool:
    """True if something has changed that the queue or the spares depend on."""
    for name in draft.jobs.touched:
        old, job = draft.state.jobs.get(name), draft.jobs.get(name)
        if old is None or job is None or _claims(old) != _claims(job):
            return True
    return any(_differs(before, draft.nodes.get(name)) for name, before in changed.items())


def _differs(before: Node | None, node: Node | None) -> bool:
    """True if the change of a node can matter to the queue or the spares."""
    if before is None or node is None:
        return True
    return (usable(before), before.disposition, before.liveness, before.identity) != (
        usable(node),
        node.disposition,
        node.liveness,
        node.identity,
    )


def _urgent(draft: Draft) -> bool:
    """True if a job has come, gone, or changed its course: that is decided without a pause."""
    for name in draft.jobs.touched:
        old, job = draft.state.jobs.get(name), draft.jobs.get(name)
        if old is None or job is None or _course(old) != _course(job):
            return True
    return False


def _course(job: Job) -> tuple[object, ...]:
    return job.phase, job.after_stop, job.slots, job.current.leaving


def _claims(job: Job) -> tuple[object, ...]:
    """The part of a job that the queue depends on, apart from the passing of time."""
    return job.phase, job.after_stop, job.slots, job.spares, job.evicted, job.current.leaving


def _lacks_spares(draft: Draft, job: Job, changed: Iterable[str]) -> bool:
    wanted = spares_wanted(job) if job.active else 0
    if len(job.spares) < wanted:
        return True
    names: Iterable[str] = job.spares
    before = draft.state.jobs.get(job.name)
    if draft.queue_due_s == math.inf and before is not None and before.spares is job.spares:
        # All spares stood by when the queue was last decided, so only those that have changed since
        # can fail to.
        names = [name for name in changed if name in job.spares]
    return any(not _stands_by(draft, name) for name in names)


def _stands_by(draft: Draft, name: str) -> bool:
    node = draft.nodes.get(name)
    return node is not None and usable(node)


def _carry_out(draft: Draft, decision: Decision) -> None:
    job = draft.jobs[decision.job]
    if decision.kind in STARTS:
        _start(draft, job, decision)
    elif decision.kind is Kind.PREEMPT:
        departures.preempt(draft, job, beside=decision.makes_room_for, why=decision.why)
    elif decision.why:
        _wait(draft, job, decision)


def _start(draft: Draft, job: Job, decision: Decision) -> None:
    parts = decision.parts
    before = {slot.node for slot in job.slots} if job.current.leaving is None else set()
    slots = tuple(
        NodeSlot(p.node, p.ranks, p.devices, draft.nodes[p.node].identity.incarnation)
        for p in parts
    )
    # The commit log refuses an attempt that is not newer than all it has seen.
    number = max(job.attempt, job.opened_elsewhere) + 1
    used = {p.node for p in parts}
    placement = Placement(decision.why, decision.order, decision.score)
    draft.put_job(
        replace(
            draft.jobs[job.name],
            phase=JobPhase.PREPARING,
            reason=f"attempt {number}: preparing {counted(len(slots), 'node')}",
            current=Attempt(number, slots, placement=placement, checks=job.current.next_checks),
            waits_as="",
            spares=tuple(name for name in job.spares if name not in used),
            attempts=(*job.attempts, AttemptRecord(number, slots, draft.now_s)),
        )
    )
    newcomers = [p.node for p in parts if before and p.node not in before]
    for name in newcomers:
        if name in job.spares:
            draft.log_job(
                job,
                reasons.SPARE_ASSIGNED,
                f"spare {name} takes over",
                subject=f"nodes/{name}",
                attempt=number,
                policy="placement",
            )
    where = "; ".join(f"{p.node}: ranks {p.ranks[0]}-{p.ranks[-1]}" for p in parts[:16])
    draft.log_job(
        job,
        reasons.PLACED,
        f"placed on {where} ({decision.why})",
        attempt=number,
        policy=decision.kind.lower(),
    )
    draft.log_job(
        job,
        reasons.ATTEMPT_PREPARING,
        f"attempt {number}: its nodes reserve devices and check themselves",
        attempt=number,
    )


def waiting(what: str, stop_reason: str) -> str:
    """The reason of a queued job; ``stop_reason``: why its last attempt ended."""
    after = f" after: {stop_reason}" if stop_reason else ""
    return f"waiting for nodes{f' ({what})' if what else ''}{after}"


def _wait(draft: Draft, job: Job, decision: Decision) -> None:
    """Report why the job waits: in its reason at once, in the log once for each kind of wait.

    A job that starts within a second, as most do after a fault, gets no line about its wait.
    """
    reason = waiting(decision.why, job.stop_reason)
    if reason != job.reason:
        job = draft.put_job(replace(draft.jobs[job.name], reason=reason))
    if decision.kind is Kind.WAIT and job.spares:
        # It holds nothing, so others can have its spares.
        draft.put_job(replace(draft.jobs[job.name], spares=()))
    if job.waits_as != decision.kind and draft.now_s - job.updated_at_s >= RECHECK_S:
        draft.put_job(replace(draft.jobs[job.name], waits_as=decision.kind.value))
        draft.log_job(
            job,
            reasons.JOB_WAITS,
            decision.why,
            policy=decision.kind.lower(),
            outcome=f"held for it: {', '.join(decision.nodes[:16])}" if decision.nodes else "",
        )


def _drop_spares(draft: Draft, serves: Callable[[Draft, str], bool]) -> None:
    """Remove spares that can no longer serve, until spares are named again."""
    for job in draft.jobs.values():
        kept = tuple(name for name in job.spares if serves(draft, name))
        if kept != job.spares:
            draft.put_job(replace(draft.jobs[job.name], spares=kept))


def _may_work(draft: Draft, name: str) -> bool:
    """True if the node is not evicted, cordoned or drained, whether it has linked or not."""
    node = draft.nodes.get(name)
    return node is not None and node.disposition is Disposition.SCHEDULABLE


def _name_spares(draft: Draft, free: Mapping[str, Candidate]) -> None:
    """Replace spares that could not start now, and name missing ones.

    They come from what waiting jobs have left, jobs of higher priority first.
    """
    left = dict(free)
    taken = {slot.node for job in draft.jobs.values() if job.active for slot in job.slots}
    jobs = sorted(
        draft.jobs.values(), key=lambda job: (-job.config.priority, job.created_at_s, job.name)
    )
    for job in jobs:
        kept = tuple(
            name
            for name in job.spares
            if _stands_by(draft, name) and name not in taken and name not in job.evicted
        )
        taken.update(kept)
        missing = spares_wanted(job) - len(kept) if job.active else 0
        if job.active and job.current.leaving is None and missing > 0:
            found = _found(draft, job, missing, left)
            for name in found:
                del left[name]
            kept = (*kept, *found)
        if kept != job.spares:
            draft.put_job(replace(draft.jobs[job.name], spares=kept))
        _log_shortage(draft, draft.jobs[job.name])


def spares_wanted(job: Job) -> int:
    """Number of spares for the newest attempt: fixed, or by the rule from the failure rate."""
    if job.config.recovery.spares != "auto" or not job.slots:
        return job.config.recovery.spare_nodes
    devices = max(len(slot.devices) for slot in job.slots)
    hours = failure_rate(job.config.checkpoint, job.current.failure_count, devices).device_hours
    return wanted_spares(job.config, len(job.slots), devices, hours)


def _log_shortage(draft: Draft, job: Job) -> None:
    """Log that the rule asks for more spares: once in an attempt, and at each worse state.

    Only while the job runs: a spare that takes over is about to be replaced.
    """
    if job.config.recovery.spares != "auto" or job.phase is not JobPhase.RUNNING:
        return
    wanted = spares_wanted(job)
    missing = max(0, wanted - len(job.spares))
    if missing > job.current.spares_short:
        recovery = job.config.recovery
        draft.log_job(
            job,
            reasons.SPARES_SHORT,
            f"{len(job.spares)} of {counted(wanted, 'spare')} stand by: with "
            f"{counted(len(job.slots), 'node')} and "
            f"repairs of {counted(recovery.repair_hours, 'hour')} so many suffice with a "
            "probability of "
            f"{recovery.spare_probability:g}",
            policy="spares",
            outcome="training continues; the next lost node may leave the job waiting",
        )
    if missing != job.current.spares_short:
        draft.put_attempt(job.name, replace(draft.jobs[job.name].current, spares_short=missing))


def _found(draft: Draft, job: Job, missing: int, left: Mapping[str, Candidate]) -> tuple[str, ...]:
    parts = parts_of(job)
    mine = [candidate(draft.nodes[p.node]) for p in parts if p.node in draft.nodes]
    kinds = {c.kind for c in mine}
    fitting = [c for name, c in left.items() if c.kind in kinds and name not in job.evicted]
    return spares(missing, parts, fitting, {c.switch for c in mine})


def view_of(draft: Draft) -> View:
    """Everything that the queue decides from."""
    waiting, running = [], []
    for job in draft.jobs.values():
        if job.phase is JobPhase.QUEUED:
            waiting.append(_waiting(job))
        elif job.active:
            running.append(_running(draft, job))
    held = {name for job in running for name in job.nodes}
    # Nodes whose workers did not end when they were ordered to: not counted on before they do.
    stuck = {name for job in draft.jobs.values() if not job.terminal for name in job.evicted}
    idle, known = {}, {}
    for name, node in draft.nodes.items():
        free = name not in held and usable(node)
        if free or (promising(node) and (name in held or name not in stuck)):
            known[name] = candidate(node)
        if free:
            idle[name] = known[name]
    policy = draft.policy
    return View(
        now_s=draft.now_s,
        waiting=tuple(waiting),
        running=tuple(running),
        idle=idle,
        known=known,
        quotas=quotas.in_force(draft.tenants, policy),
        rules=Rules(
            preempt=policy.preempt, backfill_s=policy.backfill_s, survivors_s=policy.survivors_s
        ),
    )


def parts_of(job: Job) -> tuple[Part, ...]:
    """The placement of the job's newest attempt."""
    return tuple(Part(slot.node, slot.ranks, slot.devices) for slot in job.slots)


def cannot_leave(job: Job, now_s: float) -> str:
    """Why an active job cannot save and then leave its nodes; "" if it can."""
    if not job.config.checkpoint.uri:
        return "it has no checkpoints"
    if job.phase is not JobPhase.RUNNING:
        return f"it is {job.phase.lower()}"
    if now_s < job.current.stays_until_s:
        return "it could not save when it was last asked to"
    return ""


def _waiting(job: Job) -> WaitingJob:
    layout = job.config.layout
    return WaitingJob(
        name=job.name,
        world_size=layout.world_size,
        node_group=job.config.parallelism.node_group,
        priority=job.config.priority,
        tenant=job.config.tenant,
        created_s=job.created_at_s,
        waiting_since_s=job.updated_at_s,
        # A job that left its nodes by order does not keep any of them.
        last=parts_of(job) if job.current.leaving is None else (),
        spares=job.spares,
        evicted=frozenset(job.evicted),
        not_before_s=job.not_before_s,
        traffic=traffic_of(job.config),
    )


def _running(draft: Draft, job: Job) -> RunningJob:
    cannot = cannot_leave(job, draft.now_s)
    ends = job.phase is JobPhase.STOPPING and job.after_stop is not JobPhase.QUEUED
    return RunningJob(
        name=job.name,
        world_size=job.config.layout.world_size,
        nodes=tuple(slot.node for slot in job.slots),
        priority=job.config.priority,
        tenant=job.config.tenant,
        started_s=job.attempts[-1].opened_at_s if job.attempts else job.created_at_s,
        ends_s=_ends_s(draft, job),
        spares=job.spares,
        preemptible=not cannot,
        cannot=cannot,
        leaving=ends or job.current.leaving is not None,
    )


def _ends_s(draft: Draft, job: Job) -> float | None:
    """When the job will have done its steps at its current pace; None if not known."""
    current = job.current
    if job.phase is not JobPhase.RUNNING or not current.step_interval_s:
        return None
    left = job.config.training.steps - current.step
    return max(draft.now_s, current.last_step_at_s + left * current.step_interval_s)


@dataclass(frozen=True, slots=True)
class Demand:
    """Nodes wanted, including those that are kept from work, and how many of them are missing."""

    wanted: int
    missing: int
    why: str = ""  # who needs the missing nodes


def demand(state: Cluster, policy: Policy) -> Demand:
    """The current demand of all jobs; evicted nodes count on neither side."""
    there = [node for node in state.nodes.values() if _there(node)]
    kept_out = sum(node.disposition is not Disposition.SCHEDULABLE for node in there)
    left = {name for job in state.jobs.values() if not job.terminal for name in job.evicted}
    left_by_jobs = sum(n.name in left and n.disposition is Disposition.SCHEDULABLE for n in there)
    devices = max((len(node.identity.devices) for node in state.nodes.values()), default=0)
    asked = sum(_nodes_of(job, devices) for job in _counted(state, policy))
    wanted = asked + kept_out + left_by_jobs if asked else 0
    missing = max(0, wanted - len(there))
    if not missing:
        return Demand(wanted, 0)
    why = f"jobs and their spares ask for {asked}"
    if kept_out + left_by_jobs:
        unused = kept_out + left_by_jobs
        why += f", and {unused} of those alive serve none, kept from work or left by a job"
    return Demand(wanted, missing, why)


def _there(node: Node) -> bool:
    return node.liveness is Liveness.ALIVE and node.disposition is not Disposition.QUARANTINED


def _counted(state: Cluster, policy: Policy) -> Iterator[Job]:
    """The jobs that have nodes and keep them, and those waiting jobs that may start."""
    limits, held = quotas.in_force(state.tenants, policy), quotas.devices_held(state.jobs.values())
    waiting = [job for job in state.jobs.values() if job.phase is JobPhase.QUEUED]
    for job in sorted(waiting, key=lambda job: (-job.config.priority, job.created_at_s)):
        tenant, size = job.config.tenant, job.config.layout.world_size
        devices = held.get(tenant, 0) + size
        if tenant not in limits or devices <= limits[tenant]:
            held[tenant] = devices
            yield job
    yield from (job for job in state.jobs.values() if job.active and not _frees_its_nodes(job))


def _frees_its_nodes(job: Job) -> bool:
    order = job.current.leaving
    if order is not None and order.kind is LeaveKind.SUSPEND:
        return True
    return job.phase is JobPhase.STOPPING and job.after_stop is not JobPhase.QUEUED


def _nodes_of(job: Job, devices: int) -> int:
    """Number of nodes and spares of a job, if the largest known node has ``devices`` devices.

    Before any node is known, a first one is requested: it shows how many devices nodes have.
    """
    if job.active:
        return len(job.slots) + spares_wanted(job)
    if not devices:
        return 1
    group = job.config.parallelism.node_group
    usable = devices // group * group
    if not usable:
        return 0
    nodes = -(-job.config.layout.world_size // usable)
    return nodes + wanted_spares(job.config, nodes, devices)

"""Operator requests that move running work, and those about rules and the breaker.

Restart, update, suspend and resume are about a job, drain and evict about a node. A job that can
still train saves first: its workers take a snapshot after the same step, and leave when it is
committed (:mod:`megascale_driver.core.nodes.departures`). If it cannot save in time, a restart, an
update, a drain or an eviction is carried out all the same.
"""

from __future__ import annotations

from dataclasses import replace

from megascale_driver.core.checkpoints import roll_back
from megascale_driver.core.draft import Draft
from megascale_driver.core.faults import breaker
from megascale_driver.core.jobs import jobs
from megascale_driver.core.nodes import departures, nodes
from megascale_driver.core.values import reasons
from megascale_driver.core.values.attempt import LeaveKind
from megascale_driver.core.values.cluster import Cluster, Disposition
from megascale_driver.core.values.events import (
    BreakerResetRequested,
    DrainRequested,
    EvictRequested,
    PolicyRequested,
    RestartRequested,
    ResumeRequested,
    SuspendRequested,
    UncordonRequested,
    UpdateRequested,
)
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.rules import RULES, mode_of
from megascale_job import loading
from megascale_job.visible import counted

_RESTARTS = frozenset({JobPhase.FAILED, JobPhase.CANCELLED})


def restart(draft: Draft, event: RestartRequested) -> None:
    """Begin a new attempt, also of a job that has failed; its budgets start anew."""
    job = draft.known_job(event.job)
    if job is None:
        return
    back = event.from_step is not None
    if job.terminal and job.phase not in _RESTARTS and not back:
        draft.refuse(
            "JOB_ENDED", f"job {job.name} has succeeded; give --from-step to repeat steps of it"
        )
        return
    draft.log_job(
        job,
        reasons.RESTART_REQUESTED,
        f"{event.actor} asked to restart the job"
        + (f" from step {event.from_step}" if back else "")
        + f": {event.reason}",
        actor=event.actor,
        outcome=restart_consequence(job, event.from_step, now=event.now),
    )
    job = _budgets_anew(draft, draft.jobs[job.name])
    if event.from_step is not None:
        job = roll_back.roll_back(
            draft, job, event.from_step, written_by=event.from_attempt, later=event.later_steps
        )
    why = f"restarted by {event.actor}: {event.reason}"
    if job.active:
        _stop(draft, job, LeaveKind.RESTART, event.actor, why, now=event.now or back)
    elif job.phase is not JobPhase.SUSPENDED:
        _queue(draft, jobs.apply_update(draft, job), why)


def restart_consequence(job: Job, from_step: int | None, *, now: bool) -> str:
    """What RestartJob does to the job, in one sentence."""
    begins = f"begins from step {from_step}" if from_step is not None else origin(job)
    if not job.active:
        return f"as soon as there are nodes for it, a new attempt {begins}"
    if now or from_step is not None or not can_save(job):
        return f"attempt {job.attempt} stops at once, and the next one {begins}"
    return f"attempt {job.attempt} saves its state and stops, and the next one begins from there"


def origin(job: Job, replicated_step: int = 0) -> str:
    """The state that an attempt without a preceding save begins from, as a clause.

    ``replicated_step``: the newest step of which every rank has a copy in another node's memory.
    """
    if not job.config.checkpoint.uri:
        return "begins at step 0, because the job writes no checkpoints"
    if step := max(job.committed_step, replicated_step):
        return f"continues from step {step}, or from a newer one that every rank has in memory"
    if job.config.checkpoint.load_uri:
        return f"begins from {job.config.checkpoint.load_uri}: nothing of its own is saved yet"
    return "begins at step 0: nothing is saved yet"


def can_save(job: Job) -> bool:
    """True if the job can save before it leaves."""
    return job.phase is JobPhase.RUNNING and bool(job.config.checkpoint.uri)


def leaves_after_save(state: Cluster, node: str) -> bool:
    """True if a job runs on the node that saves before it leaves."""
    job = state.holder_of(node)
    return job is not None and can_save(job)


def update(draft: Draft, event: UpdateRequested) -> None:
    """Give the job a new configuration for its next attempt; ``restart``: begin that one soon."""
    job = draft.known_job(event.config.name)
    if job is None:
        return
    if job.phase is JobPhase.SUCCEEDED:
        draft.refuse("JOB_ENDED")
        return
    draft.log_job(
        job,
        reasons.UPDATE_REQUESTED,
        f"{event.actor} gave the job a new configuration: {event.reason}",
        actor=event.actor,
        outcome=update_consequence(job, now=event.restart),
    )
    job = draft.put_job(replace(draft.jobs[job.name], pending_spec=loading.to_json(event.config)))
    if not job.active:
        jobs.apply_update(draft, job)
    elif event.restart:
        why = f"updated by {event.actor}: {event.reason}"
        _stop(draft, job, LeaveKind.RESTART, event.actor, why, now=False)


def update_consequence(job: Job, *, now: bool) -> str:
    """What UpdateJob does to the job, in one sentence."""
    if not job.active:
        return "its next attempt uses it"
    if now:
        return f"attempt {job.attempt} saves its state and stops, and the next one uses it"
    return f"attempt {job.attempt} continues as it is; the next one uses it"


def drain(draft: Draft, event: DrainRequested | EvictRequested) -> None:
    """Empty a node for good or for maintenance; its job saves first if it can."""
    node = draft.nodes.get(event.node)
    if node is None:
        draft.refuse("NODE_NOT_FOUND")
        return
    job = draft.holder_of(node.name)
    if node.disposition is Disposition.QUARANTINED:
        return
    now = isinstance(event, EvictRequested) and event.now
    if now or job is None or not can_save(job):
        nodes.quarantine(draft, node.name, event.reason, actor=event.actor, policy="manual")
        return
    if node.disposition is Disposition.DRAINING:
        return
    nodes.dispose(draft, node.name, Disposition.DRAINING, event.reason, "manual")
    draft.log_node(
        node.name,
        job,
        reasons.NODE_DRAINING,
        f"node {node.name} is emptied: {event.reason}",
        actor=event.actor,
        policy="manual",
        outcome=drain_consequence(job),
    )
    job = draft.jobs[job.name]
    order = job.current.leaving
    if order is None:
        job = departures.order(draft, job, LeaveKind.DRAIN, reason=event.reason, actor=event.actor)
        order = job.current.leaving
        assert order is not None
    departures.put_order(draft, job, replace(order, nodes=(*order.nodes, node.name)))


def uncordon(draft: Draft, event: UncordonRequested) -> None:
    """Let the node have work again; a job that was to save and leave it stays."""
    nodes.set_disposition(draft, event)
    if not draft.refusal:
        departures.stay(draft, event.node, event.reason)


def drain_consequence(job: Job) -> str:
    """What DrainNode does to the job that runs there, in one sentence."""
    spare = f"spare {job.spares[0]} takes its place" if job.spares else "it waits for a node"
    return f"job {job.name} saves its state, leaves the node, and continues from there; {spare}"


def set_policy(draft: Draft, event: PolicyRequested) -> None:
    """Have a rule observed or enforced from now on."""
    modes = draft.breaker.modes
    if mode_of(modes, event.rule) == event.mode:
        return
    draft.breaker = replace(draft.breaker, modes={**modes, event.rule: event.mode})
    draft.log(
        reasons.POLICY_SET,
        f"rule {event.rule} is in {event.mode}: {event.reason}",
        subject="cluster",
        actor=event.actor,
        policy=event.rule,
        mode=event.mode,
        outcome=RULES[event.rule].effect
        if event.mode == "ENFORCE"
        else "its verdicts are only logged",
    )


def reset_breaker(draft: Draft, event: BreakerResetRequested) -> None:
    """Enforce inferred verdicts again before the breaker's window has passed."""
    held = draft.breaker
    if held.tripped_at_s or held.switches or held.evictions:
        breaker.reset(draft, event.reason, actor=event.actor)


def _stop(draft: Draft, job: Job, kind: LeaveKind, actor: str, why: str, *, now: bool) -> None:
    """Stop the attempt, after it has saved unless ``now``; the next one follows."""
    if job.phase is JobPhase.STOPPING:
        if job.after_stop in _RESTARTS:
            draft.put_job(
                replace(draft.jobs[job.name], after_stop=JobPhase.QUEUED, stop_reason=why)
            )
        return
    if not now and can_save(job):
        order = job.current.leaving
        if order is None or order.kind is LeaveKind.DRAIN:  # an uncordon could withdraw a DRAIN
            departures.order(draft, job, kind, reason=why, actor=actor)
        return
    jobs.stop(draft, job, JobPhase.QUEUED, why)


def _budgets_anew(draft: Draft, job: Job) -> Job:
    return draft.put_job(
        replace(
            draft.jobs[job.name],
            restarts_without_progress=0,
            restart_times={},
            node_failures={},
            roots={},
            repeats={},
            out_of_memory=0,
            not_before_s=0.0,
        )
    )


def _queue(draft: Draft, job: Job, why: str) -> None:
    draft.put_job(
        replace(
            draft.jobs[job.name],
            phase=JobPhase.QUEUED,
            after_stop=JobPhase.QUEUED,
            waits_as="",
            reason="waiting for nodes",
            stop_reason=why,
            current=replace(job.current, faults=()),
        )
    )


def suspend_refusal(job: Job) -> tuple[str, str]:
    """Reason why the job cannot be suspended, and a sentence about it; ("", "") if it can."""
    if job.terminal or (job.phase is JobPhase.STOPPING and job.after_stop_ends):
        return "JOB_ENDED", ""
    if job.phase is JobPhase.RUNNING and not job.config.checkpoint.uri:
        return (
            "JOB_CANNOT_SAVE",
            f"job {job.name} runs without checkpoints (checkpoint.uri), so its "
            f"{counted(job.current.step, 'step')} would be lost; let it end, or cancel it",
        )
    return "", ""


def suspend_consequence(job: Job) -> str:
    """What SuspendJob does to the job, in one sentence."""
    if job.phase is JobPhase.SUSPENDED:
        return f"job {job.name} is suspended already"
    if job.phase is JobPhase.RUNNING:
        return (
            f"job {job.name} saves its state after its next steps, then stops and frees its nodes"
        )
    if job.active:
        return f"attempt {job.attempt} of job {job.name} has not started to train: it stops at once"
    return f"job {job.name} is not placed before it is resumed"


def suspend(draft: Draft, event: SuspendRequested) -> None:
    """Save, stop and free the nodes; nothing happens if the job is suspended already."""
    job = draft.known_job(event.job)
    if job is None:
        return
    reason, detail = suspend_refusal(job)
    if reason:
        draft.refuse(reason, detail)
        return
    order = job.current.leaving
    wanted = order is not None and order.kind is LeaveKind.SUSPEND
    if job.phase is JobPhase.SUSPENDED or (job.active and wanted):
        return
    draft.log_job(
        job,
        reasons.SUSPEND_REQUESTED,
        f"{event.actor} asked to suspend the job: {event.reason}",
        actor=event.actor,
        outcome=suspend_consequence(job),
    )
    job = draft.jobs[job.name]
    if job.phase is JobPhase.QUEUED:
        departures.suspended(draft, job, event.actor, event.reason)
        return
    job = departures.order(draft, job, LeaveKind.SUSPEND, reason=event.reason, actor=event.actor)
    if job.phase is not JobPhase.RUNNING:
        why = f"suspended by {event.actor}: {event.reason}"
        jobs.stop(draft, job, JobPhase.SUSPENDED, why)


def _resume_consequence(job: Job) -> str:
    if job.phase is JobPhase.RUNNING:
        return f"job {job.name} stays on its nodes, unless its workers have saved and ended already"
    step = f"restores step {job.committed_step}" if job.committed_step else "starts from step 0"
    return f"job {job.name} waits for nodes, and {step}"


def resume(draft: Draft, event: ResumeRequested) -> None:
    """Let the job have nodes again; nothing happens if it is not suspended."""
    job = draft.known_job(event.job)
    if job is None:
        return
    if job.terminal:
        draft.refuse("JOB_ENDED")
        return
    order = job.current.leaving
    wanted = order is not None and order.kind is LeaveKind.SUSPEND
    if job.phase is not JobPhase.SUSPENDED and not (job.active and wanted):
        return
    draft.log_job(
        job,
        reasons.JOB_RESUMED,
        f"{event.actor} asked to resume the job: {event.reason}",
        actor=event.actor,
        outcome=_resume_consequence(job),
    )
    job = draft.jobs[job.name]
    if job.phase is JobPhase.SUSPENDED:
        draft.put_job(
            replace(
                draft.jobs[job.name],
                phase=JobPhase.QUEUED,
                reason="waiting for nodes",
                stop_reason="",
                waits_as="",
            )
        )
    elif job.phase is JobPhase.RUNNING:
        departures.withdraw(draft, job, f"{event.actor} resumed it before it had stopped")
    else:  # it is stopping, and starts again after that
        draft.put_job(replace(draft.jobs[job.name], after_stop=JobPhase.QUEUED))
        departures.put_order(draft, job, None)

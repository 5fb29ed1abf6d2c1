"""The state as the queue takes it: jobs that wait, jobs that hold nodes, nodes, quotas."""

from __future__ import annotations

from megascale_driver.core.draft import Draft
from megascale_driver.core.queue import quotas
from megascale_driver.core.values.candidates import candidate, promising, usable
from megascale_driver.core.values.state import Job, JobPhase
from megascale_driver.placement.gang import Part
from megascale_driver.placement.queue_values import Rules, RunningJob, View, WaitingJob
from megascale_planner.placement_cost import traffic_of


def view_of(draft: Draft) -> View:
    """Everything that the queue decides from."""
    waiting, running = [], []
    for job in draft.jobs.values():
        if job.phase is JobPhase.QUEUED:
            waiting.append(_waiting(job))
        elif job.active:
            running.append(_running(draft, job))
    held = {name for job in running for name in job.nodes}
    # Their workers did not end when they were ordered to: nobody counts on them before they do.
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
            preempt=policy.preempt,
            backfill_s=policy.backfill_s,
            survivors_s=policy.survivors_s,
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
        tp=layout.tp,
        priority=job.config.priority,
        tenant=job.config.tenant,
        created_s=job.created_at_s,
        waiting_since_s=job.updated_at_s,
        # A job that left its nodes by order keeps none of them.
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
    """When the job has done its steps at its present pace; None if that is not known."""
    current = job.current
    if job.phase is not JobPhase.RUNNING or not current.step_interval_s:
        return None
    left = job.config.training.steps - current.step
    return max(draft.now_s, current.last_step_at_s + left * current.step_interval_s)

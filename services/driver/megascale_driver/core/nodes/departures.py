"""Jobs that leave their nodes by order: to be suspended, restarted or moved, or displaced.

A running job saves first: its workers take a snapshot after the same step, wait until it is
committed, and end (Report.finished_step). Then the attempt stops, and the job is SUSPENDED or
QUEUED without its nodes. If it cannot save, its workers train on and report that at once
(Report.leave_failed), or nothing is heard in time. Then the order is withdrawn, with the cause;
only a restart or the emptying of a node is carried out without a save.
"""

from __future__ import annotations

from dataclasses import replace

from megascale_driver.core.checkpoints.save import MAX_CAUSE, awaits_commit, take_as_committed
from megascale_driver.core.draft import DRIVER, Draft
from megascale_driver.core.nodes import nodes, profiles
from megascale_driver.core.values import reasons
from megascale_driver.core.values.attempt import LeaveKind, Leaving
from megascale_driver.core.values.cluster import Disposition, leave_id
from megascale_driver.core.values.job import Job, JobPhase
from megascale_job.visible import counted

# Added to checkpoint.final_timeout_s, which a save can take: time for the order to reach the
# workers, and for their last step.
ORDER_S = 120.0
# Kinds after which the next attempt follows at once, on the nodes that it can still use.
STAYS = frozenset({LeaveKind.RESTART, LeaveKind.DRAIN})


def order(
    draft: Draft, job: Job, kind: LeaveKind, *, reason: str, actor: str = DRIVER, beside: str = ""
) -> Job:
    """Order the workers of a running job to save and end."""
    before = job.current.leaving
    emptied = before.nodes if before is not None else ()
    leaving = Leaving(kind, reason, actor, draft.now_s, beside, emptied)
    job = put_order(draft, job, leaving)
    what = {
        LeaveKind.SUSPEND: "suspended",
        LeaveKind.RESTART: "restarted",
        LeaveKind.DRAIN: "moved to other nodes",
    }.get(kind, f"displaced by job {beside}")
    return draft.put_job(
        replace(
            draft.jobs[job.name],
            reason=f"attempt {job.attempt} saves its state, then stops: it is {what} ({reason})",
            spares=job.spares if kind in STAYS else (),
        )
    )


def put_order(draft: Draft, job: Job, leaving: Leaving | None) -> Job:
    """Replace the order to leave; None: there is no order any more."""
    return draft.put_attempt(job.name, replace(draft.jobs[job.name].current, leaving=leaving))


def preempt(draft: Draft, job: Job, *, beside: str, why: str) -> None:
    """Displace a running job for job ``beside``, which has a higher priority."""
    order(draft, job, LeaveKind.PREEMPT, reason=why, beside=beside)
    draft.log_job(
        job,
        reasons.PREEMPTION_ORDERED,
        f"it must leave its nodes: {why}",
        policy="priority",
        outcome="it saves its state first; then it waits for nodes again",
    )


def ended_early(draft: Draft, job: Job) -> str | None:
    """Why an attempt stops whose workers have all ended before the last step.

    None if they have done all steps; "" while the commit of their last step is not known.
    """
    reports = [draft.nodes[slot.node].report for slot in job.slots if slot.node in draft.nodes]
    step = max((report.finished_step for report in reports if report is not None), default=0)
    if not step or step >= job.config.training.steps:
        return None
    if job.committed_step < step:
        if awaits_commit(draft, job):
            return ""
        take_as_committed(draft, job, step)
    if job.current.leaving is None:  # withdrawn, but the workers had already stopped
        why = "the order to leave was withdrawn after its workers had ended"
        put_order(draft, job, Leaving(LeaveKind.RESTART, why, DRIVER, draft.now_s))
    return f"its state after step {step} is saved"


def expire(draft: Draft, job: Job) -> None:
    """Withdraw an order that is obsolete, or that was not carried out in time."""
    leaving = job.current.leaving
    if leaving is None:
        return
    # Room is made for one job only: if that one no longer waits, nothing has to leave.
    winner = draft.jobs.get(leaving.beside)
    if leaving.beside and (winner is None or winner.phase is not JobPhase.QUEUED):
        withdraw(draft, job, f"job {leaving.beside} no longer waits for its nodes")
        return
    limit_s = job.config.checkpoint.final_timeout_s + ORDER_S
    why = _not_saved(draft, job)
    if not why and draft.now_s - leaving.since_s >= limit_s:
        why = f" within {limit_s:g} s"
    elif not why:
        return
    if leaving.kind in STAYS or leaving.nodes:
        _stop_unsaved(draft, job, leaving, why)
        return
    withdraw(draft, job, f"it could not save{why}")
    draft.put_attempt(
        job.name,
        replace(
            draft.jobs[job.name].current, stays_until_s=draft.now_s + draft.policy.save_again_s
        ),
    )


def _not_saved(draft: Draft, job: Job) -> str:
    """Why the order failed, if workers report so; a daemon's error has more detail."""
    order = leave_id(job)
    reports = [node.report for s in job.slots if (node := draft.nodes.get(s.node)) is not None]
    found = [report for report in reports if report is not None]
    problems = [r.leave_failed[1] for r in found if r.leave_failed[0] == order]
    if not problems:
        return ""
    failures = (item.failure for r in found for item in r.progress if item.job == job.name)
    errors = [f.error for f in failures if f is not None and f.attempt == job.attempt]
    return f": {[*errors, *problems][0][:MAX_CAUSE]}"


def withdraw(draft: Draft, job: Job, why: str) -> None:
    """Take back the order to leave: the job keeps its nodes.

    If nodes of it are to be emptied, it still leaves: they wait for that.
    """
    leaving = job.current.leaving
    assert leaving is not None
    if leaving.nodes:
        reason = f"{', '.join(leaving.nodes)} must be emptied"
        put_order(draft, job, replace(leaving, kind=LeaveKind.DRAIN, beside=""))
        draft.put_job(
            replace(
                draft.jobs[job.name],
                reason=f"attempt {job.attempt} saves its state, then stops: {reason}",
            )
        )
        return
    put_order(draft, job, None)
    draft.put_job(
        replace(
            draft.jobs[job.name],
            reason=f"attempt {job.attempt} runs on {counted(len(job.slots), 'node')}",
        )
    )
    draft.log_job(
        job,
        reasons.LEAVE_WITHDRAWN,
        f"it stays on its nodes: {why}",
        policy=leaving.kind.lower(),
        outcome="training continues",
    )


def stay(draft: Draft, name: str, why: str) -> None:
    """A node no longer has to be emptied: its job stays, unless it leaves for another reason."""
    job = draft.holder_of(name)
    order = job.current.leaving if job is not None else None
    if job is None or order is None or name not in order.nodes:
        return
    order = replace(order, nodes=tuple(other for other in order.nodes if other != name))
    job = put_order(draft, job, order)
    if order.kind is LeaveKind.DRAIN and not order.nodes and job.phase is JobPhase.RUNNING:
        withdraw(draft, job, f"node {name} need not be emptied: {why}")


def left(draft: Draft, job: Job) -> None:
    """Free the nodes of a job that was ordered to leave; its attempt has stopped."""
    leaving = job.current.leaving
    assert leaving is not None
    saved = _saved(job)
    empty(draft, job)
    job = draft.jobs[job.name]
    if leaving.kind is LeaveKind.SUSPEND:
        suspended(draft, job, leaving.actor, leaving.reason)
        return
    if leaving.kind in STAYS:
        put_order(draft, job, None)
        draft.put_job(
            replace(
                draft.jobs[job.name],
                phase=JobPhase.QUEUED,
                stop_reason=f"{leaving.reason}; {saved}",
                reason=f"waiting for nodes after: {leaving.reason}; {saved}",
            )
        )
        return
    beside = f" by job {leaving.beside}" if leaving.beside else ""
    draft.put_job(
        replace(
            draft.jobs[job.name],
            phase=JobPhase.QUEUED,
            spares=(),
            stop_reason=f"displaced{beside}; {saved}",
            reason=f"waiting for nodes after: displaced{beside}; {saved}",
        )
    )
    draft.log_job(
        job,
        reasons.JOB_PREEMPTED,
        f"displaced{beside}; {saved}",
        policy="priority",
        outcome="it starts again from there when there are nodes for it",
    )


def _saved(job: Job) -> str:
    return f"step {job.committed_step} is saved" if job.committed_step else "no step is saved"


def empty(draft: Draft, job: Job) -> None:
    """Quarantine the nodes that were to be emptied; the attempt has stopped."""
    order = job.current.leaving
    for name in order.nodes if order is not None else ():
        node = draft.nodes.get(name)
        if order is not None and node is not None and node.disposition is Disposition.DRAINING:
            why = node.disposition_reason
            nodes.quarantine(draft, name, why, actor=order.actor, policy="manual")


def _stop_unsaved(draft: Draft, job: Job, order: Leaving, how: str) -> None:
    """Carry out the order although the job could not save: a node must be emptied."""
    profiles.attempt_ends(draft, job)
    why = f"{order.reason}; it could not save{how}"
    draft.put_job(
        replace(
            draft.jobs[job.name],
            phase=JobPhase.STOPPING,
            after_stop=JobPhase.QUEUED,
            stop_reason=why,
            reason=f"attempt {job.attempt} is being stopped: {why}",
        )
    )


def suspended(draft: Draft, job: Job, actor: str, reason: str) -> None:
    """Suspend the job: it runs nothing, and gets no nodes before it is resumed."""
    saved = _saved(job)
    # The nodes that it left must not be kept for it. The order stays without an attempt as the sign
    # of that.
    leaving = job.current.leaving or Leaving(LeaveKind.SUSPEND, reason, actor, draft.now_s)
    draft.put_job(
        replace(
            draft.jobs[job.name],
            phase=JobPhase.SUSPENDED,
            spares=(),
            waits_as="",
            current=replace(job.current, leaving=leaving),
            reason=f"suspended by {actor}: {reason}; {saved}",
        )
    )
    draft.log_job(
        job,
        reasons.JOB_SUSPENDED,
        f"suspended: {saved}",
        actor=actor,
        outcome=f"its nodes are free; `megascale resume {job.name} --reason REASON` starts it",
    )

"""What follows from faults that the job itself causes: it cannot run, or needs too much memory.

A job that has completed no step yet would fail the same way again: it ends, and no restart is
counted. One that has run before ran with this very specification, so something around it has
changed (a mount that is gone for a moment, a node that something else fills): it is retried within
its restart budgets.
"""

from __future__ import annotations

from megascale_driver.core.draft import Draft
from megascale_driver.core.values.attempt import Fault, FaultKind
from megascale_driver.core.values.rules import Mode
from megascale_driver.core.values.state import Job, JobPhase
from megascale_job.visible import counted

OUT_OF_MEMORY_PATIENCE = 2  # attempts in a row that run out of memory, without a new step


def has_run(job: Job) -> bool:
    """Whether the job has completed a step in any attempt."""
    return max(job.best_step, job.committed_step, job.progress_mark) > 0


def never_runs(job: Job, faults: tuple[Fault, ...]) -> Fault | None:
    """The fault for which no further attempt can run; None if another attempt may."""
    if has_run(job):
        return None
    return next((f for f in faults if f.kind is FaultKind.BAD_JOB), None)


def end(draft: Draft, job: Job, why: str) -> Job:
    """End the job as FAILED when its attempt has stopped; its restart budgets stay as they are."""
    return draft.job(job.name, after_stop=JobPhase.FAILED, stop_reason=why)


def decide_on_size(draft: Draft, job: Job) -> None:
    """End a job that does not fit; if it ran before, it leaves the node instead.

    If it did fit before, something else has taken the node's memory since.
    """
    too_big = [f for f in job.current.faults if f.kind is FaultKind.JOB_TOO_BIG]
    if not has_run(job):
        end(draft, job, too_big[0].message)
        return
    for fault in too_big:
        leave(draft, draft.jobs[job.name], fault, "memory-room", left_by(job))


def decide_on_memory(draft: Draft, job: Job) -> None:
    """Evaluate attempts that ran out of memory; the first may be due to a moment's neighbour.

    Repeated without a new step, it is the job's size: the job ends, or, if it ran before, leaves
    the nodes where it happened.
    """
    exhausted = [f for f in job.current.faults if f.kind is FaultKind.OUT_OF_MEMORY]
    if not exhausted:
        draft.job(job.name, out_of_memory=0)
        return
    # ``restarts_without_progress`` has counted this attempt; 0: it brought the job further.
    count = job.out_of_memory + 1 if job.restarts_without_progress else 1
    job = draft.job(job.name, out_of_memory=count)
    if count < OUT_OF_MEMORY_PATIENCE:
        return
    if not has_run(job):
        why = f"{counted(count, 'attempt')} in a row ran out of memory: {exhausted[0].message}"
        end(draft, job, why)
        return
    for fault in exhausted:
        leave(draft, draft.jobs[job.name], fault, "out-of-memory", left_by(job))


def leave(
    draft: Draft, job: Job, fault: Fault, policy: str, outcome: str, mode: Mode = "ENFORCE"
) -> None:
    """Take the job off a node that stays in service; ``mode`` is that of ``policy``."""
    if fault.node not in job.evicted:
        draft.job(job.name, evicted=(*job.evicted, fault.node))
        draft.log(
            "NODE_EVICTED", fault.message, subject=f"nodes/{fault.node}", job=job.name,
            attempt=job.attempt, policy=policy, mode=mode, outcome=outcome,
        )  # fmt: skip


def left_by(job: Job) -> str:
    """What it means for others that the job leaves a node."""
    return f"job {job.name} takes another node if there is one; other jobs may still use this node"

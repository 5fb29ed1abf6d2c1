"""Orders of people about where a job stands: suspend it, resume it."""

from __future__ import annotations

from megascale_driver.core.draft import Draft
from megascale_driver.core.jobs import jobs
from megascale_driver.core.nodes import leaving
from megascale_driver.core.values.attempt import LeaveKind
from megascale_driver.core.values.events import ResumeRequested, SuspendRequested
from megascale_driver.core.values.state import Job, JobPhase
from megascale_job.visible import counted


def refusal(job: Job) -> tuple[str, str]:
    """Why the job cannot be suspended, and in a sentence; ("", "") if it can."""
    if job.terminal or (job.phase is JobPhase.STOPPING and job.after_stop_ends):
        return "JOB_ENDED", ""
    if job.phase is JobPhase.RUNNING and not job.config.checkpoint.uri:
        return (
            "JOB_CANNOT_SAVE",
            f"job {job.name} runs without checkpoints (checkpoint.uri), so its "
            f"{counted(job.current.step, 'step')} would be lost; let it end, or cancel it",
        )
    return "", ""


def consequence(job: Job) -> str:
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
    """Save, stop and free the nodes; nothing happens to a job that is suspended already."""
    job = draft.jobs.get(event.job)
    if job is None:
        draft.refuse_unknown_job(event.job)
        return
    reason, detail = refusal(job)
    if reason:
        draft.refuse(reason, detail)
        return
    order = job.current.leaving
    wanted = order is not None and order.kind is LeaveKind.SUSPEND
    if job.phase is JobPhase.SUSPENDED or (job.active and wanted):
        return
    draft.log(
        "SUSPEND_REQUESTED", f"{event.actor} asked to suspend the job: {event.reason}",
        subject=f"jobs/{job.name}", job=job.name, actor=event.actor, attempt=job.attempt,
        outcome=consequence(job),
    )  # fmt: skip
    job = draft.jobs[job.name]
    if job.phase is JobPhase.QUEUED:
        leaving.suspended(draft, job, event.actor, event.reason)
        return
    job = leaving.order(draft, job, LeaveKind.SUSPEND, reason=event.reason, actor=event.actor)
    if job.phase is not JobPhase.RUNNING:
        why = f"suspended by {event.actor}: {event.reason}"
        jobs.stop(draft, job, JobPhase.SUSPENDED, why)


def _of_resume(job: Job) -> str:
    if job.phase is JobPhase.RUNNING:
        return f"job {job.name} stays on its nodes, unless its workers have saved and ended already"
    step = f"restores step {job.committed_step}" if job.committed_step else "starts from step 0"
    return f"job {job.name} waits for nodes, and {step}"


def resume(draft: Draft, event: ResumeRequested) -> None:
    """Let the job have nodes again; nothing happens to one that is not suspended."""
    job = draft.jobs.get(event.job)
    if job is None:
        draft.refuse_unknown_job(event.job)
        return
    if job.terminal:
        draft.refuse("JOB_ENDED")
        return
    order = job.current.leaving
    wanted = order is not None and order.kind is LeaveKind.SUSPEND
    if job.phase is not JobPhase.SUSPENDED and not (job.active and wanted):
        return
    draft.log(
        "JOB_RESUMED", f"{event.actor} asked to resume the job: {event.reason}",
        subject=f"jobs/{job.name}", job=job.name, actor=event.actor, attempt=job.attempt,
        outcome=_of_resume(job),
    )  # fmt: skip
    job = draft.jobs[job.name]
    if job.phase is JobPhase.SUSPENDED:
        draft.job(
            job.name, phase=JobPhase.QUEUED, reason="waiting for nodes", stop_reason="",
            waits_as="",
        )  # fmt: skip
    elif job.phase is JobPhase.RUNNING:
        leaving.withdraw(draft, job, f"{event.actor} resumed it before it had stopped")
    else:  # it stops already, and starts again after that
        draft.job(job.name, after_stop=JobPhase.QUEUED)
        draft.attempt(job.name, leaving=None)

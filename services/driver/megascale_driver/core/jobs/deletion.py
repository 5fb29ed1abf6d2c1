"""Deletes ended jobs: by order, and the oldest beyond a number or an age."""

from __future__ import annotations

from megascale_driver.core.draft import DRIVER, Draft, unreadable_job_on, unreadable_key
from megascale_driver.core.values import reasons
from megascale_driver.core.values.events import DeleteRequested
from megascale_driver.core.values.job import Job
from megascale_job.visible import agreed, counted

# The keys of a job are deleted together, and a job can have thousands: only a few jobs in one
# decision.
MAX_AT_ONCE = 4
MAX_NAMED = 8  # nodes in a line of the log


def delete(draft: Draft, event: DeleteRequested) -> None:
    """Delete the record, attempts and log of an ended job; its checkpoints stay.

    A job whose rows cannot be read is deleted as well, and its workers stop.
    """
    job = draft.jobs.get(event.job)
    if job is None and unreadable_key(event.job) in draft.unreadable:
        _delete_unreadable(draft, event)
    elif job is None:
        draft.refuse("JOB_NOT_FOUND")
    elif not job.terminal:
        draft.refuse("JOB_NOT_ENDED", f"job {job.name} is {job.phase.lower()}; cancel it first")
    else:
        _delete(draft, job, event.reason, event.actor)


def expire(draft: Draft) -> None:
    """Delete the jobs that the policy no longer keeps, the oldest first, a few at a time."""
    ended = [job for job in draft.jobs.values() if job.terminal]
    ended.sort(key=lambda job: (job.updated_at_s, job.name))
    policy = draft.policy
    oldest_s = draft.now_s - policy.keep_ended_s
    surplus = max(0, len(ended) - policy.keep_ended_jobs)
    for number, job in enumerate(ended[:MAX_AT_ONCE]):
        if number < surplus:
            why = f"more than {counted(policy.keep_ended_jobs, 'job')} "
            why += f"{agreed(policy.keep_ended_jobs, 'have')} ended, and it was the first"
        elif job.updated_at_s < oldest_s:
            why = f"it ended more than {counted(policy.keep_ended_s / 86_400, 'day')} ago"
        else:
            return
        _delete(draft, job, why, DRIVER)


def _delete(draft: Draft, job: Job, why: str, actor: str) -> None:
    del draft.jobs[job.name]
    uri = job.config.checkpoint.uri
    draft.log(
        reasons.JOB_DELETED,
        f"job {job.name}, which {job.state}, is deleted: {why}",
        subject=f"jobs/{job.name}",
        actor=actor,
        policy="retention",
        outcome="its record and log are gone" + (f"; its checkpoints stay in {uri}" if uri else ""),
    )


def _delete_unreadable(draft: Draft, event: DeleteRequested) -> None:
    """Remove the rows of a job that cannot be read, and order its nodes to be idle."""
    key = unreadable_key(event.job)
    names = [
        name
        for name, node in draft.nodes.items()
        if unreadable_job_on(draft.unreadable, node) == event.job
    ]
    problem = draft.unreadable[key]
    draft.unreadable = {row: why for row, why in draft.unreadable.items() if row != key}
    for name in names:
        draft.command(name)
    where = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
    draft.log(
        reasons.JOB_DELETED,
        f"job {event.job}, which could not be read ({problem}), is deleted: {event.reason}",
        subject=key,
        actor=event.actor,
        policy="retention",
        outcome="its rows are gone, its checkpoints stay"
        + (f"; its workers on {where} stop" if names else ""),
    )

"""Plausibility of stored and reported numbers: those that no cluster reaches are damage.

A step or an attempt that is believed once is stored, compared with later ones, and decides
restarts. So a report or a step record with an impossible number is refused as a whole, and a stored
job with one counts as unreadable.
"""

from __future__ import annotations

from collections.abc import Mapping

from megascale_driver.core.values.cluster import Report
from megascale_driver.core.values.job import Job
from megascale_job.visible import counted

MAX_ATTEMPT = 1_000_000
# a stored job may be beyond its own steps: an update may have lowered them since
MAX_STEP = 100_000_000
MAX_LINES = 10**15  # of a log
MAX_TIME_S = 4_102_444_800.0  # the year 2100


def stored(job: Job) -> str:
    """The first implausible field of a stored job, in a sentence; "" if there is none."""
    steps = max(job.config.training.steps, MAX_STEP)
    for name, value, most in (
        ("attempt", job.attempt, MAX_ATTEMPT),
        ("opened_elsewhere", job.opened_elsewhere, MAX_ATTEMPT),
        ("log_seq", job.log_seq, MAX_LINES),
        ("step", job.current.step, steps),
        ("best_step", job.best_step, steps),
        ("committed_step", job.committed_step, steps),
        ("committed_by_attempt", job.committed_by_attempt, MAX_ATTEMPT),
        ("created_at_s", job.created_at_s, MAX_TIME_S),
        ("updated_at_s", job.updated_at_s, MAX_TIME_S),
    ):
        if not 0 <= value <= most:  # also for NaN
            return f"{name}: {value} is not within 0 to {most}"
    world_size = job.config.layout.world_size
    for slot in job.slots:
        if any(not 0 <= rank < world_size for rank in slot.ranks):
            return f"slots: {slot.node} has a rank beyond the job's {world_size}"
        if len(slot.ranks) != len(slot.devices):
            return (
                f"slots: {slot.node} has {counted(len(slot.ranks), 'rank')} and "
                f"{counted(len(slot.devices), 'device')}"
            )
    return ""


def record(job: Job, attempt: int, step: int) -> str:
    """The implausible number of a step record, in a sentence; "" if there is none."""
    return _numbers(job, "the step record", attempt, step)


def report(jobs: Mapping[str, Job], found: Report) -> str:
    """The implausible number of a heartbeat, in a sentence; "" without one or for unknown jobs."""
    if (job := jobs.get(found.job)) is not None and (
        problem := _numbers(job, "the heartbeat", found.attempt, 0)
    ):
        return problem
    for item in found.progress:
        if (job := jobs.get(item.job)) is None:
            continue
        steps = [(item.committed_by_attempt, item.committed_step)]
        steps += [(seal.attempt, seal.step) for seal in (*item.sealed, *item.replicas)]
        for attempt, step in steps:
            if problem := _numbers(job, "the progress of checkpoints", attempt, step):
                return problem
    return ""


def _numbers(job: Job, what: str, attempt: int, step: int) -> str:
    # An attempt above the job's is possible: etcd may have been restored from an older backup.
    if not 0 <= attempt <= MAX_ATTEMPT:
        return f"{what} of job {job.name} names attempt {attempt}"
    if not 0 <= step <= max(job.config.training.steps, job.best_step):
        total = job.config.training.steps
        return f"{what} of job {job.name} names step {step} of {total}"
    return ""

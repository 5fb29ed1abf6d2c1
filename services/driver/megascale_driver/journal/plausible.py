"""Whether a stored job can be true: numbers that no cluster reaches are damage, not state."""

from __future__ import annotations

from megascale_driver.core.state import Job

MAX_ATTEMPT = 1_000_000
MAX_LINES = 10**15  # of a log
MAX_TIME_S = 4_102_444_800.0  # the year 2100


def implausible(job: Job) -> str:
    """What is wrong with a job's numbers, with the field; "" if nothing is."""
    steps = job.config.training.steps
    for name, value, most in (
        ("attempt", job.attempt, MAX_ATTEMPT),
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
            return f"slots: {slot.node} has {len(slot.ranks)} ranks and {len(slot.devices)} devices"
    return ""

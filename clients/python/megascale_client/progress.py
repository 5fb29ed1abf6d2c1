"""How long a job still takes: one rule for every command and page."""

from __future__ import annotations

from megascale_client.messages import Job, JobPhase

PACE_STEPS = 50  # the newest, of whose times the driver takes the median


def remaining_s(job: Job) -> float | None:
    """Seconds to the last step at the median time of the newest steps; None while not RUNNING.

    The driver sends the median; right after it began to lead it knows no step but the newest.
    Faults to come are not in it: goodput says what they have cost so far.
    """
    known = job.HasField("typical_step_time")
    step_time = job.typical_step_time if known else job.last_record.step_time
    left = job.spec.trainer.training.steps - job.step
    if job.phase != JobPhase.RUNNING or left < 0 or not step_time.ToNanoseconds():
        return None
    return left * step_time.ToNanoseconds() / 1e9

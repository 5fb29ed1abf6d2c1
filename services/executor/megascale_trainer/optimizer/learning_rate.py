"""The learning rate as a pure function of the step number."""

from __future__ import annotations

import math

from megascale_job.config import JobConfig


def learning_rate(config: JobConfig, step: int) -> float:
    """Learning rate of update ``step``, counted from 0.

    It rises linearly over the first ``schedule.warmup_steps`` updates, reaches
    ``optimizer.learning_rate`` at the last of them, and falls by ``schedule.decay`` to
    ``schedule.min_ratio`` of that at update ``training.steps - 1``.
    """
    schedule, peak = config.schedule, config.optimizer.learning_rate
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak
    length = max(1, config.training.steps - 1 - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / length)
    share = 1.0 - done if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * share)

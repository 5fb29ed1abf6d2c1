"""What LAMB changes with the size of the batch, so that a run sees the same tokens.

Source: You et al., arXiv 1904.00962, section 4 and Table 4 (BERT at batches of 512 to 32,768): the
learning rate grows with the square root of the batch, and the share of steps in warm-up with the
batch itself ("linear-epoch warmup"), which at a fixed number of samples leaves the number of
warm-up steps as it is. Rules of thumb: the paper's rates were not tuned per batch, yours may gain
from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megascale_job.config import JobConfig


@dataclass(frozen=True, slots=True)
class ScaledBatch:
    """Fields of a job at another batch: of ``training``, ``optimizer`` and ``schedule``."""

    global_batch_size: int
    steps: int
    learning_rate: float
    warmup_steps: int


def scaled_batch(config: JobConfig, factor: float) -> ScaledBatch:
    """The fields of ``config``, a job that trains with LAMB, at ``factor`` times its batch.

    Steps are rounded up, so that no sample is left out; the batch is a multiple of micro_batch_size
    * dp. Warm-up never exceeds the run.

    Raises:
        ValueError: ``factor`` is not a positive finite number.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"factor: {factor} is not a positive number: give 4 for 4 times the batch")
    training = config.training
    unit = training.micro_batch_size * config.parallelism.dp
    batch = max(1, round(training.global_batch_size * factor / unit)) * unit
    ratio = batch / training.global_batch_size
    steps = -(-training.steps * training.global_batch_size // batch)
    return ScaledBatch(
        batch,
        steps,
        config.optimizer.learning_rate * math.sqrt(ratio),
        min(config.schedule.warmup_steps, steps),
    )

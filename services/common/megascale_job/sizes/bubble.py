"""How long a pipeline stage waits for the others, if transfers took no time; pure."""

from __future__ import annotations

from megascale_job.config import JobConfig


def ideal_bubble(config: JobConfig) -> float:
    """(p - 1) / (v m): a stage's waiting time over its computing time; 0 without a pipeline.

    The formula is that of Narayanan et al., arXiv 2104.04473, section 2.2, for p stages, v virtual
    stages on each and m micro-batches. Zero bubble leaves a third of it where forward, input and
    weight gradients take equally long (Qi et al., arXiv 2401.10241, section 2.3).
    """
    parallel = config.parallelism
    slots: float = parallel.pp - 1
    if parallel.pipeline_schedule == "zero_bubble":
        slots /= 3
    return slots / (parallel.virtual_stages * config.micro_batches)

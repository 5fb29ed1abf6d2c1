"""How often the fleet's devices fail, counted over its jobs, for `checkpoint.interval: auto`.

The count goes to the workers with the start of an attempt and stays what it is until the next:
all ranks decide from the same figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megascale_driver.core.values.attempt import FailureCount
from megascale_driver.core.values.state import Job
from megascale_job.config import CheckpointConfig
from megascale_job.sizes.checkpoint_interval import device_hours_per_failure, mtbf_s

_HOUR_US = 3_600_000_000


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Device hours between failures, corrected by the count, and seconds between those of a job."""

    device_hours: float
    mtbf_s: float


def count(jobs: Iterable[Job]) -> FailureCount:
    """Faults that ended attempts, and the hours that devices trained between them.

    Jobs that the driver still holds are counted; those that it has deleted are not.
    """
    faults, device_us = 0, 0
    for job in jobs:
        ledger = job.goodput
        faults += ledger.faults
        trained_us = ledger.productive_us + ledger.lost_us + ledger.checkpointing_us
        device_us += trained_us * job.config.layout.world_size
    return FailureCount(faults, device_us / _HOUR_US)


def rate(checkpoint: CheckpointConfig, counted: FailureCount, devices: int) -> FailureRate:
    """What the workers of a job on ``devices`` compute with."""
    hours = device_hours_per_failure(
        checkpoint.device_mtbf_hours, counted.count, counted.device_hours
    )
    return FailureRate(hours, mtbf_s(hours, devices))

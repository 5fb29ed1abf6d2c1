"""Progress of a job that survives a change of leader, and failure rates over all jobs.

Progress is the newest step, the last record and the goodput. These fields change with every tick in
which a step was completed, and are no decisions. They are stored whenever the job's head is written
for another reason. By themselves they are stored at the first step of an attempt, every
``policy.mark_interval_s`` seconds, and when a record arrives after the end.

Failure rates are counted over the fleet's jobs, for `checkpoint.interval: auto`. The count goes to
the workers at the start of an attempt and does not change during it, so that all ranks decide from
the same figures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from megascale_driver.analysis.progress import add_step_time
from megascale_driver.core.values import goodput
from megascale_driver.core.values.attempt import FailureCount, Fault, FaultKind
from megascale_driver.core.values.cluster import Node
from megascale_driver.core.values.goodput import Activity, Ledger
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_job.config import CheckpointConfig
from megascale_job.sizes.failures import device_hours_per_failure, mtbf_s

MAX_STEP_TIME_S = 86_400.0  # a record with a longer one is damaged
# STARTING too: the first records may overtake the report that all workers run.
_TRAINS = frozenset({JobPhase.STARTING, JobPhase.RUNNING})


def stepped(
    job: Job,
    step: int,
    record: Mapping[str, float],
    checkpointing_s: float,
    now_s: float,
    policy: Policy,
) -> Job:
    """Return the job with a new newest step of its attempt; ``record`` is empty if unknown."""
    last, passed_s = job.current, now_s - job.marked_at_s
    interval_s = _time_per_step(job, step, record, now_s)
    mark = job.terminal or not last.step or not 0 <= passed_s < policy.mark_interval_s
    return replace(
        job,
        current=replace(last, step=step, last_step_at_s=now_s, step_interval_s=interval_s),
        best_step=max(step, job.best_step),
        step_times=add_step_time(job.step_times, round(interval_s, 6)),
        last_record=record or job.last_record,
        goodput=_stepped(job, step, checkpointing_s, now_s),
        marked_at_s=now_s if mark else job.marked_at_s,
    )


def phase_entered(job: Job, nodes: Mapping[str, Node], now_s: float) -> Ledger:
    """Return the ledger of a job that has just entered its phase."""
    ledger = job.goodput
    if not ledger.since_us:
        return ledger  # a build without goodput stored the job, which no leader has adopted yet
    if job.terminal:
        return goodput.entered(ledger, Activity.ENDED, now_s)
    if job.phase in (JobPhase.QUEUED, JobPhase.SUSPENDED):
        return goodput.entered(ledger, Activity.WAITING, now_s)
    if job.phase is JobPhase.PREPARING:
        return goodput.placed(ledger, now_s)
    if job.phase is JobPhase.STARTING:
        ledger = goodput.at(ledger, now_s)
        return goodput.restored(
            ledger, job.current.restore.step if job.current.restore is not None else 0
        )
    if job.phase is JobPhase.RUNNING:
        return goodput.at(ledger, now_s)
    if job.phase is JobPhase.STOPPING and job.current.faults and not job.after_stop_ends:
        happened_s = min((_happened_s(fault, nodes) for fault in job.current.faults), default=now_s)
        return goodput.broke(ledger, happened_s, now_s)
    if job.phase is JobPhase.STOPPING:
        return goodput.entered(ledger, Activity.ENDING, now_s)
    return ledger


def adopted(job: Job, now_s: float) -> Ledger:
    """Return the ledger under a new leader.

    A job that was stored by a build without goodput gets a ledger from now on.
    """
    if job.terminal or job.goodput.since_us:
        return job.goodput
    ledger = goodput.submitted(now_s)
    if job.phase in (JobPhase.QUEUED, JobPhase.SUSPENDED):
        return ledger
    ledger = goodput.placed(ledger, now_s)
    if job.phase is JobPhase.STOPPING:
        return goodput.entered(ledger, Activity.ENDING, now_s)
    return goodput.restored(
        ledger, job.current.restore.step if job.current.restore is not None else 0
    )


def _time_per_step(job: Job, step: int, record: Mapping[str, float], now_s: float) -> float:
    """Seconds that the newest step took; 0 for the first known step of an attempt.

    Measured by the clock of the rank that completed it. The time of arrival would depend on the
    network and on ticks: a hang limit of five step times would grow by five times that delay.
    Records of builds that measure no step time count by their arrival.
    """
    last = job.current
    if not last.last_step_at_s:
        return 0.0
    own_s = record.get("step_time", 0.0)
    if 0.0 < own_s <= MAX_STEP_TIME_S:
        return own_s
    return (now_s - last.last_step_at_s) / (step - last.step)


def _stepped(job: Job, step: int, checkpointing_s: float, now_s: float) -> Ledger:
    if not job.goodput.since_us:
        return job.goodput
    if job.phase in _TRAINS:
        return goodput.stepped(job.goodput, step, now_s, checkpointing_s)
    return goodput.learned(job.goodput, step)


def _happened_s(fault: Fault, nodes: Mapping[str, Node]) -> float:
    """When a fault happened as far as the driver knows; 0: when the job last advanced."""
    if fault.kind is FaultKind.HANG:
        return 0.0
    node = nodes.get(fault.node)
    if fault.kind is FaultKind.NODE_DEAD and node is not None:
        return node.reset_at_s or node.last_seen_s
    return fault.at_s


_HOUR_US = 3_600_000_000


@dataclass(frozen=True, slots=True)
class FailureRate:
    """Device hours per failure, corrected by the count, and a job's mean seconds to failure."""

    device_hours: float
    mtbf_s: float


def failure_count(jobs: Iterable[Job]) -> FailureCount:
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


def failure_rate(checkpoint: CheckpointConfig, counted: FailureCount, devices: int) -> FailureRate:
    """The rate that the workers of a job on ``devices`` compute with."""
    hours = device_hours_per_failure(
        checkpoint.device_mtbf_hours, counted.count, counted.device_hours
    )
    return FailureRate(hours, mtbf_s(hours, devices))

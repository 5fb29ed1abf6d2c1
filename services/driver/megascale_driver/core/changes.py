"""What may be changed of a node, a job or an attempt, by name and type: mypy checks every change.

Each class repeats the fields of its dataclass; tests/unit/test_driver_draft.py holds the two
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from megascale_driver.core.values.attempt import (
    Attempt,
    FailureCount,
    Fault,
    Leaving,
    PlanVerdict,
    Searching,
    SearchLog,
    TrafficSeen,
)
from megascale_driver.core.values.conditions import Condition, SlowCheck
from megascale_driver.core.values.goodput import Ledger
from megascale_driver.core.values.platform_sign import PlatformSign
from megascale_driver.core.values.replica_orders import FailedCopies, ReplicaOrders
from megascale_driver.core.values.state import (
    AttemptRecord,
    Check,
    Desired,
    Disposition,
    Identity,
    JobPhase,
    Liveness,
    Profile,
    Report,
    Rollback,
)
from megascale_job.config import JobConfig
from megascale_job.restore import RestorePlan


class NodeChanges(TypedDict, total=False):
    """Fields of :class:`megascale_driver.core.values.state.Node`; a node keeps its name."""

    identity: Identity
    disposition: Disposition
    disposition_reason: str
    disposition_policy: str
    liveness: Liveness
    liveness_reason: str
    connected: bool
    last_seen_s: float
    reset_at_s: float
    probed_at_s: float
    probe_failed_at_s: float
    heard_at_s: float
    mute_at_s: float
    unreachable: PlatformSign
    report: Report | None
    beat_at_s: float
    checks: tuple[Check, ...]
    desired: Desired
    desired_version: int
    slow_checks: tuple[SlowCheck, ...]


class JobChanges(TypedDict, total=False):
    """Fields of :class:`megascale_driver.core.values.state.Job`; a job keeps its name."""

    config: JobConfig
    spec_revision: int
    phase: JobPhase
    reason: str
    created_at_s: float
    updated_at_s: float
    log_seq: int
    current: Attempt
    waits_as: str
    spares: tuple[str, ...]
    evicted: tuple[str, ...]
    attempts: tuple[AttemptRecord, ...]
    opened_elsewhere: int
    refused_steps: tuple[int, ...]
    after_stop: JobPhase
    stop_reason: str
    restarts: int
    restarts_without_progress: int
    node_failures: Mapping[str, int]
    repeats: Mapping[str, int]
    restart_times: Mapping[str, tuple[float, ...]]
    not_before_s: float
    roots: Mapping[str, tuple[str, ...]]
    out_of_memory: int
    progress_mark: int
    committed_step: int
    committed_by_attempt: int
    committed_at_s: float
    manifest_uri: str
    conditions: tuple[Condition, ...]
    failed_checkpoint: tuple[int, int]
    failed_checkpoints: int
    failed_since_step: int
    damaged_snapshots: tuple[tuple[int, int, int], ...]
    pending_spec: str
    rollbacks: tuple[Rollback, ...]
    profile: Profile | None
    marked_at_s: float
    best_step: int
    last_record: Mapping[str, float]
    goodput: Ledger
    step_times: tuple[float, ...]
    timer_s: float


class AttemptChanges(TypedDict, total=False):
    """Fields of :class:`megascale_driver.core.values.attempt.Attempt`; its number and its places
    stay."""

    store_endpoint: str
    committer_endpoint: str
    restore: RestorePlan | None
    replica_orders: ReplicaOrders
    failure_count: FailureCount
    faults: tuple[Fault, ...]
    leaving: Leaving | None
    spares_short: int
    stays_until_s: float
    step: int
    last_step_at_s: float
    step_interval_s: float
    open_asked: bool
    open_failures: int
    open_not_before_s: float
    open_since_s: float
    finished_at_s: float
    skipped_step: int
    skipped_snapshots: int
    failed_copies: FailedCopies
    observed_hang_s: float
    diverged_from: int
    plan: PlanVerdict
    slow_nodes: tuple[str, ...]
    traffic: TrafficSeen
    checks: tuple[str, ...]
    next_checks: tuple[str, ...]
    suspects_devices: bool
    searching: Searching | None
    search_log: SearchLog

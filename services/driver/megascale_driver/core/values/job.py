"""A job: its configuration, its phase, and what is kept of its attempts."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from megascale_driver.core.values.attempt import Attempt, NodeSlot
from megascale_driver.core.values.goodput import Ledger
from megascale_driver.core.values.stored_fields import INLINE, RIDES, SEPARATE, VOLATILE
from megascale_job.config import JobConfig


class ConditionType(enum.StrEnum):
    """Subject of a condition of a job."""

    NOT_SAVED = "NOT_SAVED"
    CHECKPOINT_FAILING = "CHECKPOINT_FAILING"


@dataclass(frozen=True, slots=True)
class Condition:
    """A state of a job besides its phase; ``reason`` is for programs."""

    type: ConditionType
    reason: str
    message: str
    since_s: float


class JobPhase(enum.StrEnum):
    """Phase of a job; the last three are terminal."""

    QUEUED = "QUEUED"
    PREPARING = "PREPARING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    SUSPENDED = "SUSPENDED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


ACTIVE_PHASES = frozenset(
    {JobPhase.PREPARING, JobPhase.STARTING, JobPhase.RUNNING, JobPhase.STOPPING}
)


TERMINAL_PHASES = frozenset({JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED})


# Continuations of a sentence about an ended job.
_ENDED = {
    JobPhase.SUCCEEDED: "has succeeded",
    JobPhase.FAILED: "has failed",
    JobPhase.CANCELLED: "was cancelled",
}


class TraceState(enum.StrEnum):
    """State of a rank's trace; all but PENDING are final."""

    PENDING = "PENDING"
    WRITTEN = "WRITTEN"
    SKIPPED = "SKIPPED"
    FAILED = "FAILED"
    LOST = "LOST"


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """Placement of an attempt; kept for good, so that its logs can be found."""

    number: int
    slots: tuple[NodeSlot, ...]
    opened_at_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """A rank's trace. ``path``: the file on the rank's node, whether it is written yet or not."""

    rank: int
    node: str
    path: str
    state: TraceState = TraceState.PENDING
    size_bytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """Steps of one attempt that chosen ranks trace, from the first to the last inclusive.

    A rank that reaches the first step after ``not_after_s`` skips the trace.
    """

    id: str
    attempt: int
    first_step: int
    last_step: int
    not_after_s: float
    traces: tuple[Trace, ...] = ()

    @property
    def pending(self) -> bool:
        """True while a trace is missing."""
        return any(trace.state is TraceState.PENDING for trace in self.traces)


@dataclass(frozen=True, slots=True)
class Job:
    """A job and its newest attempt. ``after_stop``: the phase that follows STOPPING."""

    name: str
    config: JobConfig = field(metadata=SEPARATE)
    spec_revision: int = 1
    phase: JobPhase = JobPhase.QUEUED
    reason: str = ""
    created_at_s: float = 0.0
    updated_at_s: float = 0.0
    log_seq: int = 0
    # The newest attempt; its fields are stored among those of the job.
    current: Attempt = field(default_factory=Attempt, metadata=INLINE)
    # Kind of wait of a queued job (megascale_driver.placement.queue_values.Kind); "" if undecided.
    waits_as: str = ""
    spares: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    attempts: tuple[AttemptRecord, ...] = field(default=(), metadata=SEPARATE)
    # The newest attempt that was opened by hand, or before the job was submitted.
    opened_elsewhere: int = 0
    refused_steps: tuple[int, ...] = ()
    after_stop: JobPhase = JobPhase.QUEUED
    stop_reason: str = ""
    restarts: int = 0
    restarts_without_progress: int = 0
    node_failures: Mapping[str, int] = field(default_factory=dict)
    # When restarts were counted, by cause, within the window of their budget.
    restart_times: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    # Back-off after attempts that failed alike: no attempt is placed before this time.
    not_before_s: float = 0.0
    # Since the last progress: nodes by root, attempts by failure, attempts out of memory.
    roots: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    repeats: Mapping[str, int] = field(default_factory=dict)
    out_of_memory: int = 0
    # The highest known step when the last restart was counted.
    progress_mark: int = 0
    committed_step: int = 0
    committed_by_attempt: int = 0
    committed_at_s: float = 0.0
    manifest_uri: str = ""
    conditions: tuple[Condition, ...] = ()
    # The newest (attempt, step) whose checkpoint failed, the number of failures in a row, and the
    # committed step before them.
    failed_checkpoint: tuple[int, int] = (0, 0)
    failed_checkpoints: int = 0
    failed_since_step: int = 0
    # (attempt, step, rank) of damaged snapshots that are in the log.
    damaged_snapshots: tuple[tuple[int, int, int], ...] = ()
    # The configuration of the next attempt as canonical JSON; "" if it does not change.
    pending_spec: str = ""
    rollbacks: tuple[Rollback, ...] = ()
    # The newest profile requested, of this attempt or an earlier one.
    profile: Profile | None = None
    # When the fields marked RIDES were last stored for their own sake (values.accounting).
    marked_at_s: float = 0.0
    best_step: int = field(default=0, metadata=RIDES)  # the highest step of all attempts
    # The newest step record, by the names of its fields on the wire; empty before the first.
    last_record: Mapping[str, float] = field(default_factory=dict, metadata=RIDES)
    # All zero if a build without goodput stored the job.
    goodput: Ledger = field(default_factory=Ledger, metadata=RIDES)
    # Times of the newest steps of all attempts, in seconds.
    step_times: tuple[float, ...] = field(default=(), metadata=RIDES)
    # When the current phase began; a new leader starts it again.
    timer_s: float = field(default=0.0, metadata=VOLATILE)

    @property
    def attempt(self) -> int:
        """Number of the newest attempt; 0 before the first."""
        return self.current.number

    @property
    def slots(self) -> tuple[NodeSlot, ...]:
        """Slots of the newest attempt."""
        return self.current.slots

    @property
    def active(self) -> bool:
        """True while an attempt is in progress."""
        return self.phase in ACTIVE_PHASES

    @property
    def terminal(self) -> bool:
        """True if the job has ended."""
        return self.phase in TERMINAL_PHASES

    @property
    def state(self) -> str:
        """Its phase, as the continuation of a sentence that begins with "the job"."""
        return _ENDED.get(self.phase) or f"is {self.phase.lower()}"

    @property
    def after_stop_ends(self) -> bool:
        """True if the job ends when its attempt has stopped."""
        return self.after_stop in TERMINAL_PHASES

    def abandoned(self, step: int, attempt: int) -> bool:
        """True if the state lies on a branch that was given up by a rollback."""
        for back in reversed(self.rollbacks):
            if (step, attempt) == (back.step, back.written_by):
                break
            if attempt <= back.attempt and step > back.step:
                return True
        return False

    def went_back(self, attempt: int) -> bool:
        """True if a rollback was ordered in this attempt, or after it."""
        return bool(self.rollbacks) and attempt <= self.rollbacks[-1].attempt

    def slot_of(self, node: str) -> NodeSlot | None:
        """The node's slot in the attempt, if it has one."""
        return self.current.slot_of(node)


@dataclass(frozen=True, slots=True)
class Rollback:
    """An order to go back to ``step`` of ``written_by``: older states above it are invalid."""

    step: int
    attempt: int
    written_by: int = 0

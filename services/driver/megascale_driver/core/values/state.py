"""The driver's whole state as frozen values: nodes, jobs, breaker, requests.

Times are Unix seconds, taken from the events. What is stored is committed to etcd before any
command or effect that follows from it leaves the driver
(:mod:`megascale_driver.core.values.storing`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from megascale_common.node.flight_record import RankRecord
from megascale_driver.analysis.logs.correlation import Observation
from megascale_driver.analysis.progress import RankStatus
from megascale_driver.core.values.attempt import Attempt, FailureCount, NodeSlot
from megascale_driver.core.values.checkpoint_progress import Progress
from megascale_driver.core.values.conditions import Condition, SlowCheck
from megascale_driver.core.values.goodput import Ledger
from megascale_driver.core.values.platform_sign import REACHED, PlatformSign
from megascale_driver.core.values.replica_orders import NodeReplicaOrders
from megascale_driver.core.values.standing import Silence, Tenant
from megascale_driver.core.values.storing import INLINE, RIDES, SEPARATE, VOLATILE
from megascale_job.config import JobConfig
from megascale_job.restore import RestorePlan


class Disposition(enum.StrEnum):
    """Whether a node may be given work."""

    SCHEDULABLE = "SCHEDULABLE"
    CORDONED = "CORDONED"
    DRAINING = "DRAINING"
    QUARANTINED = "QUARANTINED"


class Liveness(enum.StrEnum):
    """Whether a node's agent is alive, as far as the driver knows."""

    UNKNOWN = "UNKNOWN"
    ALIVE = "ALIVE"
    SUSPECT = "SUSPECT"
    DEAD = "DEAD"


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
# In a sentence.
_ENDED = {
    JobPhase.SUCCEEDED: "has succeeded",
    JobPhase.FAILED: "has failed",
    JobPhase.CANCELLED: "was cancelled",
}


class AttemptPhase(enum.StrEnum):
    """Phase of an attempt on one node, as the node reports it."""

    IDLE = "IDLE"
    PREPARING = "PREPARING"
    PREPARED = "PREPARED"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    FAILED = "FAILED"
    FINISHED = "FINISHED"


class DesiredPhase(enum.StrEnum):
    """What a node is ordered to do."""

    IDLE = "IDLE"
    PREPARE = "PREPARE"
    START = "START"


class TraceState(enum.StrEnum):
    """State of a rank's trace; all but PENDING are final."""

    PENDING = "PENDING"
    WRITTEN = "WRITTEN"
    SKIPPED = "SKIPPED"
    FAILED = "FAILED"
    LOST = "LOST"


@dataclass(frozen=True, slots=True)
class Device:
    """One device of a node. ``kind`` is cpu or cuda."""

    index: int
    kind: str
    uuid: str = ""
    model: str = ""
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one self-check. ``verdict`` is PASS, DEGRADED, FAIL or SKIPPED."""

    name: str
    verdict: str
    target: str = ""
    detail: str = ""
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """One rank's worker process as its node reports it."""

    rank: int
    exited: bool = False
    exit_status: int = 0
    error: str = ""
    error_kind: str = ""
    exited_at_s: float = 0.0
    restored_step: int = -1  # in place of the planned one; -1: the planned one was
    restore_problem: str = ""
    restore_notes: str = ""  # what differs from the run that wrote the checkpoint


@dataclass(frozen=True, slots=True)
class TraceReport:
    """One rank's trace as its node reports it.

    ``profile`` is the profile's id, ``detail`` the reason why there is no trace.
    """

    profile: str
    rank: int
    state: TraceState
    size_bytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StoppedReport:
    """What had failed on a node in the attempt stopped last; of ranks that stood still (rank,
    frames) and NCCL's records."""

    job: str
    attempt: int
    failure: str = ""
    workers: tuple[WorkerReport, ...] = ()
    stacks: tuple[tuple[int, str], ...] = ()
    records: tuple[RankRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Content of a heartbeat.

    ``desired_version`` is the newest desired state that the node has received from this leader; 0
    if that is none. With phase FINISHED, ``failure`` is why the last checkpoint is not complete.
    """

    desired_version: int = 0
    job: str = ""
    attempt: int = 0
    phase: AttemptPhase = AttemptPhase.IDLE
    failure: str = ""
    workers: tuple[WorkerReport, ...] = ()
    statuses: tuple[RankStatus, ...] = ()
    checks: tuple[Check, ...] = ()
    store_endpoint: str = ""
    progress: tuple[Progress, ...] = ()
    traces: tuple[TraceReport, ...] = ()
    daemon_restarts: int = 0
    daemon_exit_status: int = 0
    # With phase FINISHED: the step after which the workers ended; 0: the last of the job.
    finished_step: int = 0
    replica_endpoint: str = ""
    stopped: StoppedReport | None = None  # with phase IDLE
    # What the logs report of the attempt (job, number), whose node and host are the report's.
    logs_of: tuple[str, int] = ("", 0)
    logs: tuple[Observation, ...] = ()
    # The newest order to save and leave that failed, by its id, and why.
    leave_failed: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a node, from its hello. ``incarnation`` is new with every start of its agent."""

    incarnation: str = ""
    boot_id: str = ""
    hostname: str = ""
    build: str = ""
    devices: tuple[Device, ...] = ()
    topology: Mapping[str, str] = field(default_factory=dict)
    executor_endpoint: str = ""
    checkpoint_endpoint: str = ""
    folder: str = ""
    # Equal to that of a process which sees the same files; empty: unknown.
    file_view: str = ""


@dataclass(frozen=True, slots=True)
class ProfileCommand:
    """A node's part in a profile: the ranks to trace, and the steps, both ends included."""

    id: str
    first_step: int
    last_step: int
    ranks: tuple[int, ...]
    not_after_s: float


@dataclass(frozen=True, slots=True)
class Desired:
    """Desired state of a node; the other fields are empty when the phase is IDLE."""

    phase: DesiredPhase = DesiredPhase.IDLE
    job: str = ""
    attempt: int = 0
    store_endpoint: str = ""
    restore: RestorePlan | None = None
    committer_endpoint: str = ""
    profile: ProfileCommand | None = None
    replicas: NodeReplicaOrders = field(default_factory=NodeReplicaOrders)
    failures: FailureCount = field(default_factory=FailureCount)
    # Id of the order to save after the next steps and then end; "" without one.
    leave: str = ""
    checks: tuple[str, ...] = ()  # with PREPARE


@dataclass(frozen=True, slots=True)
class Node:
    """A node. Which job holds it follows from the slots of the jobs and is not stored here."""

    name: str
    identity: Identity = field(default_factory=Identity)
    disposition: Disposition = Disposition.SCHEDULABLE
    disposition_reason: str = ""
    # The rule that set it: a quarantine by self-check ends with the incarnation that failed.
    disposition_policy: str = ""
    liveness: Liveness = field(default=Liveness.UNKNOWN, metadata=VOLATILE)
    liveness_reason: str = field(default="", metadata=VOLATILE)  # of the newest SUSPECT or DEAD
    connected: bool = field(default=False, metadata=VOLATILE)
    last_seen_s: float = field(default=0.0, metadata=VOLATILE)
    # When the agent itself was last heard, by a hello, a heartbeat or its open link. Only known to
    # be the newest moment while the node is silent.
    heard_at_s: float = field(default=0.0, metadata=VOLATILE)
    # The newest answer to a probe that is no sign of life: the agent answers and says nothing.
    mute_at_s: float = field(default=0.0, metadata=VOLATILE)
    # When the open stream broke; 0 while it is open, or if it was never open in this term.
    reset_at_s: float = field(default=0.0, metadata=VOLATILE)
    probed_at_s: float = field(default=0.0, metadata=VOLATILE)
    # The newest failed probe since the node's last sign of life; 0 without one.
    probe_failed_at_s: float = field(default=0.0, metadata=VOLATILE)
    unreachable: PlatformSign = field(default=REACHED, metadata=VOLATILE)
    report: Report | None = field(default=None, metadata=VOLATILE)
    beat_at_s: float = field(default=0.0, metadata=VOLATILE)
    # Self-checks of the newest PREPARE; later heartbeats need not repeat them.
    checks: tuple[Check, ...] = field(default=(), metadata=VOLATILE)
    desired: Desired = field(default_factory=Desired, metadata=VOLATILE)
    desired_version: int = field(default=1, metadata=VOLATILE)
    # Targets whose newest figure is a FAIL beside the fleet's; an uncordon forgets them.
    slow_checks: tuple[SlowCheck, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """Where an attempt ran; kept for good, so that its logs can be found."""

    number: int
    slots: tuple[NodeSlot, ...]
    opened_at_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """A rank's trace. ``path`` is the file on the rank's node, written or not yet."""

    rank: int
    node: str
    path: str
    state: TraceState = TraceState.PENDING
    size_bytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Profile:
    """Steps of one attempt that chosen ranks trace, both ends included.

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
        """Whether a trace is still missing."""
        return any(trace.state is TraceState.PENDING for trace in self.traces)


@dataclass(frozen=True, slots=True)
class Job:
    """A job and its newest attempt. ``after_stop`` is the phase that follows STOPPING."""

    name: str
    config: JobConfig = field(metadata=SEPARATE)
    spec_revision: int = 1
    phase: JobPhase = JobPhase.QUEUED
    reason: str = ""
    created_at_s: float = 0.0
    updated_at_s: float = 0.0
    log_seq: int = 0
    # The newest attempt. Its fields are stored among those of the job.
    current: Attempt = field(default_factory=Attempt, metadata=INLINE)
    # How a queued job waits, a megascale_driver.placement.queue_values.Kind; "" if not decided yet.
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
    # No attempt is placed before: the back-off after attempts that failed alike.
    not_before_s: float = 0.0
    # Since the last progress: roots with their nodes, attempts by failure, those out of memory.
    roots: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    repeats: Mapping[str, int] = field(default_factory=dict)
    out_of_memory: int = 0
    # Highest step that was known when the last restart was counted.
    progress_mark: int = 0
    committed_step: int = 0
    committed_by_attempt: int = 0
    committed_at_s: float = 0.0
    manifest_uri: str = ""
    conditions: tuple[Condition, ...] = ()
    # The newest (attempt, step) whose checkpoint failed, how many did in a row, after which step.
    failed_checkpoint: tuple[int, int] = (0, 0)
    failed_checkpoints: int = 0
    failed_since_step: int = 0
    # (attempt, step, rank) of damaged snapshots that have a line in the log.
    damaged_snapshots: tuple[tuple[int, int, int], ...] = ()
    # The configuration of the next attempt as canonical JSON; "" if it stays.
    pending_spec: str = ""
    rollbacks: tuple[Rollback, ...] = ()
    # The newest profile requested, of this attempt or an earlier one.
    profile: Profile | None = None
    # When the fields that ride were last stored for their own sake (core.accounting).
    marked_at_s: float = 0.0
    best_step: int = field(default=0, metadata=RIDES)  # newest of all attempts
    # The newest step record, by the names of its fields on the wire; empty before the first.
    last_record: Mapping[str, float] = field(default_factory=dict, metadata=RIDES)
    # All zero if a build without goodput has stored the job.
    goodput: Ledger = field(default_factory=Ledger, metadata=RIDES)
    # Time per step between step records, the newest ones of all attempts.
    step_times: tuple[float, ...] = field(default=(), metadata=RIDES)
    # When the clock of the current phase started; a new leader restarts it.
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
        """Whether an attempt is in progress."""
        return self.phase in ACTIVE_PHASES

    @property
    def terminal(self) -> bool:
        """Whether the job has ended."""
        return self.phase in TERMINAL_PHASES

    @property
    def state(self) -> str:
        """Its phase in a sentence: the job ..."""
        return _ENDED.get(self.phase) or f"is {self.phase.lower()}"

    @property
    def after_stop_ends(self) -> bool:
        """Whether the job ends with the stop of its attempt."""
        return self.after_stop in TERMINAL_PHASES

    def abandoned(self, step: int, attempt: int) -> bool:
        """Whether a state lies on a branch that an operator gave up."""
        for back in reversed(self.rollbacks):
            if (step, attempt) == (back.step, back.written_by):
                break
            if attempt <= back.attempt and step > back.step:
                return True
        return False

    def went_back(self, attempt: int) -> bool:
        """Whether somebody has ordered to go back in this attempt, or after it."""
        return bool(self.rollbacks) and attempt <= self.rollbacks[-1].attempt

    def slot_of(self, node: str) -> NodeSlot | None:
        """The node's slot in the attempt, if it has one."""
        return self.current.slot_of(node)


@dataclass(frozen=True, slots=True)
class SwitchTrip:
    """A switch of which many nodes went silent at once; ``lost``: they are given up together."""

    switch: str
    at_s: float
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Root:
    """A node that was quarantined by a self-check, with the fingerprint of what it found."""

    at_s: float
    node: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Rollback:
    """An order to go back to ``step`` of ``written_by``: nothing older above it is restored."""

    step: int
    attempt: int
    written_by: int = 0


@dataclass(frozen=True, slots=True)
class Breaker:
    """Evictions in the current window, by the driver itself.

    ``tripped_at_s`` > 0: since then inferred evictions are only observed, not enforced.
    """

    evictions: tuple[tuple[float, str], ...] = ()
    tripped_at_s: float = 0.0
    switches: tuple[SwitchTrip, ...] = ()
    # What self-checks found lately, the newest last.
    roots: tuple[Root, ...] = ()
    # How operators have the rules applied (core.rules); a rule without an entry has its default.
    modes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """A mutating call that was carried out; a repetition under its id changes nothing."""

    kind: str
    subject: str
    digest: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """The driver's whole state.

    Until ``grace_until_s`` a missing node is not evidence (a new leader waits for the links), and
    until ``silence_hold_until_s`` no node is declared dead for its silence.
    """

    nodes: Mapping[str, Node] = field(default_factory=dict)
    jobs: Mapping[str, Job] = field(default_factory=dict)
    requests: Mapping[str, Request] = field(default_factory=dict)
    breaker: Breaker = field(default_factory=Breaker)
    log_seq: int = 0
    leader_since_s: float = 0.0
    grace_until_s: float = 0.0
    silence_hold_until_s: float = 0.0
    # Rows of etcd that the leader could not read (jobs/NAME, nodes/NAME), and why; they stay there.
    unreadable: Mapping[str, str] = field(default_factory=dict)
    # When the queue is decided again even if nothing changes.
    queue_due_s: float = 0.0
    queue_decided_s: float = 0.0
    forget_due_s: float = 0.0  # when it is next looked for nodes that have left
    # Those with a quota of their own; for others the driver's option holds.
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    # By subject; one that has ended goes with the next order.
    silences: Mapping[str, Silence] = field(default_factory=dict)

    def holder_of(self, node: str) -> Job | None:
        """The job whose attempt holds the node, if any."""
        return next(
            (job for job in self.jobs.values() if job.active and job.slot_of(node) is not None),
            None,
        )

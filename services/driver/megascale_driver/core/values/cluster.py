"""The driver's whole state as frozen values: nodes, jobs, tenants, breaker, requests.

Times are Unix seconds, taken from the events. What is stored is committed to etcd before any
command or effect that follows from it leaves the driver
(:mod:`megascale_driver.core.values.stored_fields`).

Note [Desired state]
~~~~~~~~~~~~~~~~~~~~
The desired state of a node is a pure function of its job (:func:`desired_of`), and level-triggered:
it describes what should be, not what has happened. The driver numbers the versions and
sends the newest one after every change, with every hello, and whenever in doubt. Sending it again
is always correct, a version that is lost costs nothing once a newer one arrives, and a node that
missed ten needs only the last. So the driver keeps no queue of commands and no record of what was
acknowledged: a node reports the newest version that it has received, and its report counts only
where that is new enough (``jobs._stopped``).
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from megascale_common.node.flight_record import RankRecord
from megascale_driver.analysis.logs.correlation import Observation
from megascale_driver.analysis.progress import RankStatus
from megascale_driver.core.values.attempt import FailureCount, NodeReplicaOrders
from megascale_driver.core.values.job import Job, JobPhase, TraceState
from megascale_driver.core.values.stored_fields import VOLATILE
from megascale_driver.placement.gang import Candidate, Capacity
from megascale_driver.placement.topology import SWITCH_LABELS
from megascale_job.restore import RestorePlan

MAX_SLOW: Final = 32  # slow targets kept per node


@dataclass(frozen=True, slots=True)
class CheckpointFailure:
    """A rank's part of a checkpoint that could not be made durable, or a commit that failed."""

    attempt: int
    step: int
    rank: int
    error: str


@dataclass(frozen=True, slots=True)
class SlowCheck:
    """A target of a node that was slower than the fleet in ``check``, ``times`` in a row.

    ``origin``: the attempt (JOB/NUMBER) whose checks measured it last; "" on demand.
    """

    check: str
    target: str
    times: int
    origin: str = ""


@dataclass(frozen=True, slots=True)
class SealedSnapshot:
    """A complete snapshot of one rank in its node's staging memory."""

    rank: int
    attempt: int
    step: int
    layout_digest: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Snapshots and checkpoints of one job, as the daemon of a node reports them."""

    job: str
    sealed: tuple[SealedSnapshot, ...] = ()
    committed_step: int = 0
    committed_by_attempt: int = 0
    manifest_uri: str = ""
    failure: CheckpointFailure | None = None
    skipped_snapshots: int = 0
    skipped_step: int = 0
    skipped_by_attempt: int = 0
    replicas: tuple[SealedSnapshot, ...] = ()
    replica_failure: CheckpointFailure | None = None
    damaged: tuple[CheckpointFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class PlatformSign:
    """A platform's report that it does not reach the node.

    ``at_s``: when it was made; 0: the platform reaches the node, or none reports. ``words``: the
    platform's words, and who reported them.
    """

    at_s: float = 0.0
    words: str = ""


REACHED = PlatformSign()


@dataclass(frozen=True, slots=True)
class Tenant:
    """The quota of a tenant by order: the number of devices that its jobs may hold at once."""

    name: str
    quota: int = 0


class Disposition(enum.StrEnum):
    """Whether a node can be given work."""

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
    """The phase that a node is ordered to be in."""

    IDLE = "IDLE"
    PREPARE = "PREPARE"
    START = "START"


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
    """One rank's worker process, as its node reports it."""

    rank: int
    exited: bool = False
    exit_status: int = 0
    error: str = ""
    error_kind: str = ""
    exited_at_s: float = 0.0
    restored_step: int = -1  # restored instead of the planned step; -1: the planned one was
    restore_problem: str = ""
    restore_notes: str = ""  # differences from the run that wrote the checkpoint


@dataclass(frozen=True, slots=True)
class TraceReport:
    """One rank's trace, as its node reports it; ``detail``: why there is none."""

    profile: str
    rank: int
    state: TraceState
    size_bytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StoppedReport:
    """Failures on a node in the attempt that it stopped last.

    ``stacks``: (rank, frames) of ranks that stood still. ``records``: NCCL's records.
    """

    job: str
    attempt: int
    failure: str = ""
    workers: tuple[WorkerReport, ...] = ()
    stacks: tuple[tuple[int, str], ...] = ()
    records: tuple[RankRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Content of a heartbeat.

    ``desired_version`` is the newest desired state that the node has received from this leader, 0
    if it has received none. With phase FINISHED, ``failure`` is why the last checkpoint is not
    complete.
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
    # Findings in the logs of the attempt (job, number); the report has their node and host.
    logs_of: tuple[str, int] = ("", 0)
    logs: tuple[Observation, ...] = ()
    # The newest order to save and leave that failed: its id, and why.
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
    # Equal for processes that see the same files; empty: unknown.
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
    """A node. Which job holds it follows from the slots of the jobs, and is not stored here."""

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
    # When the agent itself was last heard, by a hello, a heartbeat or its open link. Exact only
    # while the node is silent.
    heard_at_s: float = field(default=0.0, metadata=VOLATILE)
    # The newest answer to a probe that does not count as a sign of life: the agent answers probes
    # and sends no heartbeats.
    mute_at_s: float = field(default=0.0, metadata=VOLATILE)
    # When the link broke; 0 while it is open, or if it was never open in this term.
    reset_at_s: float = field(default=0.0, metadata=VOLATILE)
    probed_at_s: float = field(default=0.0, metadata=VOLATILE)
    # The newest failed probe since the node's last sign of life; 0 without one.
    probe_failed_at_s: float = field(default=0.0, metadata=VOLATILE)
    unreachable: PlatformSign = field(default=REACHED, metadata=VOLATILE)
    report: Report | None = field(default=None, metadata=VOLATILE)
    beat_at_s: float = field(default=0.0, metadata=VOLATILE)
    # Self-checks of the newest PREPARE; later heartbeats may leave them out.
    checks: tuple[Check, ...] = field(default=(), metadata=VOLATILE)
    desired: Desired = field(default_factory=Desired, metadata=VOLATILE)
    desired_version: int = field(default=1, metadata=VOLATILE)
    # Targets that failed their newest comparison with the fleet; an uncordon clears them.
    slow_checks: tuple[SlowCheck, ...] = ()


@dataclass(frozen=True, slots=True)
class SwitchTrip:
    """A switch with many silent nodes at once; ``lost``: they are given up together."""

    switch: str
    at_s: float
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Root:
    """A node that failed a self-check, with the fingerprint of the finding."""

    at_s: float
    node: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Breaker:
    """Evictions that the driver itself decided in the current window.

    ``tripped_at_s`` > 0: inferred evictions are only observed since then.
    """

    evictions: tuple[tuple[float, str], ...] = ()
    tripped_at_s: float = 0.0
    switches: tuple[SwitchTrip, ...] = ()
    # Recent findings of self-checks, the newest last.
    roots: tuple[Root, ...] = ()
    # Modes of rules that operators have set; a rule without an entry has its default.
    modes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """A mutating call that was carried out; a repetition under the same id changes nothing."""

    kind: str
    subject: str
    digest: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """The driver's whole state.

    Until ``grace_until_s`` a missing node is no evidence (a new leader waits for the links), and
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
    # Rows of etcd that the leader could not read (jobs/NAME, nodes/NAME), with the reason; they
    # stay in etcd.
    unreadable: Mapping[str, str] = field(default_factory=dict)
    # When the queue is decided again even if nothing changes.
    queue_due_s: float = 0.0
    queue_decided_s: float = 0.0
    forget_due_s: float = 0.0  # time of the next scan for departed nodes
    # Tenants with a quota of their own; the driver's option holds for all others.
    tenants: Mapping[str, Tenant] = field(default_factory=dict)

    def holder_of(self, node: str) -> Job | None:
        """The job whose attempt holds the node, if any."""
        return next(
            (job for job in self.jobs.values() if job.active and job.slot_of(node) is not None),
            None,
        )


IDLE = Desired()


def candidate(node: Node) -> Candidate:
    """The node in the form that placement uses: name, devices, their kind, switches."""
    kinds = {device.kind for device in node.identity.devices}
    kind = kinds.pop() if len(kinds) == 1 else ""
    devices = tuple(device.index for device in node.identity.devices)
    switch, *above = (node.identity.topology.get(label, "") for label in SWITCH_LABELS)
    return Candidate(node.name, kind, devices, switch, tuple(above) if any(above) else ())


def capacities(nodes: Iterable[Node]) -> list[Capacity]:
    """The nodes that have ever reported devices, in the form that placement uses."""
    return [
        Capacity(candidate(node), max(each.memory_bytes for each in node.identity.devices))
        for node in nodes
        if node.identity.devices
    ]


def usable(node: Node) -> bool:
    """True if a new attempt can use the node: alive, schedulable, and idle by its own report.

    Report and desired state must both be idle. The report may be older than an order to work, and a
    node that was given up may be IDLE by its desired state and still run workers.
    """
    return (
        node.disposition is Disposition.SCHEDULABLE
        and node.liveness is Liveness.ALIVE
        and node.connected
        and node.report is not None
        and node.report.phase is AttemptPhase.IDLE
        and node.desired == IDLE
    )


def promising(node: Node) -> bool:
    """True if the node is usable, or will be once its work has ended or it answers again."""
    return (
        node.disposition is Disposition.SCHEDULABLE
        and node.liveness is not Liveness.DEAD
        and bool(node.identity.devices)
    )


def desired_of(node: Node, job: Job | None) -> Desired:
    """The desired state of ``node``, held by an attempt of ``job`` or idle.

    A node whose agent restarted since the attempt was placed is IDLE: its workers are gone, and the
    attempt is about to end.
    """
    slot = job.slot_of(node.name) if job is not None else None
    if job is None or slot is None or job.phase is JobPhase.STOPPING:
        return IDLE
    if node.identity.incarnation != slot.incarnation:
        return IDLE
    if job.phase is JobPhase.PREPARING:
        return Desired(DesiredPhase.PREPARE, job.name, job.attempt, checks=job.current.checks)
    return Desired(
        DesiredPhase.START,
        job.name,
        job.attempt,
        job.current.store_endpoint,
        job.current.restore,
        job.current.committer_endpoint,
        _profile_on(node.name, job),
        job.current.replica_orders.of(node.name, slot.ranks),
        job.current.failure_count,
        leave_id(job),
    )


def leave_id(job: Job) -> str:
    """Id of the order to save and end; "" without one."""
    leaving = job.current.leaving
    return f"{leaving.kind.lower()}-{leaving.since_s:.3f}" if leaving is not None else ""


def _profile_on(node: str, job: Job) -> ProfileCommand | None:
    """The node's part in the attempt's profile, while traces of its ranks are pending."""
    profile = job.profile
    if profile is None or profile.attempt != job.attempt:
        return None
    ranks = tuple(
        t.rank for t in profile.traces if t.node == node and t.state is TraceState.PENDING
    )
    if not ranks:
        return None
    return ProfileCommand(
        profile.id, profile.first_step, profile.last_step, ranks, profile.not_after_s
    )

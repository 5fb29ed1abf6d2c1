"""Input and output of the core: events, effects, outcomes, lines of the audit log.

Time enters only with events. An effect may fail or be lost with its driver: the core orders it
again as long as the state requires it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from megascale_driver.analysis.divergence import Divergence
from megascale_driver.analysis.group_search import Answer
from megascale_driver.analysis.progress import RankStatus
from megascale_driver.core.values.cluster import AttemptPhase, Identity, Report
from megascale_job.config import CheckpointConfig, JobConfig
from megascale_job.restore import RestorePlan


@dataclass(frozen=True, slots=True)
class LeaderStarted:
    """This driver leads from now on, with the state that it has read from etcd."""

    now_s: float
    address: str


@dataclass(frozen=True, slots=True)
class Silence:
    """A node has been silent for as long as counts; ``incarnation`` is empty if it never linked."""

    node: str
    incarnation: str
    last_beat_s: float


@dataclass(frozen=True, slots=True)
class RankPages:
    """The status pages of a node's ranks by its newest heartbeat, which arrived at ``at_s``."""

    node: str
    incarnation: str
    at_s: float
    statuses: tuple[RankStatus, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. ``steps``: (job, attempt, step) of the newest records since the last tick.

    ``loop_blocked``: the driver's own event loop stood still, so heartbeats may have been waiting
    in its sockets and silence is no evidence for a while. ``records``: those newest records by job.
    ``checkpointing_s``: how long snapshots held up the steps since the last tick, by job.
    ``silent``: the nodes whose silence is to be evaluated now.
    """

    now_s: float
    steps: tuple[tuple[str, int, int], ...] = ()
    loop_blocked: bool = False
    records: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    checkpointing_s: Mapping[str, float] = field(default_factory=dict)
    silent: tuple[Silence, ...] = ()


@dataclass(frozen=True, slots=True)
class PagesRead:
    """Status pages of the nodes of a stalled attempt."""

    now_s: float
    job: str
    attempt: int
    pages: tuple[RankPages, ...]


@dataclass(frozen=True, slots=True)
class NodeHello:
    """A node has opened its link."""

    now_s: float
    node: str
    identity: Identity


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A heartbeat whose evidence differs from that of the last report of its node."""

    now_s: float
    node: str
    incarnation: str
    report: Report


@dataclass(frozen=True, slots=True)
class StreamReset:
    """The node's link broke."""

    now_s: float
    node: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe: ``alive``, ``refused`` (that incarnation is gone) or ``timeout``.

    ``job``, ``attempt``, ``phase``: the work that an agent that is alive reports; None: not known.
    """

    now_s: float
    node: str
    incarnation: str
    outcome: str
    job: str = ""
    attempt: int = 0
    phase: AttemptPhase | None = None


@dataclass(frozen=True, slots=True)
class PlatformReport:
    """The nodes that their platform does not reach, each with the reason in the platform's words.

    ``actor``: who reports it for the platform.
    """

    now_s: float
    unreachable: Mapping[str, str]
    actor: str


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identity of a mutating call: an id that the caller chose and a digest of the request."""

    request_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class _OfJob:
    """Fields that all requests about a job have."""

    now_s: float
    job: str
    reason: str
    actor: str
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class _OfNode:
    """Fields that all requests about a node have."""

    now_s: float
    node: str
    reason: str
    actor: str
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A validated job."""

    now_s: float
    config: JobConfig
    actor: str
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class CancelRequested(_OfJob):
    """A client asked to cancel the job."""


@dataclass(frozen=True, slots=True)
class SuspendRequested(_OfJob):
    """A client asked that the job save its state and free its nodes until it is resumed."""


@dataclass(frozen=True, slots=True)
class ResumeRequested(_OfJob):
    """A client asked that a suspended job get nodes again."""


@dataclass(frozen=True, slots=True)
class DeleteRequested(_OfJob):
    """A client asked to forget an ended job."""


@dataclass(frozen=True, slots=True)
class EvictRequested(_OfNode):
    """An operator asked to quarantine the node; unless ``now``, its job saves first."""

    now: bool = True


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """A client asked for a new attempt.

    ``from_step``: the complete checkpoint to go back to; None: the newest state. ``from_attempt``
    wrote it; 0: not known. ``later_steps``: checkpoints above it or written after it, which become
    invalid.
    """

    now_s: float
    job: str
    reason: str
    actor: str
    from_step: int | None = None
    from_attempt: int = 0
    later_steps: tuple[int, ...] = ()
    now: bool = False
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class UpdateRequested:
    """A client gave a job a new, validated configuration.

    ``restart``: its next attempt begins as soon as the current one has saved.
    """

    now_s: float
    config: JobConfig
    restart: bool
    reason: str
    actor: str
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class DrainRequested(_OfNode):
    """An operator asked to empty the node; its job saves first."""


@dataclass(frozen=True, slots=True)
class PolicyRequested:
    """An operator asked to have a rule observed or enforced."""

    now_s: float
    rule: str
    mode: str
    reason: str
    actor: str
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class QuotaRequested:
    """An operator set the devices that a tenant's jobs may hold; None: the driver's default."""

    now_s: float
    tenant: str
    devices: int | None
    reason: str
    actor: str
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class BreakerResetRequested:
    """An operator asked to enforce inferred verdicts again."""

    now_s: float
    reason: str
    actor: str
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class CordonRequested(_OfNode):
    """An operator asked to keep new work off the node."""


@dataclass(frozen=True, slots=True)
class UncordonRequested(_OfNode):
    """An operator asked to give a cordoned or quarantined node work again."""


@dataclass(frozen=True, slots=True)
class ProfileRequested:
    """A client asked for a profile of a running job.

    ``first_step`` 0: the first step that all ranks can be notified of in time. ``newest_step`` and
    ``step_time_s`` are those of the attempt's newest step record; 0 if there is none.
    """

    now_s: float
    job: str
    first_step: int
    steps: int
    ranks: tuple[int, ...]
    newest_step: int
    step_time_s: float
    reason: str
    actor: str
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class ProfileCancelRequested(_OfJob):
    """A client asked to give up the job's profile in progress."""


Mutation = (
    JobSubmitted
    | CancelRequested
    | SuspendRequested
    | ResumeRequested
    | DeleteRequested
    | RestartRequested
    | UpdateRequested
    | DrainRequested
    | PolicyRequested
    | QuotaRequested
    | BreakerResetRequested
    | EvictRequested
    | CordonRequested
    | UncordonRequested
    | ProfileRequested
    | ProfileCancelRequested
)


@dataclass(frozen=True, slots=True)
class AttemptOpened:
    """The committer, at ``committer_endpoint``, has opened the attempt.

    ``refused``: newer checkpoints that are damaged, each with the reason.
    """

    now_s: float
    job: str
    attempt: int
    restore: RestorePlan
    committer_endpoint: str
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """The committer could not open the attempt.

    ``refused``: it evaluated the request and refused it, so calling again changes nothing.
    ``newest``: the newest attempt in the commit log, which the job has to continue behind; 0: none.
    """

    now_s: float
    job: str
    attempt: int
    error: str
    refused: bool = False
    newest: int = 0


@dataclass(frozen=True, slots=True)
class MessageRefused:
    """A heartbeat or step record was dropped: implausible, or not readable by this build.

    ``subject``: the node that sent it, or the job that it is about.
    """

    now_s: float
    subject: str
    problem: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of a detector in an attempt of a job; each kind adds its own fields."""

    now_s: float
    job: str
    attempt: int


@dataclass(frozen=True, slots=True)
class CheckCompared:
    """A target of a node FAILED a comparison with the fleet, or passed one after that.

    ``origin``: the attempt (JOB/NUMBER) whose checks measured it, which each new leader gets again;
    "" on demand.
    """

    now_s: float
    node: str
    check: str
    target: str
    failed: bool
    detail: str
    origin: str = ""


@dataclass(frozen=True, slots=True)
class GroupChecked:
    """Group ``group`` of a round of checks has answered; ``details``: its nodes in words."""

    now_s: float
    job: str
    attempt: int
    round: int
    group: int
    answers: Mapping[str, Answer]
    details: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LossDiverged:
    """The step records of a job show that it diverges."""

    now_s: float
    job: str
    found: Divergence


@dataclass(frozen=True, slots=True)
class StragglerFound(Finding):
    """Spans of an attempt show a slow node; ``rank`` is its slowest one."""

    node: str
    rank: int
    operation: str
    ratio: float
    sentence: str


@dataclass(frozen=True, slots=True)
class PlanCompared(Finding):
    """Measured steps compared with the plan; ``slower_by``: a term, "" if as planned."""

    slower_by: str
    sentence: str
    first_step: int
    last_step: int
    hardware: str


@dataclass(frozen=True, slots=True)
class TrafficStood(Finding):
    """No byte moves between the nodes of an attempt whose ranks wait; ``pages`` are the newest.

    ``limit_s``: the time without a completed step that this takes.
    """

    limit_s: float
    sentence: str
    pages: tuple[RankPages, ...]


@dataclass(frozen=True, slots=True)
class TrafficChanged(Finding):
    """The traffic of an attempt has declined, fluctuates, or cannot be watched.

    ``kind``: decline, fluctuation or unseen. ``nodes``: the affected ones; empty: all.
    """

    kind: str
    source: str
    sentence: str
    nodes: tuple[str, ...] = ()


Event = (
    LeaderStarted
    | Tick
    | NodeHello
    | NodeReport
    | PagesRead
    | StreamReset
    | ProbeResult
    | PlatformReport
    | Mutation
    | AttemptOpened
    | OpenFailed
    | GroupChecked
    | CheckCompared
    | LossDiverged
    | Finding
    | MessageRefused
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact behind a decision: its kind, its source, a digest, and where to read more."""

    kind: str
    source: str
    digest: str = ""
    uri: str = ""


def utc(at_s: float, now_s: float = 0.0) -> str:
    """A time in UTC as the driver's texts show it, with the date unless that is ``now_s``'s."""
    moment, now = (datetime.fromtimestamp(each, UTC) for each in (at_s, now_s or at_s))
    day = "" if moment.date() == now.date() else "%Y-%m-%d "
    return moment.strftime(f"{day}%H:%M:%SZ")


def listed(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """The first ``most`` names as the driver's texts have them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more


@dataclass(frozen=True, slots=True)
class Audit:
    """A line of the audit log; ``log``: the job in whose log it is, empty: the cluster's log."""

    log: str
    seq: int
    at_s: float
    actor: str
    subject: str
    reason: str  # a Reason; one that another build wrote may be unknown here
    message: str
    policy: str = ""
    mode: str = "ENFORCE"
    attempt: int = 0
    evidence: tuple[Evidence, ...] = ()
    outcome: str = ""


@dataclass(frozen=True, slots=True)
class OpenAttempt:
    """Have the committer, the daemon of ``node``, open the attempt and choose what to restore."""

    job: str
    attempt: int
    node: str
    endpoint: str
    checkpoint: CheckpointConfig
    world_size: int
    sealed_step: int
    sealed_by_attempt: int
    refused_steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Probe:
    """Probe the node's port."""

    node: str
    incarnation: str
    endpoint: str


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A node of a group that is checked, with its devices that take part."""

    node: str
    incarnation: str
    endpoint: str
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CheckGroup:
    """Have the members all-reduce a known payload together; the answer is a GroupChecked."""

    job: str
    attempt: int
    round: int
    group: int
    members: tuple[GroupMember, ...]


Effect = OpenAttempt | Probe | CheckGroup


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one event besides the new state.

    ``commanded``: nodes whose desired state must be sent. ``refusal``: why the request was refused;
    empty if it was carried out. ``refusal_detail``: a sentence with the numbers of this case; empty
    where the reason is enough.
    """

    effects: tuple[Effect, ...] = ()
    commanded: tuple[str, ...] = ()
    audit: tuple[Audit, ...] = ()
    refusal: str = ""
    refusal_detail: str = ""

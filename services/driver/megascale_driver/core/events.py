"""What goes into the core and what comes out of it. Time enters only in events.

Effects are asked for, not guaranteed: each is repeated by the core as long as the state still wants
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megascale_common.job.config import JobConfig
from megascale_common.job.restore import RestorePlan
from megascale_driver.core.state import Identity, Report

# Every reason that a line of the audit log may carry; docs/operations.md says for each what to do.
Reason = Literal[
    "LEADER_ELECTED",
    "SUBMITTED",
    "PLACED",
    "ATTEMPT_PREPARING",
    "ATTEMPT_OPENED",
    "ATTEMPT_STARTED",
    "ATTEMPT_STOPPED",
    "WORKER_EXITED",
    "HANG_SUSPECTED",
    "SPARE_ASSIGNED",
    "CHECKPOINT_COMMITTED",
    "CHECKPOINT_REFUSED",
    "PROFILE_REQUESTED",
    "PROFILE_WRITTEN",
    "PROFILE_MISSED",
    "CANCEL_REQUESTED",
    "JOB_SUCCEEDED",
    "JOB_FAILED",
    "JOB_CANCELLED",
    "NODE_JOINED",
    "NODE_RESTARTED",
    "NODE_SUSPECT",
    "NODE_DEAD",
    "NODE_EVICTED",
    "NODE_CORDONED",
    "NODE_UNCORDONED",
    "BREAKER_TRIPPED",
    "BREAKER_RESET",
]


@dataclass(frozen=True, slots=True)
class LeaderStarted:
    """This driver leads from now on; the state was just read from etcd."""

    now_s: float
    address: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. ``steps`` holds (job, attempt, step) of the newest records since the last
    tick.

    ``loop_blocked`` says that the driver itself stood still, so silence of others proves nothing
    for a while.
    """

    now_s: float
    steps: tuple[tuple[str, int, int], ...] = ()
    loop_blocked: bool = False


@dataclass(frozen=True, slots=True)
class NodeHello:
    """A node has opened its link."""

    now_s: float
    node: str
    identity: Identity


@dataclass(frozen=True, slots=True)
class NodeReport:
    """A heartbeat."""

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
    """Answer to a probe: ``alive``, ``refused`` (nobody listens on its port) or ``timeout``."""

    now_s: float
    node: str
    incarnation: str
    outcome: str


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identity of a mutating call: an id chosen by the caller and a digest of what it asks."""

    request_id: str
    digest: str


@dataclass(frozen=True, slots=True)
class JobSubmitted:
    """A validated job."""

    now_s: float
    config: JobConfig
    actor: str
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """Someone wants the job stopped."""

    now_s: float
    job: str
    reason: str
    actor: str
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class EvictRequested:
    """Someone wants the node quarantined."""

    now_s: float
    node: str
    reason: str
    actor: str
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class CordonRequested:
    """Someone wants the node to get no new work."""

    now_s: float
    node: str
    reason: str
    actor: str
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class UncordonRequested:
    """Someone wants a cordoned or quarantined node to get work again."""

    now_s: float
    node: str
    reason: str
    actor: str
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class ProfileRequested:
    """Someone wants a profile of a running job. ``first_step`` 0: the nearest that all ranks hear
    of in time.

    ``newest_step`` and ``step_time_s`` are those of the attempt's newest step record; 0 where there
    is none.
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


Mutation = (
    JobSubmitted
    | CancelRequested
    | EvictRequested
    | CordonRequested
    | UncordonRequested
    | ProfileRequested
)


@dataclass(frozen=True, slots=True)
class AttemptOpened:
    """The committer, at ``committer_endpoint``, has opened the attempt. ``refused`` names what was
    passed over.
    """

    now_s: float
    job: str
    attempt: int
    restore: RestorePlan
    committer_endpoint: str
    refused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenFailed:
    """The committer could not open the attempt."""

    now_s: float
    job: str
    attempt: int
    error: str


Event = (
    LeaderStarted
    | Tick
    | NodeHello
    | NodeReport
    | StreamReset
    | ProbeResult
    | Mutation
    | AttemptOpened
    | OpenFailed
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact behind a decision: its kind, where it comes from, what it says, and where to read
    it.
    """

    kind: str
    source: str
    digest: str = ""
    uri: str = ""


@dataclass(frozen=True, slots=True)
class Audit:
    """A line of the audit log. ``log`` is the job whose log it stands in; empty: the cluster's own
    log.
    """

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
    """Ask the committer, the daemon of ``node``, to open the attempt and to say what is restored."""

    job: str
    attempt: int
    node: str
    endpoint: str
    uri: str
    world_size: int
    sealed_step: int
    sealed_by_attempt: int
    refused_steps: tuple[int, ...]
    load_uri: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """Ask the node whether it is there."""

    node: str
    incarnation: str
    endpoint: str


Effect = OpenAttempt | Probe


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one event led to beside the new state. ``commanded``: nodes whose desired state must be
    sent.

    ``refusal``: the request was refused, and why; empty when it was carried out.
    ``refusal_detail``: in words, where the word alone does not say it.
    """

    effects: tuple[Effect, ...] = ()
    commanded: tuple[str, ...] = ()
    audit: tuple[Audit, ...] = ()
    refusal: str = ""
    refusal_detail: str = ""

"""The enums and messages that the client returns; docs/api.md describes every field.

Each class is a view (:mod:`megascale_client.views`) of the message of the same name in
``megascale.v1``. A test compares fields, types and values with the protos.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from google.protobuf import duration_pb2, timestamp_pb2

from megascale.v1 import driver_pb2, job_pb2, types_pb2
from megascale_client.views import NamedEnum, View

__all__ = [
    "TERMINAL_PHASES",
    "CheckResult",
    "CheckVerdict",
    "CordonNodeResponse",
    "Device",
    "DeviceKind",
    "DrainNodeResponse",
    "EvictNodeResponse",
    "Job",
    "JobCondition",
    "JobConditionType",
    "JobPhase",
    "Node",
    "NodeAssignment",
    "NodeDisposition",
    "NodeLiveness",
    "PolicyMode",
    "PolicyRule",
    "Profile",
    "RestartJobResponse",
    "RestoreSource",
    "ResumeJobResponse",
    "SetPolicyResponse",
    "SuspendJobResponse",
    "Trace",
    "TraceState",
    "UncordonNodeResponse",
    "UpdateJobResponse",
    "WatchJobResponse",
]


class CheckVerdict(NamedEnum):
    """Verdict of a check.

    SKIPPED is never PASS.
    """

    UNSPECIFIED = 0
    # In order.
    PASS = 1
    # It works, but worse than it should.
    DEGRADED = 2
    # Not fit for work.
    FAIL = 3
    # Not run; the detail has the reason.
    SKIPPED = 4


class DeviceKind(NamedEnum):
    """Kind of a device."""

    UNSPECIFIED = 0
    # A slot on the CPU that runs one rank.
    CPU = 1
    # An NVIDIA GPU.
    CUDA = 2


class JobConditionType(NamedEnum):
    """What a condition of a job is about."""

    UNSPECIFIED = 0
    # The job has succeeded, but the state after its last step is not in a checkpoint.
    NOT_SAVED = 1
    # The newest checkpoint was not saved, or the storage does not answer; training goes on.
    CHECKPOINT_FAILING = 2


class JobPhase(NamedEnum):
    """Phase of a job."""

    UNSPECIFIED = 0
    # Waits for nodes.
    QUEUED = 1
    # Nodes reserve devices, check themselves and report endpoints.
    PREPARING = 2
    # Workers start, meet and restore.
    STARTING = 3
    # All workers train.
    RUNNING = 4
    # Workers of the attempt are being stopped.
    STOPPING = 5
    # All steps are completed, and the last one is saved where the job has checkpoints.
    SUCCEEDED = 6
    # Given up; phase_reason has the last failure.
    FAILED = 7
    # Cancelled on request.
    CANCELLED = 8
    # Has saved and left its nodes on request; runs again after ResumeJob.
    SUSPENDED = 9


class NodeAssignment(NamedEnum):
    """What a node is used for."""

    UNSPECIFIED = 0
    # Nothing.
    IDLE = 1
    # It stands by for a job.
    SPARE = 2
    # It runs ranks of a job.
    ACTIVE = 3


class NodeDisposition(NamedEnum):
    """Whether a node may be given work."""

    UNSPECIFIED = 0
    # It may.
    SCHEDULABLE = 1
    # It gets no new work; what runs there continues.
    CORDONED = 2
    # Reserved: no call sets it yet.
    DRAINING = 3
    # Its work has moved away, and it gets none until it is uncordoned.
    QUARANTINED = 4


class NodeLiveness(NamedEnum):
    """Whether a node is there."""

    UNSPECIFIED = 0
    # Not connected since the driver began to lead.
    UNKNOWN = 1
    # Its heartbeats arrive.
    ALIVE = 2
    # No heartbeat for 8 s; the driver probes it.
    SUSPECT = 3
    # Its process is gone, or it has been silent for too long.
    DEAD = 4


class PolicyMode(NamedEnum):
    """Whether the verdicts of a rule take effect."""

    # Not a mode.
    UNSPECIFIED = 0
    # Verdicts take effect.
    ENFORCE = 1
    # Verdicts are only written to the audit log.
    OBSERVE = 2


class RestoreSource(NamedEnum):
    """Where restored state came from."""

    UNSPECIFIED = 0
    # Nothing is restored: training starts at the first step.
    NONE = 1
    # Staging memory of the same nodes.
    MEMORY = 2
    # A complete checkpoint on storage.
    STORAGE = 3


class TraceState(NamedEnum):
    """State of the trace of a rank."""

    UNSPECIFIED = 0
    # Its steps are ahead or in progress, or the file is being written.
    PENDING = 1
    # The file is there.
    WRITTEN = 2
    # The rank did not begin: the request arrived too late, its first step was not reached in time,
    # or the profile was cancelled.
    SKIPPED = 3
    # The profiler failed, or the file could not be written.
    FAILED = 4
    # The attempt ended first, or the node has not reported in time.
    LOST = 5


class Trace(View, of=driver_pb2.Trace):
    """The trace of one rank: gzipped Chrome JSON, which Perfetto reads."""

    proto: driver_pb2.Trace
    rank: int
    node: str
    path: str
    state: TraceState
    size_bytes: int
    detail: str


class Profile(View, of=driver_pb2.Profile):
    """A profile of some steps of one attempt: one trace for each chosen rank."""

    proto: driver_pb2.Profile
    id: str
    attempt: int
    first_step: int
    last_step: int
    not_after: timestamp_pb2.Timestamp
    traces: Sequence[Trace]


class JobCondition(View, of=driver_pb2.JobCondition):
    """Something about a job beside its phase."""

    proto: driver_pb2.JobCondition
    type: JobConditionType
    reason: str
    message: str
    since: timestamp_pb2.Timestamp


class Job(View, of=driver_pb2.Job):
    """A job as the driver holds it."""

    proto: driver_pb2.Job
    spec: job_pb2.JobSpec
    spec_revision: int
    etag: str
    phase: JobPhase
    phase_reason: str
    attempt: int
    nodes: Sequence[str]
    spare_nodes: Sequence[str]
    evicted_nodes: Sequence[str]
    step: int
    restored_step: int
    restore_source: RestoreSource
    committed_step: int
    restarts: int
    created_at: timestamp_pb2.Timestamp
    updated_at: timestamp_pb2.Timestamp
    last_record: types_pb2.StepRecord
    profile: Profile
    conditions: Sequence[JobCondition]
    goodput: driver_pb2.Goodput
    replicated_step: int
    replica_problem: str
    committed_at: timestamp_pb2.Timestamp
    placement: driver_pb2.Placement
    plan: driver_pb2.PlanComparison
    last_evaluation: types_pb2.StepRecord
    typical_step_time: duration_pb2.Duration


class WatchJobResponse(View, of=driver_pb2.WatchJobResponse):
    """What the call returns."""

    proto: driver_pb2.WatchJobResponse
    resume_token: str
    job: Job
    step: types_pb2.StepRecord
    event: types_pb2.Event
    note: str


class Device(View, of=types_pb2.Device):
    """One device of a node; for CPU nodes, one slot that runs one rank."""

    proto: types_pb2.Device
    index: int
    kind: DeviceKind
    uuid: str
    model: str
    memory_bytes: int


class CheckResult(View, of=types_pb2.CheckResult):
    """Result of one self-check."""

    proto: types_pb2.CheckResult
    name: str
    target: str
    verdict: CheckVerdict
    detail: str
    elapsed: duration_pb2.Duration
    value: float
    unit: str
    target_class: str
    baseline: float
    z: float
    baseline_source: str
    tools: Mapping[str, str]


class Node(View, of=driver_pb2.Node):
    """A node as the driver holds it, on its three axes: disposition, liveness, assignment."""

    proto: driver_pb2.Node
    name: str
    disposition: NodeDisposition
    liveness: NodeLiveness
    assignment: NodeAssignment
    disposition_reason: str
    devices: Sequence[Device]
    topology: Mapping[str, str]
    incarnation: str
    executor_endpoint: str
    checkpoint_endpoint: str
    job: str
    ranks: Sequence[int]
    last_heartbeat_at: timestamp_pb2.Timestamp
    checks: Sequence[CheckResult]
    liveness_reason: str


class EvictNodeResponse(View, of=driver_pb2.EvictNodeResponse):
    """What the call returns."""

    proto: driver_pb2.EvictNodeResponse
    node: Node
    consequence: str


class SuspendJobResponse(View, of=driver_pb2.SuspendJobResponse):
    """What the call returns."""

    proto: driver_pb2.SuspendJobResponse
    job: Job
    consequence: str


class ResumeJobResponse(View, of=driver_pb2.ResumeJobResponse):
    """What the call returns."""

    proto: driver_pb2.ResumeJobResponse
    job: Job
    consequence: str


class RestartJobResponse(View, of=driver_pb2.RestartJobResponse):
    """What the call returns."""

    proto: driver_pb2.RestartJobResponse
    job: Job
    consequence: str


class UpdateJobResponse(View, of=driver_pb2.UpdateJobResponse):
    """What the call returns."""

    proto: driver_pb2.UpdateJobResponse
    job: Job
    consequence: str
    changed_fields: Sequence[str]
    warnings: Sequence[str]


class DrainNodeResponse(View, of=driver_pb2.DrainNodeResponse):
    """What the call returns."""

    proto: driver_pb2.DrainNodeResponse
    node: Node
    consequence: str


class PolicyRule(View, of=driver_pb2.PolicyRule):
    """A rule of the driver, and how it is applied."""

    proto: driver_pb2.PolicyRule
    name: str
    mode: PolicyMode
    effect: str


class SetPolicyResponse(View, of=driver_pb2.SetPolicyResponse):
    """What the call returns."""

    proto: driver_pb2.SetPolicyResponse
    rule: PolicyRule
    consequence: str


class CordonNodeResponse(View, of=driver_pb2.CordonNodeResponse):
    """What the call returns."""

    proto: driver_pb2.CordonNodeResponse
    node: Node
    consequence: str


class UncordonNodeResponse(View, of=driver_pb2.UncordonNodeResponse):
    """What the call returns."""

    proto: driver_pb2.UncordonNodeResponse
    node: Node
    consequence: str


TERMINAL_PHASES = frozenset({JobPhase.SUCCEEDED, JobPhase.FAILED, JobPhase.CANCELLED})


PACE_STEPS = 50  # the newest, of whose times the driver takes the median


def remaining_s(job: Job) -> float | None:
    """Seconds to the last step at the median time of the newest steps; None while not RUNNING.

    The driver sends the median; right after it began to lead it knows no step but the newest.
    Faults to come are not in it: goodput says what they have cost so far.
    """
    known = job.HasField("typical_step_time")
    step_time = job.typical_step_time if known else job.last_record.step_time
    left = job.spec.trainer.training.steps - job.step
    if job.phase != JobPhase.RUNNING or left < 0 or not step_time.ToNanoseconds():
        return None
    return left * step_time.ToNanoseconds() / 1e9

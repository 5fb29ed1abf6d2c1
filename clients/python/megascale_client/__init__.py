"""The Python client of megascale: submit, watch and control training jobs.

Messages are those of ``megascale.v1``, with enums by name (:mod:`megascale_client.messages`).
"""

from megascale_client.client import AsyncClient
from megascale_client.errors import (
    AlreadyExists,
    ClusterNotFound,
    DamagedCheckpoint,
    FieldProblem,
    InvalidJob,
    InvalidRequest,
    LimitReached,
    MegascaleError,
    NotAllowed,
    NotFound,
    NotPossible,
    ServiceFailure,
    TimedOut,
    Unavailable,
)
from megascale_client.fetch import FetchedCheckpoint
from megascale_client.job_file import load_job
from megascale_client.messages import (
    TERMINAL_PHASES,
    CheckResult,
    CheckVerdict,
    Device,
    DeviceKind,
    Job,
    JobCondition,
    JobConditionType,
    JobPhase,
    Node,
    NodeAssignment,
    NodeDisposition,
    NodeLiveness,
    PolicyMode,
    Profile,
    RestartJobResponse,
    RestoreSource,
    ResumeJobResponse,
    SetPolicyResponse,
    SuspendJobResponse,
    Trace,
    TraceState,
)
from megascale_client.run_folder import find_run_folder
from megascale_client.spec import parse_job
from megascale_client.spec_values import dump_job, job_values
from megascale_client.sync import Client

__all__ = [
    "TERMINAL_PHASES",
    "AlreadyExists",
    "AsyncClient",
    "CheckResult",
    "CheckVerdict",
    "Client",
    "ClusterNotFound",
    "DamagedCheckpoint",
    "Device",
    "DeviceKind",
    "FetchedCheckpoint",
    "FieldProblem",
    "InvalidJob",
    "InvalidRequest",
    "Job",
    "JobCondition",
    "JobConditionType",
    "JobPhase",
    "LimitReached",
    "MegascaleError",
    "Node",
    "NodeAssignment",
    "NodeDisposition",
    "NodeLiveness",
    "NotAllowed",
    "NotFound",
    "NotPossible",
    "PolicyMode",
    "Profile",
    "RestartJobResponse",
    "RestoreSource",
    "ResumeJobResponse",
    "ServiceFailure",
    "SetPolicyResponse",
    "SuspendJobResponse",
    "TimedOut",
    "Trace",
    "TraceState",
    "Unavailable",
    "dump_job",
    "find_run_folder",
    "job_values",
    "load_job",
    "parse_job",
]

"""The Python client of megascale: submit, watch and control training jobs.

Messages are those of ``megascale.v1``.
"""

from megascale_client.client import TERMINAL_PHASES, AsyncClient
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
    Unavailable,
)
from megascale_client.fetch import FetchedCheckpoint
from megascale_client.run_folder import find_run_folder
from megascale_client.spec import load_job, parse_job
from megascale_client.sync import Client

__all__ = [
    "TERMINAL_PHASES",
    "AlreadyExists",
    "AsyncClient",
    "Client",
    "ClusterNotFound",
    "DamagedCheckpoint",
    "FetchedCheckpoint",
    "FieldProblem",
    "InvalidJob",
    "InvalidRequest",
    "LimitReached",
    "MegascaleError",
    "NotAllowed",
    "NotFound",
    "NotPossible",
    "ServiceFailure",
    "Unavailable",
    "find_run_folder",
    "load_job",
    "parse_job",
]

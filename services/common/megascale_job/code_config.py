"""The sections of a job on its own code and on what its processes run in. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megascale_job.stored import ADDED


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeConfig:
    """Code of the job's own: a folder, or an artifact on storage (both "": what is installed).

    ``sha256`` is the digest of the folder, if one is given, or of the artifact.
    """

    path: str = ""
    sha256: str = ""
    uri: str = field(default="", metadata=ADDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentConfig:
    """What the job's processes run in: interpreter or locked requirements, secrets, account.

    ``secrets`` maps a variable's name to a reference, never to a value.
    """

    python: str = ""
    requirements: str = ""
    secrets: Mapping[str, str] = field(default_factory=dict)
    run_as: str = ""

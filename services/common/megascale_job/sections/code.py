"""A job's sections ``code`` and ``environment``, and their checks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megascale_job.problems import JobProblem
from megascale_job.sections.fields import ADDED, MAX_PATH, removed

ARTIFACT_ENDS = (".whl", ".tar.gz")
MAX_SECRETS = 32  # per job, because they are resolved at every start
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]{0,31}")
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,127}")
_REFERENCE = re.compile(r"(file:[A-Za-z0-9_][A-Za-z0-9._-]{0,127}|env:[A-Z_][A-Z0-9_]{0,127})")
_ACCOUNT = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
# Variables that decide how a process starts; only the agent may set them.
_NOT_SECRETS = re.compile(r"(PATH|HOME|USER|LOGNAME|(PYTHON|LD_|MEGASCALE_).*)")

NO_REQUIREMENTS = (
    "put the packages into the nodes' container image or the job's code (code.path, code.uri), or "
    "name an interpreter that has them (environment.python)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeConfig:
    """The job's own code: a folder, or an artifact on storage (both "": the installed code).

    ``sha256`` is the digest of the folder, if one is given, or of the artifact.
    """

    path: str = ""
    sha256: str = ""
    uri: str = field(default="", metadata=ADDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentConfig:
    """Surroundings of the job's processes: interpreter, secrets, account.

    ``secrets`` maps a variable's name to a reference, never to a value. ``requirements`` was
    removed: only a job that an earlier build stored can have it, and no node starts such a job.
    """

    python: str = ""
    requirements: str = field(default="", metadata=removed(NO_REQUIREMENTS))
    secrets: Mapping[str, str] = field(default_factory=dict)
    run_as: str = ""


def code_problems(code: CodeConfig, environment: EnvironmentConfig) -> Iterator[JobProblem]:
    """Problems of the sections ``code`` and ``environment``."""
    yield from _code(code)
    yield from _artifact(code)
    yield from _interpreter(environment)
    yield from _secrets(environment)


def _code(code: CodeConfig) -> Iterator[JobProblem]:
    if code.path and not code.path.startswith("/"):
        yield JobProblem(
            "code.path", f"{code.path!r} is relative", "give an absolute path that all nodes see"
        )
    if ":" in code.path:
        yield JobProblem("code.path", f"{code.path!r} has a colon", "give one folder")
    if code.sha256 and not _SHA256.fullmatch(code.sha256):
        yield JobProblem(
            "code.sha256", f"{code.sha256!r} is not a digest", "give 64 digits of 0-9 and a-f"
        )
    if code.sha256 and not code.path and not code.uri:
        yield JobProblem(
            "code.path", "empty although code.sha256 is set", "give the folder that has the code"
        )


def _artifact(code: CodeConfig) -> Iterator[JobProblem]:
    if not code.uri:
        return
    scheme, _, rest = code.uri.partition("://") if "://" in code.uri else ("", "", code.uri)
    if len(code.uri) > MAX_PATH:
        yield JobProblem("code.uri", "too long", f"use at most {MAX_PATH} characters")
    elif scheme in ("http", "https", "ftp") or (scheme and not _SCHEME.fullmatch(scheme)):
        yield JobProblem(
            "code.uri",
            f"{scheme}:// is no storage",
            "use a file on one: `megascale code push` prints its address",
        )
    elif scheme in ("", "file") and not rest.startswith("/"):
        yield JobProblem(
            "code.uri", f"{code.uri!r} is relative", "give an absolute path that all nodes see"
        )
    elif not code.uri.endswith(ARTIFACT_ENDS):
        yield JobProblem(
            "code.uri",
            f"{code.uri!r} is neither a wheel nor a packed folder",
            f"give a file that ends with {' or '.join(ARTIFACT_ENDS)}",
        )
    if not code.sha256:
        yield JobProblem(
            "code.sha256", "empty although code.uri is set", "give the SHA-256 of the artifact"
        )
    if code.path:
        yield JobProblem("code.uri", "set together with code.path", "give one of them")


def _interpreter(environment: EnvironmentConfig) -> Iterator[JobProblem]:
    python = environment.python
    if len(python) > MAX_PATH or "\0" in python:
        yield JobProblem("environment.python", "no path", f"use at most {MAX_PATH} characters")
    if python and not python.startswith("/"):
        yield JobProblem(
            "environment.python", f"{python!r} is relative", "give an absolute path on all nodes"
        )


def _secrets(environment: EnvironmentConfig) -> Iterator[JobProblem]:
    if len(environment.secrets) > MAX_SECRETS:
        yield JobProblem(
            "environment.secrets",
            f"{len(environment.secrets)} variables",
            f"give at most {MAX_SECRETS}",
        )
        return
    for name, reference in environment.secrets.items():
        if not _VARIABLE.fullmatch(name) or _NOT_SECRETS.fullmatch(name):
            yield JobProblem(
                "environment.secrets",
                f"{name[:128]!r} cannot be set",
                "use A-Z, 0-9 and _, and no variable that decides how processes start "
                "(PATH, PYTHON..., LD_..., MEGASCALE_...)",
            )
        # The value is not shown, because it may be the secret itself.
        if not _REFERENCE.fullmatch(reference):
            yield JobProblem(
                f"environment.secrets.{name[:128]}",
                "is not a reference (its text is not repeated here)",
                "give file:NAME or env:NAME, which the nodes resolve, and never the value",
            )
    if environment.run_as and not _ACCOUNT.fullmatch(environment.run_as):
        yield JobProblem(
            "environment.run_as",
            f"{environment.run_as[:64]!r} is not the name of an account",
            "give one that the agents were started with (--run-as)",
        )

"""Inputs of a job that its specification only refers to: its own code, and its secrets.

Code is a folder that its processes search first for modules. Because the template process imports
modules ahead of need, one template serves one code only. The digest of the
folder identifies the code: if files change under the same path, the next attempt starts with a new
template.

A job names its secrets by variable and reference. The values are on the node, in a folder or in
variables of the agent. The agent reads them when it prepares an attempt, and passes them only to
the job's processes, in their environment.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from megascale_common.service.errors import AssignmentError
from megascale_job.config import CodeConfig

MAX_FILES = 20_000
MAX_BYTES = 1 << 30
_LEFT_OUT = frozenset({"__pycache__", ".git"})


@dataclass(frozen=True, slots=True)
class JobCode:
    """The folder and its digest; both are empty for what is installed on the node."""

    path: str = ""
    digest: str = ""

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables in addition to the agent's."""
        if not self.path:
            return {}
        others = os.environ.get("PYTHONPATH", "")
        return {
            "PYTHONPATH": f"{self.path}{os.pathsep}{others}" if others else self.path,
            # Python checks a compiled file by size and second only, so an edit within a second
            # could go unnoticed: none are written.
            "PYTHONDONTWRITEBYTECODE": "1",
        }


INSTALLED = JobCode()


async def find(config: CodeConfig) -> JobCode:
    """The code of a job, with the digest of its present files.

    Raises:
        AssignmentError: the folder cannot be read, is too large, or has another digest.
    """
    if not config.path:
        return INSTALLED
    try:
        found = await asyncio.to_thread(digest, Path(config.path))
    except OSError as error:
        raise AssignmentError(
            f"code.path {config.path} cannot be read on this node: {error}; give a folder that all "
            "nodes see"
        ) from error
    if config.sha256 and found != config.sha256:
        raise AssignmentError(
            f"code.path {config.path} has the digest {found} on this node, and code.sha256 is "
            f"{config.sha256}: copy the same files to all nodes, or update the job"
        )
    return JobCode(config.path, found)


def digest(folder: Path) -> str:
    """SHA-256 over the names and contents of all files, in the order of their names.

    Compiled files and the history of git are left out.

    Raises:
        OSError: a file cannot be read.
        AssignmentError: there are too many files, or they are too large.
    """
    whole = hashlib.sha256()
    count, size_bytes = 0, 0
    if not folder.is_dir():
        raise NotADirectoryError(20, "not a folder", str(folder))
    for place, names, files in os.walk(folder, onerror=_raise):
        names[:] = sorted(name for name in names if name not in _LEFT_OUT)
        for name in sorted(files):
            path = Path(place) / name
            content = path.read_bytes() if path.is_file() else b""
            count, size_bytes = count + 1, size_bytes + len(content)
            if count > MAX_FILES or size_bytes > MAX_BYTES:
                raise AssignmentError(
                    f"code.path {folder} has more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB: "
                    "give a folder with code alone"
                )
            where = os.fsencode(path.relative_to(folder))
            whole.update(len(where).to_bytes(8, "big") + where)
            whole.update(hashlib.sha256(content).digest())
    return whole.hexdigest()


def _raise(error: OSError) -> None:
    raise error


VARIABLE_PREFIX = "MEGASCALE_SECRET_"
MAX_VALUE_BYTES = 16 << 10  # of a secret: a key or a token; the kernel bounds an environment


def take_variables(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Remove the secrets from the agent's variables, so that no child inherits them; by name."""
    found = [name for name in environment if name.startswith(VARIABLE_PREFIX)]
    return {name.removeprefix(VARIABLE_PREFIX): environment.pop(name) for name in found}


def resolve(
    references: Mapping[str, str], folder: Path | None, variables: Mapping[str, str]
) -> dict[str, str]:
    """The values of ``references``, by the names of the job's variables.

    Raises:
        AssignmentError: this node does not have one; the text names the reference.
    """
    return {
        name: _value(f"environment.secrets.{name}", reference, folder, variables)
        for name, reference in references.items()
    }


def _value(field: str, reference: str, folder: Path | None, variables: Mapping[str, str]) -> str:
    kind, _, name = reference.partition(":")
    if kind == "env":
        if name not in variables:
            raise AssignmentError(
                f"{field}: the agent of this node was started without {VARIABLE_PREFIX}{name}"
            )
        return _checked(field, variables[name])

    if folder is None:
        raise AssignmentError(
            f"{field}: the agent of this node was started without --secrets-folder"
        )
    # Kubernetes shows the files of a secret as links within their folder.
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise AssignmentError(f"{field}: {name} leads out of --secrets-folder")
    try:
        # O_NONBLOCK, because opening a pipe would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise AssignmentError(f"{field}: {name} in --secrets-folder is not a plain file")
            value = file.read(MAX_VALUE_BYTES + 1)
    except OSError as error:
        raise AssignmentError(
            f"{field}: {name} in --secrets-folder cannot be read: {error.strerror}"
        ) from None
    try:
        return _checked(field, value.decode().removesuffix("\n"))
    except UnicodeDecodeError:
        raise AssignmentError(f"{field}: {name} in --secrets-folder is not text") from None


def _checked(field: str, value: str) -> str:
    if not value or len(value.encode()) > MAX_VALUE_BYTES or "\0" in value:
        raise AssignmentError(
            f"{field}: its value is empty, has a zero byte or more than {MAX_VALUE_BYTES >> 10} KiB"
        )
    return value

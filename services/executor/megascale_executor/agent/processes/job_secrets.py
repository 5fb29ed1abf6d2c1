"""Secrets of a job by reference: the agent resolves them, and nobody else ever has the values.

A job names variables and references; the values lie on the node, in a folder or in variables of the
agent, which reads them when an attempt is prepared and passes them on in the environment of the
job's processes alone.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from megascale_common.service.errors import AssignmentError

VARIABLE_PREFIX = "MEGASCALE_SECRET_"
MAX_VALUE_BYTES = 16 << 10  # of a secret: a key or a token; the kernel bounds an environment


def take_variables(environment: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """The secrets in the agent's own variables, by name, which its children no longer inherit."""
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
        # Opening a pipe would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise AssignmentError(f"{field}: {name} in --secrets-folder is no plain file")
            value = file.read(MAX_VALUE_BYTES + 1)
    except OSError as error:
        raise AssignmentError(
            f"{field}: {name} in --secrets-folder cannot be read: {error.strerror}"
        ) from None
    try:
        return _checked(field, value.decode().removesuffix("\n"))
    except UnicodeDecodeError:
        raise AssignmentError(f"{field}: {name} in --secrets-folder is no text") from None


def _checked(field: str, value: str) -> str:
    if not value or len(value.encode()) > MAX_VALUE_BYTES or "\0" in value:
        raise AssignmentError(
            f"{field}: its value is empty, has a zero byte or more than {MAX_VALUE_BYTES >> 10} KiB"
        )
    return value

"""Which tenants' jobs may name which secrets of a node: the file of ``--secrets-tenants``.

One line for each reference: the reference, then tenants, or ``*`` for all of them. With such a file
a reference that has no line is refused, so a secret that is new on the node is nobody's at first.
The file is read at every start of a job: a line that was removed counts from the next attempt on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from megascale_common.service.errors import AssignmentError, OptionError
from megascale_job.code_checks import is_reference
from megascale_job.names import is_dns_label

EVERYBODY = "*"
MAX_FILE_BYTES = 256 << 10  # some thousand references


def check(path: Path) -> None:
    """Check the file at the start of the agent.

    Raises:
        OptionError: it cannot be read, or a line of it is not one.
    """
    try:
        _read(path)
    except (OSError, ValueError) as error:
        raise OptionError(f"--secrets-tenants {path}: {error}") from None


def require(references: Mapping[str, str], tenant: str, path: Path) -> None:
    """Refuse a job whose tenant may not name one of its ``references`` (by variable).

    Raises:
        AssignmentError: it may not, or the file cannot be read now; the text names the reference.
    """
    try:
        allowed = _read(path)
    except (OSError, ValueError) as error:
        raise AssignmentError(
            f"environment.secrets: --secrets-tenants of this node cannot be read: {error}"
        ) from None
    for name, reference in references.items():
        if not allowed.get(reference, frozenset()) & {tenant, EVERYBODY}:
            raise AssignmentError(
                f"environment.secrets.{name}: jobs of tenant {tenant} may not name {reference} on "
                "this node; its operator allows that by a line of --secrets-tenants"
            )


def _read(path: Path) -> dict[str, frozenset[str]]:
    """The tenants of each reference.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too large, or a line is none.
    """
    with path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"it has more than {MAX_FILE_BYTES >> 10} KiB")
    found: dict[str, frozenset[str]] = {}
    for number, line in enumerate(data.decode().splitlines(), 1):
        reference, *tenants = line.partition("#")[0].split() or [""]
        if not reference:
            continue
        if not is_reference(reference) or reference in found or not _are_tenants(tenants):
            raise ValueError(
                f"line {number}: write a reference once (file:NAME or env:NAME), and behind it the "
                f"tenants whose jobs may name it, or {EVERYBODY}"
            )
        found[reference] = frozenset(tenants)
    return found


def _are_tenants(names: Sequence[str]) -> bool:
    return bool(names) and all(name == EVERYBODY or is_dns_label(name) for name in names)

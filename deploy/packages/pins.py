"""The pinned requirements of the project, and what needs each of them.

Versions stand in ``constraints.txt`` (all that `make` installs by name) and, for torch and triton,
which a user chooses for a device, in the Makefile.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;#]+)")
_IN_MAKEFILE = re.compile(r"^(?:TORCH|TRITON) \?= (\S+)$", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, order=True, slots=True)
class Pin:
    """One requirement: its normalised name, its version, and what asks for it by name.

    ``extras`` has "" for the base install; it is empty where only another package needs the pin.
    """

    name: str
    version: str
    extras: tuple[str, ...] = ()


def normalised(name: str) -> str:
    """A package's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(repository: Path = REPOSITORY) -> list[Pin]:
    """All pins, sorted by name.

    Raises:
        ValueError: a line of constraints.txt pins nothing.
    """
    asked = _asked(repository)
    found = dict(_constraints((repository / "constraints.txt").read_text()))
    for text in _IN_MAKEFILE.findall((repository / "Makefile").read_text()):
        found.update(_constraints(text))
    return sorted(
        Pin(name, version, tuple(sorted(asked.get(name, ())))) for name, version in found.items()
    )


def _constraints(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _PIN.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"constraints.txt: {line!r} is not NAME==VERSION")
        yield normalised(match[1]), match[2]


def _asked(repository: Path) -> dict[str, set[str]]:
    """The extras that name each package."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    asked: dict[str, set[str]] = {}
    for extra, lines in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for line in lines:
            match = _NAME.match(line)
            assert match is not None, line
            asked.setdefault(normalised(match[0]), set()).add(extra)
    return asked

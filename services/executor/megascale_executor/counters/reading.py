"""The interface of counter sources, which read files below a root folder, or a driver's library.

The root is / on a host; tests use folders with recorded or synthetic trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class NotShown(Exception):
    """This host does not show these counters; the text says why."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The value of one counter.

    Args:
        name: includes the unit; a counter whose name ends in ``_total`` never falls.
        target: port, disk or device; "" for the host.
    """

    name: str
    target: str
    value: float


class Source(Protocol):
    """Counters of one kind.

    Attributes:
        name: name of the source in the list of skipped ones.
    """

    name: str

    def read(self) -> Sequence[Reading]:
        """The present counters.

        Raises:
            NotShown: this host has none of them.
        """
        ...


def lines(path: Path) -> list[str]:
    """Lines of a file of /proc or /sys.

    Raises:
        NotShown: it cannot be read.
    """
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise NotShown(f"{path} cannot be read: {error.strerror}") from error


def number(path: Path) -> float | None:
    """The number in a file of /sys; None if it is absent or has no number."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def folders(path: Path) -> list[Path]:
    """Entries of a folder of /sys, sorted by name; empty if it is absent."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []

"""What a source of counters is: it reads a few files below a root folder, or a driver's library.

The root stands for / and is another folder in tests, which hold recorded or synthetic trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class NotShown(Exception):
    """This host does not show these counters; the text is the reason."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One counter as it was read.

    Args:
        name: with its unit; one that ends in ``_total`` counts since boot and never falls.
        target: port, disk or device; "" for the host.
    """

    name: str
    target: str
    value: float


class Source(Protocol):
    """Counters of one kind.

    Attributes:
        name: of the source, in what is reported as skipped.
    """

    name: str

    def read(self) -> Sequence[Reading]:
        """The counters as they are now.

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
    """The number that a file of /sys holds; None where it is absent or holds none."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def folders(path: Path) -> list[Path]:
    """Entries of a folder of /sys by name; none where it is absent."""
    try:
        return sorted(path.iterdir())
    except OSError:
        return []

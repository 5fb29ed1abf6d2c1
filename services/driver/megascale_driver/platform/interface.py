"""What gives nodes to a cluster: this machine, SLURM, Kubernetes, or an installed package's.

The driver alone decides which nodes work. A platform lists its nodes and their conditions, and is
asked to give no further work to a node that the driver evicts. Another package registers one under
the entry point group ``megascale.platforms``: a function of no argument that returns a
:class:`Platform`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol, cast

from megascale_common.service.errors import OptionError

GROUP = "megascale.platforms"
# Of the reasons for drains: it shows the platform's operators, and this project, whose they are.
PREFIX = "megascale: "


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformNode:
    """A node as the platform sees it.

    Attributes:
        switch: the lowest switch above it; empty where the platform does not know.
        ready: it can be given work as far as the platform knows, drained or not.
        drained: the platform gives it no further work, because somebody asked for that.
        conditions: the platform's own words for its state, such as ``IDLE`` or ``DiskPressure``.
        reason: why it is drained or not ready; empty where nobody said.
    """

    name: str
    switch: str
    ready: bool
    drained: bool
    conditions: tuple[str, ...]
    reason: str


class Platform(Protocol):
    """Where nodes come from. Every method may be called again after it failed or was cut off."""

    async def nodes(self) -> tuple[PlatformNode, ...]:
        """Return all nodes, by name.

        Raises:
            UnavailableError: the platform does not answer.
        """
        ...

    async def drain(self, name: str, reason: str) -> None:
        """Give a node no further work; what runs on it goes on. Twice is as once.

        Raises:
            OptionError: there is no such node, or ``reason`` is empty.
            UnavailableError: the platform refuses or does not answer.
        """
        ...

    async def restore(self, name: str) -> None:
        """Give a node work again that was drained for a reason of :data:`PREFIX`; else do nothing.

        Raises:
            OptionError: there is no such node.
            UnavailableError: the platform refuses or does not answer.
        """
        ...

    async def replace(self, name: str) -> bool:
        """Ask for a node in place of one that is lost; False where this platform has no such means.

        It comes later, under this name or another, or never: spares are what a job counts on.

        Raises:
            UnavailableError: the platform refuses or does not answer.
        """
        ...


@functools.cache
def known_platforms() -> dict[str, str]:
    """The names that :func:`open_platform` takes, with the packages that they come from."""
    return {e.name: e.dist.name if e.dist else "" for e in metadata.entry_points(group=GROUP)}


def open_platform(name: str) -> Platform:
    """Return the platform that an installed package registers under ``name``.

    Raises:
        OptionError: none does, or two do, or it cannot be imported.
    """
    entries = list(metadata.entry_points(group=GROUP, name=name))
    if len({entry.value for entry in entries}) != 1:
        known = ", ".join(sorted(known_platforms())) or "none"
        count = "no package has" if not entries else f"{len(entries)} packages have"
        raise OptionError(f"platform: {count} {name!r}; known: {known}")
    try:
        return cast("Callable[[], Platform]", entries[0].load())()
    except ImportError as error:
        raise OptionError(f"platform {name!r} cannot be imported: {error}") from None

"""Platforms, which give nodes to a cluster: this machine, SLURM, Kubernetes, or a plug-in.

Only the driver decides which nodes work. A platform lists its nodes and their conditions, drains a
node that the driver evicts, and provides more nodes if jobs lack some.

Platforms are opened by name: the built-in ones, and those of installed packages. A package
registers one under the entry-point group ``megascale.platforms``, as a callable without arguments
that returns a :class:`Platform`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol, cast

from megascale_common.service.errors import OptionError
from megascale_job.visible import agreed, counted

# Begin of the reasons of our drains: by it the platform's operators and this code recognise them.
PREFIX = "megascale: "
MAX_NODES = 50_000  # most nodes that can be requested for a cluster


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformNode:
    """A node as the platform sees it.

    Attributes:
        switch: the lowest switch above it; empty if the platform does not know it.
        ready: True if the platform considers it able to work, drained or not.
        drained: True if the platform gives it no further work on request.
        conditions: the platform's own words for its state, such as ``IDLE`` or ``DiskPressure``.
        reason: why it is drained or not ready; empty if unknown.
        reached: False if the platform gets no answer from it. For the driver this is a second
            witness that a silent node is gone.
    """

    name: str
    switch: str
    ready: bool
    drained: bool
    conditions: tuple[str, ...]
    reason: str
    reached: bool = True


class Platform(Protocol):
    """A source of nodes. Every method can be repeated after it failed or was interrupted."""

    async def nodes(self) -> tuple[PlatformNode, ...]:
        """Return all nodes, by name.

        Raises:
            UnavailableError: the platform does not answer.
        """
        ...

    async def drain(self, name: str, reason: str) -> None:
        """Give a node no further work; its running work continues. Safe to repeat.

        Raises:
            OptionError: there is no such node, or ``reason`` is empty.
            UnavailableError: the platform refuses or does not answer.
        """
        ...

    async def restore(self, name: str) -> None:
        """Give a node work again if it was drained for a reason with :data:`PREFIX`.

        Raises:
            OptionError: there is no such node.
            UnavailableError: the platform refuses or does not answer.
        """
        ...

    async def replace(self, name: str) -> bool:
        """Request a node in place of a lost one; False if this platform cannot do that.

        The node comes later, under this name or another, or never. Jobs rely on spares instead.

        Raises:
            UnavailableError: the platform refuses or does not answer.
        """
        ...

    async def provide(self, count: int) -> int:
        """Give the cluster a total of ``count`` nodes; never takes nodes away. Safe to repeat.

        The number is a total, so that a caller that was restarted between two calls requests the
        same again. Drained nodes do not count; nodes that are on their way do.

        Returns:
            the number of nodes that the cluster has now, including those on their way.

        Raises:
            OptionError: ``count`` is not from 1 to :data:`MAX_NODES`.
            UnavailableError: the platform refuses, does not answer, or cannot provide more.
        """
        ...


def require_count(count: int) -> None:
    """Check a requested number of nodes.

    Raises:
        OptionError: it is not from 1 to :data:`MAX_NODES`.
    """
    if not 1 <= count <= MAX_NODES:
        raise OptionError(
            f"count: {counted(count, 'node')} {agreed(count, 'are')} asked for; give 1 to "
            f"{MAX_NODES}"
        )


GROUP = "megascale.platforms"
# Imported only when opened: an installation can lack the packages of one of them.
_ROOM = "megascale_driver.platform"
BUILT_IN = {
    "kubernetes": f"{_ROOM}.kubernetes.platform:KubernetesPlatform",
    "local": f"{_ROOM}.local.platform:LocalPlatform",
    "slurm": f"{_ROOM}.slurm.platform:SlurmPlatform",
}


def known_platforms() -> dict[str, str]:
    """The names that :func:`open_platform` accepts, each with its package."""
    installed = metadata.entry_points(group=GROUP)
    found = {entry.name: entry.dist.name if entry.dist else "" for entry in installed}
    return found | dict.fromkeys(BUILT_IN, "megascale")


def open_platform(name: str) -> Platform:
    """Return the platform called ``name``; it connects only when its first method is called.

    Raises:
        OptionError: there is none, two packages have one, or it cannot be imported.
    """
    if name in BUILT_IN:
        entries = [metadata.EntryPoint(name, BUILT_IN[name], GROUP)]
    else:
        entries = list(metadata.entry_points(group=GROUP, name=name))
    if len({entry.value for entry in entries}) != 1:
        known = ", ".join(sorted(known_platforms()))
        count = "several installed packages have" if entries else "there is no platform"
        raise OptionError(f"platform: {count} {name!r}; known: {known}")
    try:
        return cast("Callable[[], Platform]", entries[0].load())()
    except ImportError as error:
        extra = f"; try `pip install megascale[{name}]`" if name == "kubernetes" else ""
        raise OptionError(f"platform {name!r} cannot be imported: {error}{extra}") from None

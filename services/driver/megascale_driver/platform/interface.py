"""What gives nodes to a cluster: this machine, SLURM, Kubernetes, or an installed package's.

The driver alone decides which nodes work. A platform lists its nodes and their conditions, is
asked to give no further work to a node that the driver evicts, and for more nodes where jobs lack
some.

Platforms have names: those built in, and those of installed packages. A package registers one under
the entry-point group ``megascale.platforms``: what makes a :class:`Platform` without an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from typing import Protocol, cast

from megascale_common.service.errors import OptionError
from megascale_job.visible import agreed, counted

# Of the reasons for drains: it shows the platform's operators, and this project, whose they are.
PREFIX = "megascale: "
MAX_NODES = 50_000  # of a cluster that is asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class PlatformNode:
    """A node as the platform sees it.

    Attributes:
        switch: the lowest switch above it; empty where the platform does not know.
        ready: it can be given work as far as the platform knows, drained or not.
        drained: the platform gives it no further work, because somebody asked for that.
        conditions: the platform's own words for its state, such as ``IDLE`` or ``DiskPressure``.
        reason: why it is drained or not ready; empty where nobody said.
        reached: False where the platform itself gets no answer from it. The driver takes that as a
            second witness of a node that is silent.
    """

    name: str
    switch: str
    ready: bool
    drained: bool
    conditions: tuple[str, ...]
    reason: str
    reached: bool = True


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

    async def provide(self, count: int) -> int:
        """Have the cluster get ``count`` nodes in all; twice is as once, and none is taken away.

        The number is a total, so a caller that ended between two calls asks for the same again.
        Drained nodes do not count, those that are to come do.

        Returns:
            how many nodes the cluster has now, those that are to come included.

        Raises:
            OptionError: ``count`` is not from 1 to :data:`MAX_NODES`.
            UnavailableError: the platform refuses, does not answer, or has no means to give more.
        """
        ...


def require_count(count: int) -> None:
    """Check a number of nodes before a platform is asked for them.

    Raises:
        OptionError: it is not from 1 to :data:`MAX_NODES`.
    """
    if not 1 <= count <= MAX_NODES:
        raise OptionError(
            f"count: {counted(count, 'node')} {agreed(count, 'are')} asked for; give 1 to "
            f"{MAX_NODES}"
        )


GROUP = "megascale.platforms"
# Imported when asked for: an installation may lack what one of them needs.
_ROOM = "megascale_driver.platform"
BUILT_IN = {
    "kubernetes": f"{_ROOM}.kubernetes.platform:KubernetesPlatform",
    "local": f"{_ROOM}.local.platform:LocalPlatform",
    "slurm": f"{_ROOM}.slurm.platform:SlurmPlatform",
}


def known_platforms() -> dict[str, str]:
    """The names that :func:`open_platform` takes, each with the package that it comes from."""
    installed = metadata.entry_points(group=GROUP)
    found = {entry.name: entry.dist.name if entry.dist else "" for entry in installed}
    return found | dict.fromkeys(BUILT_IN, "megascale")


def open_platform(name: str) -> Platform:
    """Return the platform called ``name``; it asks nobody before its first verb.

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

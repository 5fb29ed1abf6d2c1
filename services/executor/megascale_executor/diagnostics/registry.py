"""The diagnostics of a node: those of this package, and those that installed packages add.

A package adds one through an entry point, whose name is the diagnostic's (see
docs/how-to/add-a-diagnostic.md):

    [project.entry-points."megascale.diagnostics"]
    scratch_mounted = "acme_checks:ScratchMounted"

A diagnostic of a package that cannot be used never stops the agent. It stays in the registry as
:class:`Unusable`, so that each result names the package and what to do about it. The verdict is
SKIPPED: nothing was checked, and a faulty package must not quarantine every node that has it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from importlib import metadata

from megascale_common.service import logs
from megascale_executor.diagnostics.checkpoint_daemon import CheckpointDaemonServes
from megascale_executor.diagnostics.clock import Clock
from megascale_executor.diagnostics.device_present import DevicePresent
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.disk_room import DiskRoom
from megascale_executor.diagnostics.disk_speed import DiskSpeed
from megascale_executor.diagnostics.finding import Finding
from megascale_executor.diagnostics.gpu_health import GpuHealth
from megascale_executor.diagnostics.links import InterfacePairs, RdmaPairs
from megascale_executor.diagnostics.memory_room import MemoryRoom
from megascale_executor.diagnostics.network_profile import NetworkProfile
from megascale_executor.diagnostics.node_tests import (
    AllToAll,
    Bitwise,
    DeviceCopy,
    Gemm,
    HostCopy,
    MemoryBandwidth,
)
from megascale_executor.diagnostics.path_mtu import PathMtu
from megascale_executor.diagnostics.rank_checks import AllReduce, Compute, GroupAllReduce
from megascale_executor.diagnostics.versions import Versions

_log = logs.get(__name__)

GROUP = "megascale.diagnostics"
# In the order in which they run; the first FAIL is the reason that an attempt's failure names.
BUILT_IN: tuple[type[Diagnostic], ...] = (
    DevicePresent,
    GpuHealth,
    Versions,
    NetworkProfile,
    Clock,
    DiskRoom,
    CheckpointDaemonServes,
    MemoryRoom,
    Compute,
    Gemm,
    MemoryBandwidth,
    Bitwise,
    HostCopy,
    DiskSpeed,
    DeviceCopy,
    AllReduce,
    AllToAll,
    InterfacePairs,
    RdmaPairs,
    PathMtu,
    GroupAllReduce,
)
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")


class UnknownDiagnostic(ValueError):
    """A name that no diagnostic of this node has."""


class Unusable(Diagnostic):
    """Takes the place of a package's diagnostic that cannot be used, and reports why."""

    def __init__(self, name: str, package: str, problem: str) -> None:
        self.name, self._package = name, package
        self._detail = f"package {package}: {problem}; then restart the agent"
        _log.error("diagnostic cannot be used", diagnostic=name, reason=self._detail)

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """The problem, as SKIPPED."""
        return [Finding(self.name, f"package:{self._package}", "SKIPPED", self._detail)]


class Registry:
    """Diagnostics in the order in which they run."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self._diagnostics = tuple(diagnostics)

    @property
    def names(self) -> tuple[str, ...]:
        """Names that may be asked for."""
        return tuple(dict.fromkeys(each.name for each in self._diagnostics if each.on_demand))

    def on_demand(self, names: Sequence[str], *, full: bool = False) -> list[Diagnostic]:
        """Those that ``names`` ask for; when it is empty the quick ones, or all with ``full``.

        Raises:
            UnknownDiagnostic: a name is not one of :attr:`names`.
        """
        unknown = sorted(set(names) - set(self.names))
        if unknown:
            raise UnknownDiagnostic(
                f"no check {', '.join(unknown)}; this node has {', '.join(self.names)}"
            )
        asked = [each for each in self._diagnostics if each.on_demand]
        if names:
            return [each for each in asked if each.name in names]
        return [each for each in asked if full or each.quick]

    def before_attempts(self) -> list[Diagnostic]:
        """Those that run before each attempt."""
        return [each for each in self._diagnostics if each.before_attempts]

    def with_nodes(self) -> list[Diagnostic]:
        """Those that run when nodes check each other."""
        return [each for each in self._diagnostics if each.with_nodes]


def load_registry() -> Registry:
    """The diagnostics of this package and of all installed ones. Never raises."""
    diagnostics: list[Diagnostic] = [made() for made in BUILT_IN]
    owners = {each.name: "megascale" for each in diagnostics}
    # Sorted, so that of two packages with one name the same one is used on every node.
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda e: (_package(e), e.name)):
        if entry.name in owners:
            problem = (
                f"the name {entry.name} is taken by package {owners[entry.name]}: "
                "rename the diagnostic and its entry point, or uninstall one of the packages"
            )
            diagnostics.append(Unusable(entry.name, _package(entry), problem))
        else:
            owners[entry.name] = _package(entry)
            diagnostics.append(_load(entry))
    return Registry(diagnostics)


def _load(entry: metadata.EntryPoint) -> Diagnostic:
    try:
        made = entry.load()()
        problem = _problem(entry.name, made)
    # SystemExit as well: a module that calls sys.exit() must not end the agent.
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        problem = f"cannot be loaded: {reason}: fix or uninstall the package"
    if problem:
        return Unusable(entry.name, _package(entry), f"{entry.value} {problem}")
    diagnostic: Diagnostic = made
    return diagnostic


def _problem(name: str, made: object) -> str:
    """What is wrong with the object behind an entry point, and the remedy; "" when nothing is."""
    if not _NAME.fullmatch(name):
        return "has no valid name: use a-z, 0-9 and '_', a letter first, at most 64"
    if not isinstance(made, Diagnostic) or not inspect.iscoroutinefunction(made.run):
        return "is not a Diagnostic: subclass it and give it `async def run(self, node)`"
    if getattr(made, "name", None) != name:
        return "does not have the entry point's name: set `name` of the class to it"
    if not isinstance(made.timeout_s, int | float) or not made.timeout_s > 0:
        return f"has timeout_s {made.timeout_s!r}: give a positive number of seconds"
    return ""


def _package(entry: metadata.EntryPoint) -> str:
    return str(entry.dist.name) if entry.dist is not None else "unknown"

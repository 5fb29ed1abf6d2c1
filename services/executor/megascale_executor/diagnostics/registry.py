"""Registry and runner of a node's diagnostics, including those of installed packages.

A package adds a diagnostic through an entry point of the same name (see
docs/how-to/add-a-diagnostic.md):

    [project.entry-points."megascale.diagnostics"]
    scratch_mounted = "acme_checks:ScratchMounted"

A package's diagnostic that cannot be used never stops the agent. It stays in the registry as
:class:`Unusable`, so that each result names the package and the remedy. The verdict is SKIPPED:
nothing was checked, and a faulty package must not quarantine every node that has it. Diagnostics
run one after the other, each within its time limit; none can end the agent.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
from collections.abc import Iterable, Sequence
from importlib import metadata

from megascale_common.service import logs
from megascale_executor.diagnostics.device_checks import DevicePresent, GpuHealth
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.disk import DiskRoom, DiskSpeed
from megascale_executor.diagnostics.finding import VERDICTS, Finding
from megascale_executor.diagnostics.host_checks import CheckpointDaemonServes, Clock, Versions
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

_log = logs.get(__name__)

GROUP = "megascale.diagnostics"
# In the order in which they run: an attempt's failure names the first FAIL.
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
    """No diagnostic of this node has the name."""


class Unusable(Diagnostic):
    """Takes the place of a package's diagnostic that cannot be used, and reports why."""

    def __init__(self, name: str, package: str, problem: str) -> None:
        self.name = name
        self._package = package
        self._detail = f"package {package}: {problem}; then restart the agent"
        _log.error("diagnostic cannot be used", diagnostic=name, reason=self._detail)

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One SKIPPED finding that states the problem."""
        return [Finding(self.name, f"package:{self._package}", "SKIPPED", self._detail)]


class Registry:
    """Diagnostics in the order in which they run."""

    def __init__(self, diagnostics: Iterable[Diagnostic]) -> None:
        self._diagnostics = tuple(diagnostics)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the diagnostics that can be requested."""
        return tuple(dict.fromkeys(each.name for each in self._diagnostics if each.on_demand))

    def on_demand(self, names: Sequence[str], *, full: bool = False) -> list[Diagnostic]:
        """Diagnostics named ``names``; without names the quick ones, or all with ``full``.

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
        """Diagnostics that run before each attempt."""
        return [each for each in self._diagnostics if each.before_attempts]

    def with_nodes(self) -> list[Diagnostic]:
        """Diagnostics that run when nodes check each other."""
        return [each for each in self._diagnostics if each.with_nodes]


def load_registry() -> Registry:
    """The diagnostics of this package and of all installed ones. Never raises."""
    diagnostics: list[Diagnostic] = [made() for made in BUILT_IN]
    owners = {each.name: "megascale" for each in diagnostics}
    # Sorted, so that if two packages use one name, every node takes it from the same package.
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
    # SystemExit too, because a module that calls sys.exit() must not end the agent.
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}"
        problem = f"cannot be loaded: {reason}: fix or uninstall the package"
    if problem:
        return Unusable(entry.name, _package(entry), f"{entry.value} {problem}")
    diagnostic: Diagnostic = made
    return diagnostic


def _problem(name: str, made: object) -> str:
    """The problem with the object of an entry point, and the remedy; "" if it is usable."""
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


MIN_REST_S = 2.0  # no check that measures can finish in less


async def run_diagnostics(
    diagnostics: Iterable[Diagnostic], node: NodeView, limit_s: float | None = None
) -> list[Finding]:
    """Findings of all ``diagnostics``, by stage and then in their order.

    They run one at a time, because checks that load the same devices would disturb each other. A
    failure leaves out the later stages, whose results it would falsify. After ``limit_s`` no check
    begins, and the one in progress is ended.
    """
    findings: list[Finding] = []
    failed: tuple[int, str] | None = None
    end_s = None if limit_s is None else time.monotonic() + limit_s
    for diagnostic in sorted(diagnostics, key=lambda each: each.stage):
        rest_s = None if end_s is None else end_s - time.monotonic()
        if failed is not None and diagnostic.stage > failed[0]:
            reason = f"not run: {failed[1]} failed first"
        elif rest_s is not None and rest_s < MIN_REST_S:
            reason = f"not run: the {limit_s:g} s of all checks are over"
        else:
            found = await _run(diagnostic, node, rest_s)
            findings += found
            if failed is None and any(each.verdict == "FAIL" for each in found):
                failed = diagnostic.stage, diagnostic.name
            continue
        findings.append(Finding(diagnostic.name, "node", "SKIPPED", reason))
    return findings


async def _run(diagnostic: Diagnostic, node: NodeView, rest_s: float | None) -> Sequence[Finding]:
    begin = time.monotonic()
    cut_short = rest_s is not None and rest_s < diagnostic.timeout_s
    limit_s = rest_s if rest_s is not None and cut_short else diagnostic.timeout_s
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            found = list(await diagnostic.run(node))
            _check(diagnostic.name, found)
            return found
    # SystemExit too, because it would end the event loop and with it the node.
    except (Exception, SystemExit) as error:
        if limit.expired() and cut_short:
            # This was not the check's own limit, so its result is unknown.
            detail = f"cut short after {limit_s:.0f} s: the time of all checks is over"
            return [Finding(diagnostic.name, "node", "SKIPPED", detail, time.monotonic() - begin)]
        if limit.expired():
            detail = f"no result within {diagnostic.timeout_s:g} s"
        else:
            detail = f"{type(error).__name__}: {error}"
        _log.exception("diagnostic failed", diagnostic=diagnostic.name, reason=detail)
        return [Finding(diagnostic.name, "node", "FAIL", detail, time.monotonic() - begin)]


def _check(name: str, found: Sequence[object]) -> None:
    """Raise TypeError if an item is not a finding of this diagnostic."""
    for each in found:
        if not isinstance(each, Finding) or each.name != name or each.verdict not in VERDICTS:
            raise TypeError(f"{each!r} is not a Finding named {name!r} with a known verdict")

"""Checks of this node: before an attempt, on request, and together with other nodes.

Before an attempt all of its diagnostics run each time, except the probe behind ``compute`` and
``all_reduce``, which needs one process per device and, on GPUs, seconds. The probe's result counts
for another CACHE_S if it was taken on the same devices and the attempt after it finished well on
this node. After any other end (a fault here or elsewhere in the job, a stop, a restarted agent) the
probe runs again.

On request, a node without an attempt runs all diagnostics that need no job, or those named, or
those that several nodes run together while the driver searches for the faulty one. Such a diagnosis
uses no result of an attempt, and attempts use none of it. An attempt that arrives meanwhile cancels
it.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from megascale.v1 import executor_pb2, link_pb2
from megascale_common.node.addresses import listen, split
from megascale_common.service.errors import PreemptedError, StateError, TemplateError, invalid
from megascale_executor.agent.asyncio_tasks import once
from megascale_executor.agent.checks.checkpoint_daemon import CheckpointDaemon
from megascale_executor.agent.processes.rank_probe import Meeting, probe, probe_at
from megascale_executor.agent.processes.template import TemplateKeeper, TemplateProcess
from megascale_executor.diagnostics.devices import DeviceFacts
from megascale_executor.diagnostics.diagnostic import AttemptView, Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding, failures
from megascale_executor.diagnostics.rank_checks import ALL_REDUCE, COMPUTE
from megascale_executor.diagnostics.registry import Registry, run_diagnostics
from megascale_executor.diagnostics.wanted_network import WantedNetwork
from megascale_job.config import JobConfig

LIMIT_S = 110.0  # for a whole set of diagnostics; the driver's timeout is longer
MAX_MEASURED = 64  # kinds of figures in a hello


@dataclass(frozen=True, slots=True)
class GroupPart:
    """This node's part in the check of a group of nodes: its devices, and where all ranks meet."""

    devices: tuple[int, ...]
    meeting: Meeting


class Diagnosis:
    """Runs diagnostics on request, one request at a time; ``peers`` are hosts to connect to."""

    def __init__(
        self,
        registry: Registry,
        devices: Sequence[DeviceFacts],
        node_folder: Path,
        templates: TemplateKeeper,
        daemon: CheckpointDaemon,
        peers: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._registry = registry
        self._devices = devices
        self._node_folder = node_folder
        self._peers = peers
        self._templates = templates
        self._daemon = daemon
        self._turn = asyncio.Lock()
        self._measured: dict[tuple[str, str, str], float] = {}
        self._running: asyncio.Future[list[Finding]] | None = None

    async def run(self, names: Sequence[str], full: bool = False) -> list[Finding]:
        """Findings of the diagnostics ``names``; without names, of the quick or the full set.

        A set ends within LIMIT_S; diagnostics that did not run by then are SKIPPED.

        Raises:
            UnknownDiagnostic: no diagnostic of the node has that name.
            PreemptedError: an attempt arrived.
        """
        wanted = self._registry.on_demand(names, full=full)
        return await self._run(
            wanted, self._devices, self._probe, limit_s=None if names else LIMIT_S
        )

    async def run_with_nodes(self, part: GroupPart) -> list[Finding]:
        """Findings of this node's part in the check of a group.

        Raises:
            PreemptedError: an attempt arrived.
        """
        devices = [each for each in self._devices if each.index in part.devices]
        return await self._run(
            self._registry.with_nodes(), devices, lambda: self._probe_at(part.meeting, devices)
        )

    async def _run(
        self,
        wanted: Sequence[Diagnostic],
        devices: Sequence[DeviceFacts],
        probe_ranks: Callable[[], Awaitable[list[Finding]]],
        limit_s: float | None = None,
    ) -> list[Finding]:
        async with self._turn:
            node = NodeView(
                devices=devices,
                folder=self._node_folder,
                daemon_endpoint=self._daemon.serving_endpoint,
                holds_slots=self._daemon.holds_slots,
                probe_ranks=once(probe_ranks),
                peers=self._peers(),
            )
            running = self._running = asyncio.ensure_future(run_diagnostics(wanted, node, limit_s))
            try:
                await asyncio.wait([running])
                if running.cancelled():
                    raise PreemptedError(
                        "the node was given work before the checks were done; "
                        "ask again when it is idle"
                    )
                self.remember(running.result())
                return running.result()
            finally:
                running.cancel()
                self._running = None

    @property
    def measured(self) -> list[link_pb2.MeasuredFigure]:
        """Medians of the newest measurements since the agent started, for the hello."""
        return [
            link_pb2.MeasuredFigure(check=check, target_class=of, unit=unit, value=value)
            for (check, of, unit), value in self._measured.items()
        ]

    def remember(self, findings: Sequence[Finding]) -> None:
        """Keep the figures of findings that passed, for the hello."""
        values: dict[tuple[str, str, str], list[float]] = {}
        for each in findings:
            if each.value is not None and each.verdict == "PASS":
                key = each.name, each.target_class, each.unit
                values.setdefault(key, []).append(each.value)
        for key, found in values.items():
            if key in self._measured or len(self._measured) < MAX_MEASURED:
                self._measured[key] = statistics.median(found)

    def give_way(self) -> None:
        """Cancel the diagnosis in progress, which kills its processes."""
        if self._running is not None:
            self._running.cancel()

    async def _probe(self) -> list[Finding]:
        try:
            template = await self._templates.ready()
            return await probe(self._devices, template, self._node_folder / "self-check.log")
        except (TemplateError, OSError) as error:
            return [Finding(name, "node", "FAIL", str(error)) for name in (COMPUTE, ALL_REDUCE)]

    async def _probe_at(self, meeting: Meeting, devices: Sequence[DeviceFacts]) -> list[Finding]:
        try:
            template = await self._templates.ready()
            log_path = self._node_folder / "self-check.log"
            return await probe_at(meeting, devices, template, log_path)
        except (TemplateError, OSError) as error:
            return [Finding(ALL_REDUCE, "node", "FAIL", str(error))]


CACHE_S = 900.0
_EMPTY: Mapping[str, str] = MappingProxyType({})
FAULT_CHECKS_S = 100.0  # the driver's timeout is longer


@dataclass(frozen=True, slots=True)
class _Cached:
    devices: tuple[int, ...]
    findings: tuple[Finding, ...]
    at_s: float


class SelfChecks:
    """Runs the checks before attempts and remembers the last good probe."""

    def __init__(
        self,
        registry: Registry,
        devices: Sequence[DeviceFacts],
        node_folder: Path,
        daemon: CheckpointDaemon,
        peers: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._registry = registry
        self._daemon = daemon
        self._peers = peers
        self._devices = {device.index: device for device in devices}
        self._node_folder = node_folder
        self._last: _Cached | None = None
        self._trusted = False

    def attempt_ended(self, *, well: bool) -> None:
        """Note the end: the last probe stays valid only if the attempt finished well."""
        self._trusted = well

    async def run(
        self,
        config: JobConfig,
        ranks: Sequence[int],
        indices: Sequence[int],
        template: TemplateProcess,
        network: WantedNetwork | None = None,
        environment: Mapping[str, str] = _EMPTY,
        checks: Sequence[str] = (),
    ) -> list[Finding]:
        """All findings for an attempt of ``config`` with ``ranks`` on the devices ``indices``.

        ``network`` and ``environment`` are those of :class:`AttemptView`. ``checks`` are further
        diagnostics that the driver asks for because of what broke the attempt before. They run only
        if the others found nothing wrong, and end after FAULT_CHECKS_S.
        """
        used = [self._devices[index] for index in indices]
        node = NodeView(
            devices=used,
            folder=self._node_folder,
            daemon_endpoint=self._daemon.serving_endpoint,
            holds_slots=self._daemon.holds_slots,
            probe_ranks=once(lambda: self._probe_or_recall(used, template)),
            attempt=AttemptView(
                job=config, ranks=tuple(ranks), network=network, environment=environment
            ),
            peers=self._peers(),
        )
        usual = self._registry.before_attempts()
        findings = await run_diagnostics(usual, node)
        if not checks or failures(findings):
            return findings
        there = set(self._registry.names)
        missing = [name for name in checks if name not in there]
        done = {each.name for each in usual}
        known = [name for name in checks if name in there - done]
        if known:
            asked = self._registry.on_demand(known)
            findings += await run_diagnostics(asked, node, FAULT_CHECKS_S)
        detail = "this agent's build has no such check"
        return findings + [Finding(name, "node", "SKIPPED", detail) for name in missing]

    async def _probe_or_recall(
        self, used: Sequence[DeviceFacts], template: TemplateProcess
    ) -> list[Finding]:
        now_s, indices, last = time.monotonic(), tuple(device.index for device in used), self._last
        if (
            self._trusted
            and last is not None
            and last.devices == indices
            and now_s - last.at_s < CACHE_S
        ):
            note = f" (found {now_s - last.at_s:.0f} s ago; the attempt since then finished well)"
            return [
                replace(finding, detail=finding.detail + note, elapsed_s=0.0)
                for finding in last.findings
            ]
        findings = await probe(used, template, self._node_folder / "self-check.log")
        good = all(finding.verdict in ("PASS", "SKIPPED") for finding in findings)
        self._last = _Cached(indices, tuple(findings), now_s) if good else None
        return findings


MAX_WORLD_SIZE = 1 << 20


class GroupChecks:
    """This node's part in checks of several nodes.

    Args:
        incarnation: the agent's; a request for another incarnation is refused.
        host: the address on which rank 0's store listens.
        devices: indices of all devices of the node.
        run: runs the node's part.
    """

    def __init__(
        self,
        incarnation: str,
        host: str,
        devices: Sequence[int],
        run: Callable[[GroupPart], Awaitable[list[Finding]]],
    ) -> None:
        self._incarnation = incarnation
        self._host = host
        self._devices = tuple(devices)
        self.run = run

    @contextlib.contextmanager
    def part(self, request: executor_pb2.CheckGroupRequest) -> Iterator[GroupPart]:
        """The node's part. On the node of rank 0 the store's socket listens until the exit.

        Raises:
            RequestError: a device that the node lacks, ranks that do not fit, a bad address.
            StateError: the request is for another incarnation.
        """
        if request.incarnation not in ("", self._incarnation):
            raise StateError(
                "the agent was restarted since; ask the driver for its new incarnation",
                reason="NODE_RESTARTED",
            )
        devices = tuple(request.devices) or self._devices
        if len(set(devices)) != len(devices) or not set(devices) <= set(self._devices):
            problem = f"{list(devices)} are not devices of this node"
            raise invalid("devices", problem, f"choose from {list(self._devices)}")
        first, world = request.first_rank, request.world_size
        if not 0 <= first <= first + len(devices) <= world <= MAX_WORLD_SIZE:
            problem = f"ranks {first} to {first + len(devices) - 1} do not fit into {world}"
            raise invalid("world_size", problem, "give the number of devices of all nodes")
        if first == 0:
            with listen(self._host, backlog=world + 8) as listener:
                port = listener.getsockname()[1]
                yield GroupPart(devices, Meeting(0, world, self._host, port, listener))
            return
        try:
            host, port = split(request.store_endpoint)
        except ValueError:
            problem = f"{request.store_endpoint!r} is not an address"
            raise invalid("store_endpoint", problem, "give host:port of rank 0's node") from None
        yield GroupPart(devices, Meeting(first, world, host, port))

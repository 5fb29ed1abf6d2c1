"""Diagnostics on request, on a node without an attempt: all that need no job, or those named.

Or those that nodes run together, when the driver searches among them for a faulty one. No result of
an earlier attempt is used, and nothing found here counts for later ones. An attempt that arrives
meanwhile has precedence: the diagnosis is cancelled.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale.v1 import link_pb2
from megascale_common.service.errors import PreemptedError, TemplateError
from megascale_executor.agent.asyncio_tasks import once
from megascale_executor.agent.checks.checkpoint_daemon import CheckpointDaemon
from megascale_executor.agent.processes.rank_probe import Meeting, probe, probe_at
from megascale_executor.agent.processes.template_keeper import TemplateKeeper
from megascale_executor.diagnostics.devices import DeviceFacts
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding
from megascale_executor.diagnostics.rank_checks import ALL_REDUCE, COMPUTE
from megascale_executor.diagnostics.registry import Registry
from megascale_executor.diagnostics.runner import run_diagnostics

# Of a whole set; the driver waits for longer.
LIMIT_S = 110.0
MAX_MEASURED = 64  # kinds of figures in a hello


@dataclass(frozen=True, slots=True)
class GroupPart:
    """This node's part in the check of a group of nodes: its devices, and where all ranks meet."""

    devices: tuple[int, ...]
    meeting: Meeting


class Diagnosis:
    """Runs diagnostics on request, one request at a time; ``peers`` are hosts to talk with."""

    def __init__(
        self,
        registry: Registry,
        devices: Sequence[DeviceFacts],
        node_folder: Path,
        templates: TemplateKeeper,
        daemon: CheckpointDaemon,
        peers: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._registry, self._devices, self._node_folder = registry, devices, node_folder
        self._peers = peers
        self._templates, self._daemon = templates, daemon
        self._turn = asyncio.Lock()
        self._measured: dict[tuple[str, str, str], float] = {}
        self._running: asyncio.Future[list[Finding]] | None = None

    async def run(self, names: Sequence[str], full: bool = False) -> list[Finding]:
        """Findings of the diagnostics ``names``; when it is empty of the quick or the full set.

        A set ends within LIMIT_S: what it left out then is SKIPPED.

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
        """Medians of what was measured since the agent started, for the hello."""
        return [
            link_pb2.MeasuredFigure(check=check, target_class=of, unit=unit, value=value)
            for (check, of, unit), value in self._measured.items()
        ]

    def remember(self, findings: Sequence[Finding]) -> None:
        """Keep what good findings measured, for the hello."""
        values: dict[tuple[str, str, str], list[float]] = {}
        for each in findings:
            if each.value is not None and each.verdict == "PASS":
                key = each.name, each.target_class, each.unit
                values.setdefault(key, []).append(each.value)
        for key, found in values.items():
            if key in self._measured or len(self._measured) < MAX_MEASURED:
                self._measured[key] = statistics.median(found)

    def give_way(self) -> None:
        """End what runs now: its processes are killed."""
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

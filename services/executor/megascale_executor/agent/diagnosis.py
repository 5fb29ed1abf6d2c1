"""Diagnostics on request, on a node without an attempt: all that need no job, or those named.

No result of an earlier attempt is used, and nothing found here counts for later ones. An attempt
that arrives meanwhile has precedence: the diagnosis is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from megascale_common.service.errors import PreemptedError, TemplateError
from megascale_executor.agent.asyncio_tasks import once
from megascale_executor.agent.checkpoint_daemon import CheckpointDaemon
from megascale_executor.agent.rank_probe import probe
from megascale_executor.agent.template_keeper import TemplateKeeper
from megascale_executor.diagnostics.devices import DeviceFacts
from megascale_executor.diagnostics.diagnostic import NodeView
from megascale_executor.diagnostics.finding import Finding
from megascale_executor.diagnostics.rank_checks import ALL_REDUCE, COMPUTE
from megascale_executor.diagnostics.registry import Registry
from megascale_executor.diagnostics.runner import run_diagnostics


class Diagnosis:
    """Runs diagnostics on request, one request at a time."""

    def __init__(
        self,
        registry: Registry,
        devices: Sequence[DeviceFacts],
        node_folder: Path,
        templates: TemplateKeeper,
        daemon: CheckpointDaemon,
    ) -> None:
        self._registry, self._devices, self._node_folder = registry, devices, node_folder
        self._templates, self._daemon = templates, daemon
        self._turn = asyncio.Lock()
        self._running: asyncio.Future[list[Finding]] | None = None

    async def run(self, names: Sequence[str]) -> list[Finding]:
        """Findings of the diagnostics ``names``, of all that run on request when it is empty.

        Raises:
            UnknownDiagnostic: no diagnostic of the node has that name.
            PreemptedError: an attempt arrived.
        """
        wanted = self._registry.on_demand(names)
        async with self._turn:
            node = NodeView(
                devices=self._devices,
                folder=self._node_folder,
                daemon_endpoint=self._daemon.serving_endpoint,
                holds_slots=self._daemon.holds_slots,
                probe_ranks=once(self._probe),
            )
            running = self._running = asyncio.ensure_future(run_diagnostics(wanted, node))
            try:
                await asyncio.wait([running])
                if running.cancelled():
                    raise PreemptedError(
                        "the node was given work before the checks were done; "
                        "ask again when it is idle"
                    )
                return running.result()
            finally:
                running.cancel()
                self._running = None

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

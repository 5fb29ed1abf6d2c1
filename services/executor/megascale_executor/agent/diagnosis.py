"""Self-checks on somebody's word: every check that needs no job, run now, on a node whose ranks are
idle.

Nothing is recalled from earlier attempts, and nothing found here counts for later ones. An attempt
that comes
meanwhile goes first: the diagnosis is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from megascale_executor.agent.checkpoint_daemon import CHECK_NAME as DAEMON
from megascale_executor.agent.checkpoint_daemon import CheckpointDaemon
from megascale_executor.agent.self_check import probe
from megascale_executor.agent.template_keeper import TemplateKeeper
from megascale_executor.agent.template_process import TemplateError
from megascale_executor.diagnostics import device_present, disk_room, rank_checks
from megascale_executor.diagnostics.devices import DeviceFacts
from megascale_executor.diagnostics.finding import Finding

PROBED = (rank_checks.COMPUTE, rank_checks.ALL_REDUCE)
CHECKS = (device_present.NAME, disk_room.NAME, DAEMON, *PROBED)


class UnknownCheck(ValueError):
    """A check was asked for that the node does not know."""


class GaveWay(Exception):
    """The node was given an attempt before the checks were done."""


class Diagnosis:
    """Runs checks, one call at a time."""

    def __init__(
        self,
        devices: Sequence[DeviceFacts],
        node_folder: Path,
        templates: TemplateKeeper,
        daemon: CheckpointDaemon,
    ) -> None:
        self._devices, self._node_folder = devices, node_folder
        self._templates, self._daemon = templates, daemon
        self._turn = asyncio.Lock()
        self._running: asyncio.Future[list[Finding]] | None = None

    async def run(self, wanted: Sequence[str]) -> list[Finding]:
        """Findings of the checks named in ``wanted``, of all when it is empty.

        Raises:
            UnknownCheck: a name that is not one of CHECKS.
            GaveWay: an attempt came.
        """
        unknown = sorted(set(wanted) - set(CHECKS))
        if unknown:
            raise UnknownCheck(
                f"no check {', '.join(unknown)}; this node knows {', '.join(CHECKS)}"
            )
        async with self._turn:
            running = self._running = asyncio.ensure_future(self._find(set(wanted or CHECKS)))
            try:
                await asyncio.wait([running])
                if running.cancelled():
                    raise GaveWay(
                        "the node was given work before the checks were done; ask again when it is idle"
                    )
                return running.result()
            finally:
                running.cancel()
                self._running = None

    def give_way(self) -> None:
        """End what runs now: its processes are killed."""
        if self._running is not None:
            self._running.cancel()

    async def _find(self, wanted: set[str]) -> list[Finding]:
        findings: list[Finding] = []
        if device_present.NAME in wanted:
            findings += await device_present.check(self._devices)
        if disk_room.NAME in wanted:
            findings.append(await asyncio.to_thread(disk_room.check, self._node_folder))
        if DAEMON in wanted:
            findings.append(await self._daemon.check())
        if not wanted.isdisjoint(PROBED):
            found = await self._probe()
            findings += [finding for finding in found if finding.name in wanted]
        return findings

    async def _probe(self) -> list[Finding]:
        try:
            template = await self._templates.ready()
            return await probe(self._devices, template, self._node_folder / "self-check.log")
        except (TemplateError, OSError) as error:
            return [Finding(name, "node", "FAIL", str(error)) for name in PROBED]

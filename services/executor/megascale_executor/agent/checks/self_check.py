"""The self-check before an attempt: which checks run, and when an earlier result still counts.

Every diagnostic that runs before attempts does so each time, but for the probe behind ``compute``
and ``all_reduce``: it needs one process per device and, on GPUs, seconds. Its result counts for
CACHE_S more if the attempt that followed it on this node finished well, and it was had for the same
devices. After any other end (a fault here or elsewhere in the job, a stop, a restarted agent) the
probe runs again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from megascale_executor.agent.asyncio_tasks import once
from megascale_executor.agent.checks.checkpoint_daemon import CheckpointDaemon
from megascale_executor.agent.processes.rank_probe import probe
from megascale_executor.agent.processes.template_process import TemplateProcess
from megascale_executor.diagnostics.devices import DeviceFacts
from megascale_executor.diagnostics.diagnostic import AttemptView, NodeView
from megascale_executor.diagnostics.finding import Finding, failures
from megascale_executor.diagnostics.registry import Registry
from megascale_executor.diagnostics.runner import run_diagnostics
from megascale_executor.diagnostics.wanted_network import WantedNetwork
from megascale_job.config import JobConfig

CACHE_S = 900.0
_EMPTY: Mapping[str, str] = MappingProxyType({})
FAULT_CHECKS_S = 100.0  # the driver waits for longer


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
        self._registry, self._daemon, self._peers = registry, daemon, peers
        self._devices = {device.index: device for device in devices}
        self._node_folder = node_folder
        self._last: _Cached | None = None
        self._trusted = False

    def attempt_ended(self, *, well: bool) -> None:
        """Only an attempt that finished well leaves its probe in force."""
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
        """All findings for an attempt of ``config``: ``ranks`` of it on the devices ``indices``.

        ``network`` and ``environment`` are those of :class:`AttemptView`. ``checks``: further ones,
        which what broke the attempt before calls for. They run only if the others found nothing
        wrong, and end after FAULT_CHECKS_S.
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

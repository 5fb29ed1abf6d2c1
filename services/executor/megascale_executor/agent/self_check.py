"""The self-check before an attempt: what is looked at, when an earlier result still counts, and who
runs the probes.

Room and presence are looked at every time. Compute and all-reduce need one process per device and,
on GPUs, seconds: their result counts for CACHE_S more if the attempt that followed it on this node
finished well, and it was had for the same devices. After any other end (a fault here or elsewhere
in the job, a stop, a restarted agent) they run again.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from megascale_common.job.config import JobConfig
from megascale_common.node import framing, host
from megascale_common.node.messages import SelfCheck, SelfChecked
from megascale_executor.agent.channels import MessageChannel
from megascale_executor.agent.template_process import ForkedProcess, TemplateError, TemplateProcess
from megascale_executor.diagnostics import device_present, disk_room, memory_room, rank_checks
from megascale_executor.diagnostics.devices import DeviceFacts
from megascale_executor.diagnostics.finding import Finding

CACHE_S = 900.0
# From the last fork on. CPU ranks need a fraction of a second; CUDA and NCCL need several for their
# first start.
PROBE_TIMEOUT_S = {"cpu": 15.0, "cuda": 60.0}


@dataclass(frozen=True, slots=True)
class _Cached:
    devices: tuple[int, ...]
    findings: tuple[Finding, ...]
    at_s: float


class SelfChecks:
    """Runs the node's self-checks and remembers the last good ones."""

    def __init__(self, devices: Sequence[DeviceFacts], node_folder: Path) -> None:
        self._devices = {device.index: device for device in devices}
        self._node_folder = node_folder
        self._last: _Cached | None = None
        self._trusted = False

    def attempt_ended(self, *, well: bool) -> None:
        """Only an attempt that finished well leaves its checks in force."""
        self._trusted = well

    async def run(
        self,
        config: JobConfig,
        ranks: Sequence[int],
        indices: Sequence[int],
        template: TemplateProcess,
        *,
        slots_held: bool,
    ) -> list[Finding]:
        """All findings for an attempt of ``config`` with ``ranks`` of it on the devices
        ``indices``.
        """
        used = [self._devices[index] for index in indices]
        findings = await device_present.check(used)
        findings.append(await asyncio.to_thread(disk_room.check, self._node_folder))
        on_cpu = used[0].kind == "cpu"
        wanted = await asyncio.to_thread(memory_room.need, config, ranks)
        findings.append(
            memory_room.check_host(wanted, host.memory_bytes("MemAvailable"), on_cpu=on_cpu)
        )
        staging = host.STAGING_MOUNT
        findings.append(
            memory_room.check_staging(
                wanted, host.free_bytes(staging), str(staging), already_held=slots_held
            )
        )
        return findings + await self._probe_or_recall(used, template)

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


async def probe(
    devices: Sequence[DeviceFacts], template: TemplateProcess, log_path: Path
) -> list[Finding]:
    """Check compute on every device and all-reduce among them, in processes that the template
    forks.
    """
    begin = time.monotonic()
    kind = devices[0].kind
    with socket.create_server(("127.0.0.1", 0), backlog=len(devices) + 8) as store:
        requests: list[SelfCheck] = [
            {
                "kind": "self_check",
                "rank": rank,
                "world_size": len(devices),
                "store_port": store.getsockname()[1],
                "device_kind": kind,
                "device_index": device.index,
                "timeout_s": PROBE_TIMEOUT_S[kind],
            }
            for rank, device in enumerate(devices)
        ]
        listen_fd = store.fileno() if len(devices) > 1 else None
        answers = await asyncio.gather(
            *(_ask(request, template, log_path, listen_fd) for request in requests)
        )
    targets = [f"{kind}:{device.index}" for device in devices]
    return rank_checks.judge(targets, dict(enumerate(answers)), time.monotonic() - begin)


async def _ask(
    request: SelfCheck, template: TemplateProcess, log_path: Path, listen_fd: int | None
) -> SelfChecked | str:
    """Fork one process and have its answer, or why there is none. Leaves no process."""
    channel, theirs = MessageChannel.pair()
    process: ForkedProcess | None = None
    try:
        channel.send(request, [listen_fd] if request["rank"] == 0 and listen_fd is not None else [])
        with theirs, log_path.open("ab") as log:
            process = await template.fork(request["rank"], theirs.fileno(), log.fileno())
        timeout_s = PROBE_TIMEOUT_S[request["device_kind"]]
        async with asyncio.timeout(timeout_s + 1.0):
            return await _answer(channel, process)
    except TimeoutError:
        return f"no answer within {PROBE_TIMEOUT_S[request['device_kind']]:.0f} s"
    except (TemplateError, framing.FramingError, OSError) as error:
        return str(error)
    finally:
        channel.close()
        theirs.close()
        if process is not None:
            process.kill()


async def _answer(channel: MessageChannel, process: ForkedProcess) -> SelfChecked | str:
    async for message in channel.messages():
        if message["kind"] == "self_checked":
            return cast(SelfChecked, message)
    status = await process.exited
    return (
        f"the probe ended with status {status} before it answered; see self-check.log of the node"
    )

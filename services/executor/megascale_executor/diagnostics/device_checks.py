"""Diagnostics of the node's devices: their presence, and their health as NVML reports it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from megascale_common.node.process import armed_command, child_environment
from megascale_common.service.errors import DeviceQueryError
from megascale_executor.counters.nvml import THROTTLE_BITS
from megascale_executor.diagnostics.devices import DeviceFacts, list_gpus
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding, Verdict
from megascale_job.visible import counted

HEALTH = "gpu_health"
MODULE = "megascale_executor.counters.nvml"
# nvml.h, nvmlDeviceGpuRecoveryAction_t.
ACTIONS = {
    1: "reset the GPU",
    2: "reboot the node",
    3: "drain peer-to-peer traffic",
    4: "drain the GPU and reset it",
    5: "recover the IMEX domain",
    6: "reset the bus",
    7: "reboot the system",
}
# NVIDIA's limit of aggregate uncorrectable errors, above which a GPU can be returned.
RETURN_ABOVE_ERRORS = 4
_HARD_THROTTLE = 0x08 | 0x40 | 0x80


class GpuHealth(Diagnostic):
    """Recovery action, ECC, row remapping, PCIe width and throttling of every GPU."""

    name = HEALTH
    before_attempts = True
    stage = 0
    timeout_s = 20.0

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding per GPU."""
        if node.devices[0].kind == "cpu":
            return [Finding(HEALTH, "node", "SKIPPED", "the node has no GPU")]
        status, output, errors = await _facts()
        if status == 2:
            return [Finding(HEALTH, "node", "SKIPPED", errors.strip() or "NVML is not there")]
        if status != 0:
            detail = f"the process that reads NVML ended with status {status}: {errors[-300:]}"
            return [Finding(HEALTH, "node", "FAIL", detail)]
        answer = json.loads(output)
        return compare_health(answer, [(device.index, device.uuid) for device in node.devices])


async def _facts() -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *armed_command([sys.executable, "-m", MODULE]),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(),
    )
    try:
        output, errors = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    return process.returncode or 0, output.decode(), errors.decode(errors="replace")


def compare_health(answer: dict[str, Any], wanted: Sequence[tuple[int, str]]) -> list[Finding]:
    """One finding per wanted GPU (index, UUID) from NVML's facts; a missing GPU is a FAIL."""
    by_uuid = {device.get("uuid"): device for device in answer["devices"]}
    tools = {"nvidia-driver": str(answer["driver"])}
    found = []
    for index, uuid in wanted:
        device = by_uuid.get(uuid)
        target = f"cuda:{index}"
        if device is None:
            detail = f"NVML does not list {uuid}: the GPU is lost; reset the node"
            found.append(Finding(HEALTH, target, "FAIL", detail, tools=tools))
        else:
            found.append(Finding(HEALTH, target, *evaluate_health(device), tools=tools))
    return found


def evaluate_health(device: dict[str, Any]) -> tuple[Verdict, str]:
    """Verdict and reason from the facts of one GPU; null means that a fact is unknown."""
    hard: list[str] = []
    soft: list[str] = []
    action = device["recovery_action"]
    if action:
        named = ACTIONS.get(action, f"recovery action {action}")
        hard.append(f"the driver asks: {named}")
    if device["ecc_uncorrected"]:
        hard.append(f"{device['ecc_uncorrected']} uncorrectable ECC errors since its last reset")
    if device["rows_failed"]:
        hard.append("a row of memory could not be remapped: replace the GPU")
    if (device["ecc_uncorrected_ever"] or 0) > RETURN_ABOVE_ERRORS:
        soft.append(f"{device['ecc_uncorrected_ever']} uncorrectable ECC errors in its life")
    if device["rows_pending"]:
        soft.append("a row of memory is remapped at the next reset: reset the GPU")
    width, most = device["pcie_width"], device["pcie_width_max"]
    if width and most and width < most:
        soft.append(f"PCIe runs {width} of {most} lanes wide")
    if (device["throttle"] or 0) & _HARD_THROTTLE:
        reasons = [name for bit, name in THROTTLE_BITS.items() if device["throttle"] & bit]
        soft.append(f"slowed: {', '.join(reasons)}")
    if hard:
        return "FAIL", "; ".join(hard + soft)
    if soft:
        return "DEGRADED", "; ".join(soft)
    return "PASS", f"{device['model']} {device['uuid']}, {device['temperature_c']} C"


PRESENT = "device_present"


class DevicePresent(Diagnostic):
    """All registered devices are present. CPU slots always are; GPUs if nvidia-smi lists them."""

    name = PRESENT

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding per device."""
        return await check_present(node.devices)


async def check_present(registered: Sequence[DeviceFacts]) -> list[Finding]:
    """One finding per registered device."""
    begin = time.monotonic()
    if registered[0].kind == "cpu":
        usable = len(os.sched_getaffinity(0))
        detail = f"{counted(usable, 'processor')} usable by {counted(len(registered), 'slot')}"
        return [Finding(PRESENT, f"cpu:{device.index}", "PASS", detail) for device in registered]
    try:
        present = await list_gpus()
    except DeviceQueryError as error:
        elapsed_s = time.monotonic() - begin
        return [
            Finding(PRESENT, f"cuda:{device.index}", "FAIL", str(error), elapsed_s)
            for device in registered
        ]
    return compare_present(registered, present, time.monotonic() - begin)


def compare_present(
    registered: Sequence[DeviceFacts], present: Sequence[DeviceFacts], elapsed_s: float
) -> list[Finding]:
    """Compare the present devices with the registered ones."""
    now = {device.index: device for device in present}
    findings = []
    for device in registered:
        target, found = f"cuda:{device.index}", now.get(device.index)
        if found is None:
            detail = f"{device.uuid} is gone; {len(present)} GPUs are left"
            findings.append(Finding(PRESENT, target, "FAIL", detail, elapsed_s))
        elif found.uuid != device.uuid:
            detail = (
                f"index {device.index} is {found.uuid} now and was {device.uuid}; restart the agent"
            )
            findings.append(Finding(PRESENT, target, "FAIL", detail, elapsed_s))
        else:
            detail = f"{found.model} {found.uuid}"
            findings.append(Finding(PRESENT, target, "PASS", detail, elapsed_s))
    return findings

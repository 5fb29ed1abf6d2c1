"""Self-check: the node's devices are still there, and are the ones that it registered with."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from megascale_common.service.errors import DeviceQueryError
from megascale_executor.diagnostics.devices import DeviceFacts, list_gpus
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding
from megascale_job.visible import counted

NAME = "device_present"


class DevicePresent(Diagnostic):
    """CPU slots are always there; GPUs are those that nvidia-smi lists."""

    name = NAME

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding per device."""
        return await check(node.devices)


async def check(registered: Sequence[DeviceFacts]) -> list[Finding]:
    """One finding per registered device."""
    begin = time.monotonic()
    if registered[0].kind == "cpu":
        usable = len(os.sched_getaffinity(0))
        detail = f"{counted(usable, 'processor')} usable by {counted(len(registered), 'slot')}"
        return [Finding(NAME, f"cpu:{device.index}", "PASS", detail) for device in registered]
    try:
        present = await list_gpus()
    except DeviceQueryError as error:
        elapsed_s = time.monotonic() - begin
        return [
            Finding(NAME, f"cuda:{device.index}", "FAIL", str(error), elapsed_s)
            for device in registered
        ]
    return compare(registered, present, time.monotonic() - begin)


def compare(
    registered: Sequence[DeviceFacts], present: Sequence[DeviceFacts], elapsed_s: float
) -> list[Finding]:
    """Compare the devices that are there now with those that were registered."""
    now = {device.index: device for device in present}
    findings = []
    for device in registered:
        target, found = f"cuda:{device.index}", now.get(device.index)
        if found is None:
            detail = f"{device.uuid} is gone; {len(present)} GPUs are left"
            findings.append(Finding(NAME, target, "FAIL", detail, elapsed_s))
        elif found.uuid != device.uuid:
            detail = (
                f"index {device.index} is {found.uuid} now and was {device.uuid}; restart the agent"
            )
            findings.append(Finding(NAME, target, "FAIL", detail, elapsed_s))
        else:
            detail = f"{found.model} {found.uuid}"
            findings.append(Finding(NAME, target, "PASS", detail, elapsed_s))
    return findings

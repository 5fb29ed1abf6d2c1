"""Self-check: the node's devices are still there, and are the same ones that it registered with."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from megascale_executor.diagnostics.devices import DeviceFacts, DeviceQueryError, list_gpus
from megascale_executor.diagnostics.finding import Finding

NAME = "device_present"


async def check(registered: Sequence[DeviceFacts]) -> list[Finding]:
    """One finding per registered device."""
    begin = time.monotonic()
    if registered[0].kind == "cpu":
        usable = len(os.sched_getaffinity(0))
        detail = f"{usable} processors usable by {len(registered)} slots"
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
    """Judge what is there now against what was registered."""
    now = {device.index: device for device in present}
    findings = []
    for device in registered:
        found = now.get(device.index)
        if found is None:
            verdict, detail = "FAIL", f"{device.uuid} is gone; {len(present)} GPUs are left"
        elif found.uuid != device.uuid:
            verdict, detail = (
                "FAIL",
                f"index {device.index} is {found.uuid} now and was {device.uuid}; restart the agent",
            )
        else:
            verdict, detail = "PASS", f"{found.model} {found.uuid}"
        findings.append(
            Finding(
                NAME,
                f"cuda:{device.index}",
                "PASS" if verdict == "PASS" else "FAIL",
                detail,
                elapsed_s,
            )
        )
    return findings

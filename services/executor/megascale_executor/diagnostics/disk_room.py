"""Self-check: the run folder can be written and has room for logs."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding

NAME = "disk_room"
FAIL_BELOW_BYTES = 64 << 20
DEGRADED_BELOW_BYTES = 1 << 30
_PROBE = b"megascale" * 512


class DiskRoom(Diagnostic):
    """Checks the node's folder."""

    name = NAME

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding for the folder."""
        # In a thread: a disk that hangs blocks whoever writes to it.
        return [await asyncio.to_thread(check, node.folder)]


def check(folder: Path) -> Finding:
    """Write, sync and read back a small file in ``folder``, and measure what is free."""
    begin, target = time.monotonic(), str(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(_PROBE)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            same = file.read() == _PROBE
        found = os.statvfs(folder)
    except OSError as error:
        detail = f"cannot be written: {error}"
        return Finding(NAME, target, "FAIL", detail, time.monotonic() - begin)
    elapsed_s = time.monotonic() - begin
    if not same:
        return Finding(NAME, target, "FAIL", "what was written does not read back", elapsed_s)
    return evaluate(target, found.f_bavail * found.f_frsize, elapsed_s)


def evaluate(target: str, free_bytes: int, elapsed_s: float) -> Finding:
    """Verdict on the free room."""
    detail = f"{free_bytes / 2**20:.0f} MiB free"
    if free_bytes < FAIL_BELOW_BYTES:
        detail += f": less than {FAIL_BELOW_BYTES >> 20} MiB; free some room"
        return Finding(NAME, target, "FAIL", detail, elapsed_s)
    if free_bytes < DEGRADED_BELOW_BYTES:
        return Finding(NAME, target, "DEGRADED", f"{detail}: logs may fill it", elapsed_s)
    return Finding(NAME, target, "PASS", detail, elapsed_s)

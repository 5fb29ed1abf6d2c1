"""Diagnostics of the disk that holds the node's folder: free room, and rates with latency."""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding

SPEED = "disk_speed"
FILE_BYTES, BLOCK_BYTES = 64 << 20, 4 << 20
SMALL_WRITES, SMALL_BYTES = 16, 4096
MIN_FREE_BYTES = 1 << 30
# Hard limits: a slower disk delays logs and checkpoints of any size.
FAIL_BELOW_MB_S, FAIL_ABOVE_MS = 5.0, 2000.0


class DiskSpeed(Diagnostic):
    """Writes, syncs and reads 64 MiB, and syncs small writes, in the node's folder."""

    name = SPEED
    before_attempts = False
    quick = False

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """Three findings for the folder: rate of writing, rate of reading, latency of a sync."""
        # In a thread, because a write to a disk that hangs blocks.
        return await asyncio.to_thread(measure, node.folder)


def measure(folder: Path, file_bytes: int = FILE_BYTES) -> list[Finding]:
    """Measure the file system of ``folder`` with a file without a name, so none is left behind.

    Cached pages are dropped before the read. File systems in memory ignore that, so the figure is
    then the rate of memory.
    """
    begin = time.monotonic()
    try:
        found = os.statvfs(folder)
        if found.f_bavail * found.f_frsize < MIN_FREE_BYTES:
            return [Finding(SPEED, str(folder), "SKIPPED", "less than 1 GiB is free")]
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            write_s, read_s = _rates(file.fileno(), file_bytes)
            latency_s = _latency_s(file.fileno())
    except OSError as error:
        return [Finding(SPEED, str(folder), "FAIL", f"{error}", time.monotonic() - begin)]
    elapsed_s, megabytes = time.monotonic() - begin, file_bytes / 1e6
    target, size = str(folder), f"{file_bytes >> 20} MiB"
    return [
        _rate("write", target, megabytes / write_s, f"{size} written and synced", elapsed_s),
        _rate("read", target, megabytes / read_s, f"{size} read", elapsed_s),
        Finding(
            SPEED,
            target,
            "FAIL" if latency_s * 1e3 > FAIL_ABOVE_MS else "PASS",
            f"median of {SMALL_WRITES} synced writes of 4 KiB",
            elapsed_s,
            value=latency_s * 1e3,
            unit="ms",
            target_class="sync",
        ),
    ]


def _rates(descriptor: int, file_bytes: int) -> tuple[float, float]:
    block = os.urandom(BLOCK_BYTES)
    begin = time.monotonic()
    for offset in range(0, file_bytes, BLOCK_BYTES):
        os.pwrite(descriptor, block, offset)
    os.fsync(descriptor)
    write_s = time.monotonic() - begin
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.monotonic()
    for offset in range(0, file_bytes, BLOCK_BYTES):
        if os.pread(descriptor, BLOCK_BYTES, offset) != block:
            raise OSError(f"what was read at byte {offset} differs from what was written")
    return write_s, time.monotonic() - begin


def _latency_s(descriptor: int) -> float:
    durations_s = []
    for number in range(SMALL_WRITES):
        begin = time.monotonic()
        os.pwrite(descriptor, bytes([number]) * SMALL_BYTES, number * SMALL_BYTES)
        os.fsync(descriptor)
        durations_s.append(time.monotonic() - begin)
    return statistics.median(durations_s)


def _rate(what: str, target: str, rate: float, detail: str, elapsed_s: float) -> Finding:
    return Finding(
        SPEED,
        target,
        "FAIL" if rate < FAIL_BELOW_MB_S else "PASS",
        detail,
        elapsed_s,
        value=rate,
        unit="MB/s",
        target_class=what,
    )


ROOM = "disk_room"
FAIL_BELOW_BYTES = 64 << 20
DEGRADED_BELOW_BYTES = 1 << 30
_PROBE = b"megascale" * 512


class DiskRoom(Diagnostic):
    """Checks the node's folder."""

    name = ROOM

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding for the folder."""
        # In a thread, because a write to a disk that hangs blocks.
        return [await asyncio.to_thread(check_room, node.folder)]


def check_room(folder: Path) -> Finding:
    """Write, sync and read back a small file in ``folder``, and measure the free room."""
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
        return Finding(ROOM, target, "FAIL", detail, time.monotonic() - begin)
    elapsed_s = time.monotonic() - begin
    if not same:
        return Finding(ROOM, target, "FAIL", "what was written does not read back", elapsed_s)
    return evaluate_room(target, found.f_bavail * found.f_frsize, elapsed_s)


def evaluate_room(target: str, free_bytes: int, elapsed_s: float) -> Finding:
    """Verdict on the free room."""
    detail = f"{free_bytes / 2**20:.0f} MiB free"
    if free_bytes < FAIL_BELOW_BYTES:
        detail += f": less than {FAIL_BELOW_BYTES >> 20} MiB; free some room"
        return Finding(ROOM, target, "FAIL", detail, elapsed_s)
    if free_bytes < DEGRADED_BELOW_BYTES:
        return Finding(ROOM, target, "DEGRADED", f"{detail}: logs can fill it", elapsed_s)
    return Finding(ROOM, target, "PASS", detail, elapsed_s)

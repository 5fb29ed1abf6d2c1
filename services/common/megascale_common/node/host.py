"""Facts of the host from /proc, cgroups and file systems: memory, load, traffic, free space.

A figure that cannot be read is 0 or empty, and a limit that cannot be read does not apply. ``proc``
replaces /proc in tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

STAGING_MOUNT = Path("/dev/shm")
PROC = Path("/proc")


def load_1min(proc: Path = PROC) -> float:
    """Load average of the last minute."""
    words = _words(proc / "loadavg")
    return float(words[0]) if words else 0.0


def memory_bytes(field: str, proc: Path = PROC) -> int:
    """A field of /proc/meminfo (MemTotal, MemAvailable) in bytes."""
    words = _words(proc / "meminfo")
    label = f"{field}:"
    return int(words[words.index(label) + 1]) * 1024 if label in words else 0


def free_bytes(folder: Path) -> int:
    """Free bytes on the file system of ``folder``, for a user who is not root."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def network_bytes(proc: Path = PROC) -> tuple[int, int]:
    """Bytes received and sent by all interfaces except the loopback."""
    received = sent = 0
    for line in text_of(proc / "net" / "dev").splitlines():
        name, colon, counters = line.partition(":")
        values = counters.split()
        if colon and name.strip() != "lo" and len(values) >= 16:
            received, sent = received + int(values[0]), sent + int(values[8])
    return received, sent


def cpu_model(proc: Path = PROC) -> str:
    """Name of the processor; empty if the kernel does not report it."""
    for line in text_of(proc / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return ""


def _words(path: Path) -> list[str]:
    return text_of(path).split()


def text_of(path: Path) -> str:
    """The text of a file of /proc or /sys; "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 shows "no limit" as a number near 2**63


def left_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Memory left in this process's cgroups, from its own up to the root; sys.maxsize if unlimited.

    Both versions of cgroups count. Page cache that the kernel can drop counts as free; a tmpfs file
    counts against the process that writes it first.
    """
    return min(_each(proc, cgroups), default=sys.maxsize)


def _each(proc: Path, cgroups: Path) -> Iterator[int]:
    for line in text_of(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        while folder.is_relative_to(root):
            left = _left(folder, *names)
            if left is not None:
                yield left
            folder = folder.parent


def _left(folder: Path, limit: str, usage: str, droppable: str) -> int | None:
    try:
        allowed = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        counters = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not allowed.isdigit() or int(allowed) >= _UNLIMITED:
        return None
    return max(0, int(allowed) - used + int(counters.get(droppable, 0)))

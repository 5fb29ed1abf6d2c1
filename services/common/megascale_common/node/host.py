"""What /proc and the file systems report of the host: memory, load, network traffic, free space.

What cannot be read is 0 or empty. ``proc`` stands for /proc, for tests.
"""

from __future__ import annotations

import os
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
    """Bytes received and sent by all interfaces but the loopback."""
    received = sent = 0
    for line in _text(proc / "net" / "dev").splitlines():
        name, colon, counters = line.partition(":")
        values = counters.split()
        if colon and name.strip() != "lo" and len(values) >= 16:
            received, sent = received + int(values[0]), sent + int(values[8])
    return received, sent


def cpu_model(proc: Path = PROC) -> str:
    """Name of the processor; empty where the kernel does not report it."""
    for line in _text(proc / "cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return ""


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

"""Counters of the host for the heartbeat, read from /proc and the staging file system."""

from __future__ import annotations

import os
from pathlib import Path

from megascale.v1 import link_pb2

STAGING_MOUNT = Path("/dev/shm")
_PROC = Path("/proc")


def host_counters(proc: Path = _PROC, staging: Path = STAGING_MOUNT) -> link_pb2.HostCounters:
    """Load, memory, staging room and network traffic; a counter that cannot be read stays 0."""
    received, sent = network_bytes(proc)
    return link_pb2.HostCounters(
        load_1min=load_1min(proc),
        memory_available_bytes=memory_bytes("MemAvailable", proc),
        staging_free_bytes=free_bytes(staging),
        network_received_bytes=received,
        network_sent_bytes=sent,
    )


def load_1min(proc: Path = _PROC) -> float:
    """Load average of the last minute."""
    return float(_words(proc / "loadavg")[0]) if _words(proc / "loadavg") else 0.0


def memory_bytes(field: str, proc: Path = _PROC) -> int:
    """A field of /proc/meminfo (MemTotal, MemAvailable) in bytes."""
    words = _words(proc / "meminfo")
    label = f"{field}:"
    return int(words[words.index(label) + 1]) * 1024 if label in words else 0


def free_bytes(folder: Path) -> int:
    """Room on the file system of ``folder`` for an ordinary user."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize


def network_bytes(proc: Path = _PROC) -> tuple[int, int]:
    """Bytes received and sent by all interfaces but the loopback."""
    received = sent = 0
    for line in _text(proc / "net" / "dev").splitlines():
        name, colon, counters = line.partition(":")
        values = counters.split()
        if colon and name.strip() != "lo" and len(values) >= 16:
            received, sent = received + int(values[0]), sent + int(values[8])
    return received, sent


def cpu_model(proc: Path = _PROC) -> str:
    """Name of the processor; empty where the kernel does not tell."""
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

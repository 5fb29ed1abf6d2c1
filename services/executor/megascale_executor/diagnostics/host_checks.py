"""Diagnostics of the host: versions (the driver compares them), clock, and checkpoint daemon."""

from __future__ import annotations

import asyncio
import ctypes
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from megascale_common.node.host import text_of
from megascale_common.service.start import build_version
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding

VERSIONS = "versions"
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
PACKAGES = ("torch", "triton", "numpy", *NCCL_PACKAGES)
_DRIVER = re.compile(r"Kernel Module\D*(?:for \S+\s+)?(\d+(?:\.\d+)+)")
_OFED = Path("sys/module/mlx5_core/version")


class Versions(Diagnostic):
    """Reads versions from the metadata of installed packages, without importing them."""

    name = VERSIONS
    before_attempts = False
    quick = False
    stage = 0

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding for the node, whose ``tools`` are the versions."""
        tools = await asyncio.to_thread(read_versions)
        detail = ", ".join(f"{name} {version}" for name, version in sorted(tools.items()))
        return [Finding(VERSIONS, "node", "PASS", detail, tools=tools)]


def read_versions(root: Path = Path("/")) -> dict[str, str]:
    """Versions of installed software by name. ``root`` replaces / in tests."""
    found = {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "megascale": build_version(),
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if match := _DRIVER.search(text_of(root / "proc/driver/nvidia/version")):
        found["nvidia-driver"] = match.group(1)
    if ofed := text_of(root / _OFED).strip():
        found["mlx5"] = ofed
    return found


def nccl_version() -> str:
    """The NCCL release of the installed torch; "" if it has none, as on CPUs."""
    found = read_versions()
    return next((found[name] for name in NCCL_PACKAGES if name in found), "")


CLOCK = "clock"
# The driver orders events of different nodes by time; half a second is one step of a large job.
DEGRADED_ABOVE_S = 0.5
_STA_UNSYNC = 0x40  # linux/timex.h
_LONGS = 26  # at least the size of struct timex in longs


class Clock(Diagnostic):
    """Reads the kernel's clock discipline (adjtimex(2)) without changing it."""

    name = CLOCK
    before_attempts = False
    quick = False
    stage = 0

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding for the node: the greatest error that the kernel assumes, in seconds."""
        return [evaluate_clock(*read_clock())]


def read_clock() -> tuple[int, int]:
    """Status bits and the maximum error in microseconds; status -1: not permitted here."""
    # struct timex begins: unsigned modes; long offset, freq, maxerror, esterror; int status.
    buffer = (ctypes.c_long * _LONGS)()
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "adjtimex") or library.adjtimex(ctypes.byref(buffer)) < 0:
        return -1, 0
    return ctypes.c_int(buffer[5] & 0xFFFFFFFF).value, int(buffer[3])


def evaluate_clock(status: int, max_error_us: int) -> Finding:
    """PASS if the clock is synchronised and its possible error is small; else DEGRADED."""
    if status < 0:
        return Finding(CLOCK, "node", "SKIPPED", "adjtimex(2) is not permitted here")
    error_s = max_error_us / 1e6
    if status & _STA_UNSYNC:
        detail = "nothing synchronises the clock; the driver corrects by heartbeats: start chrony"
        return Finding(CLOCK, "node", "DEGRADED", detail, value=error_s, unit="s")
    if error_s > DEGRADED_ABOVE_S:
        detail = f"may be wrong by more than {DEGRADED_ABOVE_S} s: check the time server"
        return Finding(CLOCK, "node", "DEGRADED", detail, value=error_s, unit="s")
    return Finding(CLOCK, "node", "PASS", "synchronised", value=error_s, unit="s")


class CheckpointDaemonServes(Diagnostic):
    """The checkpoint daemon serves; skipped for a job that writes no checkpoints."""

    name = "checkpoint_daemon"

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding for the node."""
        if node.attempt is not None and not node.attempt.job.checkpoint.uri:
            return [Finding(self.name, "node", "SKIPPED", "the job writes no checkpoints")]
        endpoint = await node.daemon_endpoint()
        if endpoint:
            return [Finding(self.name, "node", "PASS", f"serves at {endpoint}")]
        detail = "does not serve; see checkpoint.log of the node"
        return [Finding(self.name, "node", "FAIL", detail)]

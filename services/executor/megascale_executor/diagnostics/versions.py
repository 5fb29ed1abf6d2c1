"""Diagnostic: versions of kernel, GPU driver and libraries; the driver compares the nodes."""

from __future__ import annotations

import asyncio
import platform
import re
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from megascale_common.service.start import build_version
from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding

NAME = "versions"
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
PACKAGES = ("torch", "triton", "numpy", *NCCL_PACKAGES)
_DRIVER = re.compile(r"Kernel Module\D*(?:for \S+\s+)?(\d+(?:\.\d+)+)")
_OFED = Path("sys/module/mlx5_core/version")


class Versions(Diagnostic):
    """Nothing is imported: versions are read from what is installed."""

    name = NAME
    before_attempts = False
    quick = False
    stage = 0

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding for the node, whose ``tools`` are the versions."""
        tools = await asyncio.to_thread(read)
        detail = ", ".join(f"{name} {version}" for name, version in sorted(tools.items()))
        return [Finding(NAME, "node", "PASS", detail, tools=tools)]


def read(root: Path = Path("/")) -> dict[str, str]:
    """Versions by name; what is not installed is left out. ``root`` stands for /, for tests."""
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
    if match := _DRIVER.search(_text(root / "proc/driver/nvidia/version")):
        found["nvidia-driver"] = match.group(1)
    if ofed := _text(root / _OFED).strip():
        found["mlx5"] = ofed
    return found


def nccl_version() -> str:
    """The release of NCCL that torch brings; "" where it brings none, as on CPUs."""
    found = read()
    return next((found[name] for name in NCCL_PACKAGES if name in found), "")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

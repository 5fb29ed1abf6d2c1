"""Which devices this machine has, detected without torch, for `megascale up --device auto`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]
_QUERY_TIMEOUT_S = 10.0


def count_gpus() -> int:
    """Number of GPUs that nvidia-smi or /dev lists, at most those of $CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = _listed_by_tool()
    if present is None:
        present = sum(
            1 for entry in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", entry.name)
        )
    if visible is None:
        return present
    return min(present, len([word for word in visible.split(",") if word.strip()]))


def choose_device(wanted: Literal["auto", "cpu", "cuda"], needed: int) -> DeviceKind:
    """The kind of device to use for ``needed`` devices; auto: GPUs if there are enough.

    Raises:
        ValueError: cuda is required and there are fewer GPUs than needed.
    """
    if wanted == "cpu":
        return "cpu"
    present = count_gpus()
    if present >= needed:
        return "cuda"
    if wanted == "cuda":
        raise ValueError(
            f"--device cuda: {needed} GPUs are needed (nodes times devices per node) and this "
            f"machine has {present}; use fewer with --nodes or --devices-per-node, "
            "or use --device cpu"
        )
    return "cpu"


def _listed_by_tool() -> int | None:
    """GPUs by nvidia-smi; None if it is absent or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        listing = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(1 for line in listing.splitlines() if line.startswith("GPU "))

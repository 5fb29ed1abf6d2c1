"""The real kubectl against the tests' API server."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / ".tools" / "kubernetes"
TIMEOUT_S = 60.0


def program() -> str:
    """That of `make kubernetes-tools`, else of the system; "" for none."""
    path = f"{TOOLS / 'usr/bin'}:{os.environ.get('PATH', '')}"
    return shutil.which("kubectl", path=path) or ""


def kustomized(folder: Path) -> str:
    """The manifests that `kubectl kustomize` makes of a folder; its error as the exception."""
    command = [program(), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def kubectl(kubeconfig: Path, *arguments: str) -> tuple[int, str]:
    """Exit status, and output with errors."""
    process = await asyncio.create_subprocess_exec(
        *(program(), "--kubeconfig", str(kubeconfig), *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except TimeoutError:
        process.kill()
        raise
    return process.returncode or 0, output.decode()

"""The real kubectl against the tests' API server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[2] / ".tools" / "kubernetes"
TIMEOUT_S = 60.0


def program() -> str:
    """That of the system, else of `make kubernetes-tools`; "" for none."""
    path = f"{os.environ.get('PATH', '')}:{TOOLS / 'usr/bin'}"
    return shutil.which("kubectl", path=path) or ""


def minor_version() -> int:
    """The program's minor version, 32 of 1.32; 0 for no program."""
    if not program():
        return 0
    done = subprocess.run(
        [program(), "version", "--client", "--output=json"],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=True,
    )  # fmt: skip
    return int(re.sub(r"\D.*", "", json.loads(done.stdout)["clientVersion"]["minor"]))


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

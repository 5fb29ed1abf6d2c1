"""Runs a command of the CLI as a process, as a shell would."""

from __future__ import annotations

import asyncio
import sys


async def start(*arguments: str) -> asyncio.subprocess.Process:
    """Start ``megascale`` with these arguments."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megascale_cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def run(*arguments: str) -> tuple[int | None, str, str]:
    """Exit status, stdout and stderr of a command, which never shows a traceback."""
    process = await start(*arguments)
    output, errors = await asyncio.wait_for(process.communicate(), 30)
    assert b"Traceback" not in errors, errors.decode()
    return process.returncode, output.decode(), errors.decode()

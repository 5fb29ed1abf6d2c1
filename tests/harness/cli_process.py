"""Runs a command of the CLI as a process, as a shell would."""

from __future__ import annotations

import asyncio
import sys

from tests.harness.cli_template import cli_template


async def start(*arguments: str) -> asyncio.subprocess.Process:
    """Start ``megascale`` with these arguments."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megascale_cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command, which never shows a traceback."""
    answer = asyncio.to_thread(cli_template().run, *arguments)
    status, output, errors = await asyncio.wait_for(answer, 30)
    assert "Traceback" not in errors, errors
    return status, output, errors

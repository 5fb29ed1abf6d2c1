"""The agent's handle on the template: what becomes of its processes when it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_common.node import framing
from megascale_executor.agent.channels import MessageChannel
from megascale_executor.agent.processes.template import TemplateProcess

# Memory that the kernel needs a while to take back: some 50 ms for 256 MiB.
LARGE = "x = b'1' * (1 << 28); print('ready', flush=True); import time; time.sleep(600)"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", LARGE], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        yield child
        child.kill()


async def test_processes_of_a_dead_template_have_exited_when_they_are_gone(
    child: subprocess.Popen[bytes],
) -> None:
    """Before that the node is not idle: the next attempt would find their devices in use."""
    channel, theirs = MessageChannel.pair()
    template = TemplateProcess(channel)
    with theirs, open(os.devnull) as nothing:
        forking = asyncio.create_task(template.fork(0, nothing.fileno(), nothing.fileno()))
        await asyncio.sleep(0)  # the template answers requests that it has
        framing.send(theirs, {"kind": "forked", "rank": 0, "pid": child.pid})
        process = await forking
    async with asyncio.timeout(CALL_TIMEOUT_S):
        assert await process.exited == -signal.SIGKILL
    assert child.poll() == -signal.SIGKILL
    assert template.ended and not process.alive
    await template.close()

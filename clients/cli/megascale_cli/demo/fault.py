"""The faults of `megascale demo --show-hang` and `--show-straggler`, made from outside.

A process that is stopped hangs, whatever its code does. One that is stopped for most of each few
milliseconds computes at a fraction of its speed, as on a slow host. The trainer has no part in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator

from megascale_cli.demo.cluster import DemoFailed

RUN_S = 0.004  # between two stops: less than any forward of the demo's job computes


def stop(pid: int) -> None:
    """Stop a process. Raises DemoFailed if it has ended."""
    _send(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    """Let a stopped process go on; one that has ended is none."""
    with contextlib.suppress(DemoFailed):
        _send(pid, signal.SIGCONT)


@contextlib.asynccontextmanager
async def slowed(pid: int, stopped_s: float) -> AsyncIterator[None]:
    """While the body runs, the process is stopped for ``stopped_s`` after each RUN_S."""
    pulses = asyncio.create_task(_pulses(pid, stopped_s))
    try:
        yield
    finally:
        pulses.cancel()
        await asyncio.gather(pulses, return_exceptions=True)
        go_on(pid)


async def _pulses(pid: int, stopped_s: float) -> None:
    while True:
        stop(pid)
        await asyncio.sleep(stopped_s)
        go_on(pid)
        await asyncio.sleep(RUN_S)


def _send(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise DemoFailed(f"process {pid} has ended before {number.name}") from None

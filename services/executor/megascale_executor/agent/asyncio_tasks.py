"""Small helpers for asyncio tasks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from megascale_common.service import logs

T = TypeVar("T")
_log = logs.get(__name__)


async def cancelled(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait until it has ended, however it ends."""
    if task is not None:
        task.cancel()
        # Not `await task`: its CancelledError would look like a cancellation of the caller.
        await asyncio.wait({task})


async def either(
    first: asyncio.Event, second: asyncio.Event, *, timeout_s: float | None = None
) -> None:
    """Wait until one of two events is set, or ``timeout_s`` has passed."""
    waits = [asyncio.ensure_future(event.wait()) for event in (first, second)]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def once(find: Callable[[], Awaitable[T]]) -> Callable[[], Awaitable[T]]:
    """``find``, called at the first call alone; later calls return what it found.

    Calls must not overlap.
    """
    found: list[T] = []

    async def recall() -> T:
        if not found:
            found.append(await find())
        return found[0]

    return recall


async def essential(part: Coroutine[Any, Any, None]) -> None:
    """Run a part of the agent that must not fail; if it does, by a defect, the agent exits.

    It exits rather than continue silently without that part: the driver detects a lost node.
    """
    try:
        await part
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise  # the agent is stopping
        _log.exception("a part of the agent failed; the agent ends")
        os.kill(os.getpid(), signal.SIGTERM)
        raise

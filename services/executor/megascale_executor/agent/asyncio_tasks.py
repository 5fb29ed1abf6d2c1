"""Small helpers for asyncio tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def cancelled(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait until it has ended, however it ends."""
    if task is not None:
        task.cancel()
        # Not `await task`, because its CancelledError would look like a cancellation of the caller.
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
    """A function that calls ``find`` once and returns its result at every call.

    Calls must not overlap.
    """
    found: list[T] = []

    async def recall() -> T:
        if not found:
            found.append(await find())
        return found[0]

    return recall

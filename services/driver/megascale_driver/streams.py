"""Streams of answers, and waits, that can be ended from outside."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

Answer = TypeVar("Answer")


async def until_set(event: asyncio.Event, answers: AsyncIterator[Answer]) -> AsyncIterator[Answer]:
    """Pass ``answers`` on until they end or ``event`` is set, whatever they wait for then."""
    ended = asyncio.ensure_future(event.wait())
    coming: asyncio.Future[Answer] | None = None
    try:
        while not ended.done():
            # A task of its own: the wait for the next answer may last for ever, and it is abandoned
            # when the event comes first.
            coming = asyncio.ensure_future(anext(answers))
            await asyncio.wait((coming, ended), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done():
                return
            try:
                answer = coming.result()
            except StopAsyncIteration:
                return
            yield answer
    finally:
        ended.cancel()
        if coming is not None and not coming.done():
            coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await coming


async def first_of(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait until one of the waits has ended; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        # Nothing is suppressed here: a cancellation that arrives during this wait must go on to the
        # caller, or SIGTERM would have no effect.
        await asyncio.wait(tasks)

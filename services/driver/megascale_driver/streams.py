"""Streams of answers that can be ended from outside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

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
        if coming is not None:
            coming.cancel()
            # Nobody listens any more: how it ends, or has ended meanwhile, concerns nobody.
            await asyncio.gather(coming, return_exceptions=True)

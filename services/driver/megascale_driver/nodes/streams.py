"""Streams of answers that can be ended from outside, and what a driver says in them of itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

Answer = TypeVar("Answer")
LOOK_S = 1.0  # a stream that waits for its next answer looks for news so often
# A term that is lost and back sooner is not worth a word. Longer than a read of etcd takes (5 s),
# so that the driver knows by then what etcd says.
NOTE_AFTER_S = 6.0
LEADS_AGAIN = "this driver leads again"


class TermNotes:
    """News of the term for one stream: once when it is lost, once when it is back.

    ``note`` is what the driver says with other answers; empty while it leads.
    """

    def __init__(
        self, note: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._note = note
        self._clock = clock
        self._since_s: float | None = None
        self._said = False

    def news(self) -> str:
        """What is to be said now; mostly nothing."""
        note, said = self._note(), self._said
        if not note:
            self._since_s = None
            self._said = False
            return LEADS_AGAIN if said else ""
        now_s = self._clock()
        self._since_s = now_s if self._since_s is None else self._since_s
        if said or now_s - self._since_s < NOTE_AFTER_S:
            return ""
        self._said = True
        return note


async def until_set(
    event: asyncio.Event,
    answers: AsyncIterator[Answer],
    news: Callable[[], Answer | None] = lambda: None,
) -> AsyncIterator[Answer]:
    """Pass ``answers`` on until they end or ``event`` is set, whatever they wait for then.

    Between two answers, and each LOOK_S while none comes, also what ``news`` returns, if anything.
    """
    ended = asyncio.ensure_future(event.wait())
    coming: asyncio.Future[Answer] | None = None
    try:
        while not ended.done():
            # A task of its own: the wait for the next answer may last for ever, and it is abandoned
            # when the event comes first.
            coming = asyncio.ensure_future(anext(answers))
            while not coming.done() and not ended.done():
                if said := news():
                    yield said
                await asyncio.wait(
                    (coming, ended), timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED
                )
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

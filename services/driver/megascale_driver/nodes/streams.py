"""Streams of answers that can be ended from outside, and news of the term in them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

Answer = TypeVar("Answer")
LOOK_S = 1.0  # interval at which a waiting stream checks for news
# A term that is back sooner is not reported. Longer than a read of etcd takes (5 s), so that the
# driver knows the error of etcd by then.
NOTE_AFTER_S = 6.0
LEADS_AGAIN = "this driver leads again"


class TermNotes:
    """News of the term for one stream: once when it is lost, once when it is back.

    ``note``: the note that other answers of the driver have; empty while it leads.
    """

    def __init__(
        self, note: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._note = note
        self._clock = clock
        self._since_s: float | None = None
        self._said = False

    def news(self) -> str:
        """The current news; usually empty."""
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
    """Pass on ``answers`` until they end or ``event`` is set, even if they are waited for then.

    Between two answers, and every LOOK_S while none comes, also the result of ``news``, if any.
    """
    ended = asyncio.ensure_future(event.wait())
    coming: asyncio.Future[Answer] | None = None
    try:
        while not ended.done():
            # A separate task: the wait for the next answer may last forever, and is abandoned when
            # the event comes first.
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
            # The client is gone: discard the result or the error.
            await asyncio.gather(coming, return_exceptions=True)

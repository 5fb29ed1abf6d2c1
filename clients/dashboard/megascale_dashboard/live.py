"""Server-sent events: a browser is notified when the page that it shows has changed.

A notice has only the page's digest; the browser then fetches the JSON twin, compressed. Streams are
bounded in number and in time; a browser connects again by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

from megascale_client import MegascaleError, Unavailable
from megascale_dashboard.page_values import Page

INTERVAL_S = 2.0
MAX_STREAMS = 64
STREAM_S = 1800.0
SILENT_ROUNDS = 7  # then a comment keeps proxies from closing the stream


def digest(page: Page) -> str:
    """A short name of the page's content."""
    text = json.dumps(page, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


class LiveStreams:
    """The open streams of all browsers."""

    def __init__(self, interval_s: float = INTERVAL_S, most: int = MAX_STREAMS) -> None:
        self._interval_s = interval_s
        self._most = most
        self.open = 0

    @property
    def full(self) -> bool:
        """Whether no further stream can be opened."""
        return self.open >= self._most

    async def stream(self, read: Callable[[], Awaitable[Page]]) -> AsyncIterator[str]:
        """Notices of one page: ``changed`` with its digest, ``away`` with the reason."""
        # One comparison per interval for each browser costs little: pages of one cluster share the
        # answers that they are made of (ClusterReader).
        self.open += 1
        loop = asyncio.get_running_loop()
        until_s, last, rounds = loop.time() + STREAM_S, "", 0
        try:
            while loop.time() < until_s:
                try:
                    notice = f"event: changed\ndata: {digest(await read())}\n\n"
                except Unavailable as error:
                    notice = f"event: away\ndata: {json.dumps(str(error))}\n\n"
                except MegascaleError as error:  # the twin shows it
                    notice = f"event: changed\ndata: {digest({'error': str(error)})}\n\n"
                rounds += 1
                if notice != last:
                    yield notice
                    last, rounds = notice, 0
                elif rounds >= SILENT_ROUNDS:
                    yield ": still here\n\n"
                    rounds = 0
                await asyncio.sleep(self._interval_s)
        finally:
            self.open -= 1

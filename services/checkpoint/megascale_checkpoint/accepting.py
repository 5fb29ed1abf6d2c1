"""Takes connections of a listening socket, a bounded number at a time, until it is cancelled."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from megascale_common.service import logs

log = logs.get("accepting")
PAUSE_S = 0.2  # after running out of descriptors: a connection that ends frees some
REPORT_INTERVAL_S = 10.0  # of refused connections: whoever makes them must not fill the log


class Reported:
    """A line of the log about connections: one in REPORT_INTERVAL_S at most, with their count."""

    def __init__(self, event: str, **fields: object) -> None:
        self._event = event
        self._fields = fields
        self._count = 0
        self._due_s = 0.0

    def one_more(self) -> None:
        """Count one, and log if it is time."""
        self._count += 1
        if time.monotonic() >= self._due_s:
            log.warning(self._event, count=self._count, **self._fields)
            self._count = 0
            self._due_s = time.monotonic() + REPORT_INTERVAL_S


async def accept_all(
    listener: socket.socket,
    who: str,
    full: Callable[[], bool],
    take: Callable[[socket.socket], None],
) -> None:
    """Give each new connection to ``take``; while ``full`` is true it is closed at once.

    ``who`` connects, for the log.
    """
    loop = asyncio.get_running_loop()
    refused = Reported("connections refused: too many", who=who)
    while True:
        try:
            sock, _ = await loop.sock_accept(listener)
        except OSError as error:
            log.error("cannot accept", who=who, error=str(error))
            await asyncio.sleep(PAUSE_S)
            continue
        if full():
            refused.one_more()
            sock.close()
            continue
        take(sock)

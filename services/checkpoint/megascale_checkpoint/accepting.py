"""Takes connections of a listening socket, a bounded number at a time, until it is cancelled."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sized

from megascale_common.service import logs

log = logs.get("accepting")
PAUSE_S = 0.2  # after running out of descriptors: a connection that ends frees some


async def accept_all(
    listener: socket.socket,
    who: str,
    connections: Sized,
    limit: int,
    take: Callable[[socket.socket], None],
) -> None:
    """Give each new connection to ``take``, which adds it to ``connections`` while it lasts.

    ``who`` connects, for the log. Above ``limit`` a connection is closed at once.
    """
    loop = asyncio.get_running_loop()
    while True:
        try:
            sock, _ = await loop.sock_accept(listener)
        except OSError as error:
            log.error("cannot accept", who=who, error=str(error))
            await asyncio.sleep(PAUSE_S)
            continue
        if len(connections) >= limit:
            log.warning("connection refused: too many", who=who, limit=limit)
            sock.close()
            continue
        take(sock)

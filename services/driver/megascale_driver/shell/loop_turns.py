"""How many messages of nodes are handled in one turn of the event loop.

gRPC hands over all messages that have arrived as one batch, each of which has its own task, and one
new call. Where more arrives than the driver can handle at once (an attempt starts on all its nodes,
a fleet returns, its processor is busy with something else), thousands of messages are ready in a
turn: no tick and no answer of etcd has one before they are through, and of the nodes that dial one
gets in. Those that are in beat meanwhile, so the turns grow, and the rest never gets in. So each
message takes a place first; what finds none waits for the next turns, in the order of arrival.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 8  # messages in a turn, beside one new call: less than a millisecond


class LoopTurns:
    """Places in the turns of the running loop, AT_ONCE in each."""

    def __init__(self) -> None:
        self._left = AT_ONCE
        self._scheduled = False
        self._waiting: deque[tuple[asyncio.Future[None], float]] = deque()

    def take(self) -> bool:
        """Take a place in this turn; False if none is left: :meth:`wait` for one.

        A call of its own, since most messages need no more than this.
        """
        if self._waiting or not self._left:
            return False
        self._left -= 1
        self._renew()
        return True

    async def wait(self) -> None:
        """Take a place in one of the next turns."""
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append((place, loop.time()))
        self._renew()
        await place

    def waited_s(self) -> float:
        """For how long the message has waited that came first; 0 if none waits."""
        if not self._waiting:
            return 0.0
        return asyncio.get_running_loop().time() - self._waiting[0][1]

    def _renew(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._scheduled = False
        self._left = AT_ONCE
        while self._waiting and self._left:
            place, _ = self._waiting.popleft()
            if not place.done():  # its link may have ended meanwhile
                place.set_result(None)
                self._left -= 1
        if self._left < AT_ONCE or self._waiting:
            self._renew()

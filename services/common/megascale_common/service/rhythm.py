"""Waits that keep a rhythm: the moments of work that is done again and again.

Sleeping for an interval after each piece of work drifts by the time that the work took. A rhythm
does not: its moments are whole intervals apart, so how long a look at etcd took says nothing about
when the next one is.
"""

from __future__ import annotations

import asyncio
import math


class Rhythm:
    """The moments ``interval_s`` apart from now on, on the clock of the running event loop."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._began_s = asyncio.get_running_loop().time()
        self._beats = 0

    async def wait(self) -> None:
        """Sleep until the next moment; those that passed during the work are left out."""
        now_s = asyncio.get_running_loop().time()
        passed = (now_s - self._began_s) / self._interval_s
        self._beats = max(self._beats + 1, math.ceil(passed))
        await asyncio.sleep(self._began_s + self._beats * self._interval_s - now_s)

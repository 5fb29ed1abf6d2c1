"""Waiting between attempts at something that failed."""

from __future__ import annotations

import asyncio
import random


class Backoff:
    """Exponential back-off with full jitter, so that peers of one service do not return in step.

    Args:
        lowest_s: limit of the first wait; no wait is shorter than half of it.
        highest_s: the limit doubles up to here.
    """

    def __init__(self, lowest_s: float, highest_s: float) -> None:
        self._lowest_s = lowest_s
        self._highest_s = highest_s
        self._limit_s = lowest_s

    def reset(self) -> None:
        """Start with short waits again, after a success."""
        self._limit_s = self._lowest_s

    def next_s(self) -> float:
        """Seconds to wait now: random, up to the limit, which doubles."""
        wait_s = random.uniform(self._lowest_s / 2, self._limit_s)
        self._limit_s = min(2 * self._limit_s, self._highest_s)
        return wait_s

    async def sleep(self) -> None:
        """Wait for `next_s`."""
        await asyncio.sleep(self.next_s())

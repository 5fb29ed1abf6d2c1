"""Waiting for state to change, and the thread pools that keep slow work off the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from megascale_checkpoint.errors import SupersededError

P = ParamSpec("P")
T = TypeVar("T")

MOST_THREADS = 8  # of one pool; copies and checksums of one node saturate its memory with fewer


class Signal:
    """Wakes everybody who waits. Look at the state, then wait: no change in between is missed on
    one event loop.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """The state has changed."""
        event, self._event = self._event, asyncio.Event()
        event.set()

    def next(self) -> asyncio.Event:
        """What the next change sets."""
        return self._event

    async def wait(self) -> None:
        """Return at the next change."""
        await self._event.wait()


class Cancellation:
    """Tells a thread to stop at its next look."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Stop soon."""
        self._event.set()

    def check(self) -> None:
        """Raise SupersededError when cancelled."""
        self.pause(0.0)

    def pause(self, duration_s: float) -> None:
        """Sleep in a thread. Raise SupersededError as soon as cancelled."""
        if self._event.wait(duration_s):
            raise SupersededError(
                "cancelled: a later attempt has begun, the worker is gone, or the daemon ends"
            )


class Pools:
    """Bounded threads, one pool per kind of work, so that a slow disk never delays the seal of a
    snapshot.

    ``memory``: allocation, checksums. ``storage``: shard files, both ways. ``commits``: log and
    manifests.
    """

    def __init__(self) -> None:
        count = min(MOST_THREADS, max(2, os.cpu_count() or 1))
        self.memory = ThreadPoolExecutor(count, "memory")
        self.storage = ThreadPoolExecutor(count, "storage")
        self.commits = ThreadPoolExecutor(2, "commits")

    def close(self) -> None:
        """Let running work end, start no more."""
        for pool in (self.memory, self.storage, self.commits):
            pool.shutdown(wait=False, cancel_futures=True)


async def in_pool(
    pool: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run a blocking call in ``pool``."""
    return await asyncio.get_running_loop().run_in_executor(pool, lambda: call(*args, **kwargs))

"""Signals between coroutines, and cancellable work in thread pools, off the event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from megascale_common.service.errors import SupersededError

P = ParamSpec("P")
T = TypeVar("T")

MOST_THREADS = 8  # per pool; fewer already saturate a node's memory with copies and checksums


class Signal:
    """Wakes every coroutine that waits for a change of some state.

    Check the state, then ``wait()``, without an await in between: on one event loop no change can
    be missed. Where an await lies in between, take ``next()`` before the check.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Report that the state has changed."""
        # A fresh event for each change: who waits is woken, who comes later waits for the next.
        event, self._event = self._event, asyncio.Event()
        event.set()

    def next(self) -> asyncio.Event:
        """The event that the next change sets."""
        return self._event

    async def wait(self) -> None:
        """Return at the next change."""
        await self._event.wait()


class Cancellation:
    """Asks a thread to stop; the thread checks it between two chunks of work."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        """Ask the thread to stop."""
        self._event.set()

    def check(self) -> None:
        """Raise SupersededError when cancelled."""
        self.pause(0.0)

    def pause(self, duration_s: float) -> None:
        """Sleep in the thread. Raise SupersededError as soon as cancelled."""
        if self._event.wait(duration_s):
            raise SupersededError(
                "cancelled: a later attempt has begun, the worker is gone, or the daemon ends"
            )


class Pools:
    """Bounded thread pools, one per kind of work: a slow disk never delays the seal of a snapshot.

    ``memory``: allocation and checksums. ``storage``: rank files, read and written. ``commits``:
    commit log and manifests.
    """

    def __init__(self) -> None:
        count = min(MOST_THREADS, max(2, os.cpu_count() or 1))
        self.memory = ThreadPoolExecutor(count, "memory")
        self.storage = ThreadPoolExecutor(count, "storage")
        self.commits = ThreadPoolExecutor(2, "commits")

    def close(self) -> None:
        """Drop queued work; running work ends by itself."""
        for pool in (self.memory, self.storage, self.commits):
            pool.shutdown(wait=False, cancel_futures=True)


async def in_pool(
    pool: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run a blocking call in ``pool``."""
    return await asyncio.get_running_loop().run_in_executor(pool, lambda: call(*args, **kwargs))

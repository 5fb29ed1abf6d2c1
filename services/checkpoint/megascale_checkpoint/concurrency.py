"""Signals between coroutines, and cancellable work in thread pools, off the event loop."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from megascale_common.service import logs
from megascale_common.service.errors import SupersededError, UnavailableError
from megascale_job.visible import agreed, counted

P = ParamSpec("P")
T = TypeVar("T")
log = logs.get("accepting")

MOST_WAITING = 64  # pieces of work in a lane; more means that its storage is stuck
IDLE_S = 30.0  # after which the thread of a lane ends
POPULATED_AT_ONCE = 2  # slots, each by several threads
BURST_S = 0.25  # how much of a second's bytes may move at once after a pause
LEAST_CHUNK_BYTES = 64 * 1024
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
        event = self._event
        self._event = asyncio.Event()
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
        self._parts: weakref.WeakSet[Cancellation] = weakref.WeakSet()

    def part(self) -> Cancellation:
        """One that is cancelled with this one, and can be cancelled alone."""
        part = Cancellation()
        self._parts.add(part)
        if self._event.is_set():
            part.cancel()
        return part

    def cancel(self) -> None:
        """Ask the thread to stop."""
        self._event.set()
        for part in list(self._parts):
            part.cancel()

    def check(self) -> None:
        """Raise SupersededError when cancelled."""
        self.pause(0.0)

    def pause(self, duration_s: float) -> None:
        """Sleep in the thread. Raise SupersededError as soon as cancelled."""
        if self._event.wait(duration_s):
            raise SupersededError(
                "cancelled: a later attempt has begun, the worker is gone, or the daemon ends"
            )


@dataclass(slots=True)
class TokenBucket:
    """Bytes per second, without a clock of its own; ``bytes_per_s`` 0 is no limit.

    Attributes:
        paid_s: until when the bytes taken so far are paid for; may lie BURST_S before the present.
    """

    bytes_per_s: float
    paid_s: float = float("-inf")

    def take(self, size_bytes: int, now_s: float) -> float:
        """Take so many bytes; returns how many seconds to wait before they are moved.

        Several threads that take in turn each wait for those before them.
        """
        if not self.bytes_per_s:
            return 0.0
        self.paid_s = max(self.paid_s, now_s - BURST_S) + size_bytes / self.bytes_per_s
        return max(0.0, self.paid_s - now_s)

    @property
    def chunk_bytes(self) -> int:
        """How much to take at once, so that no wait is long."""
        return max(LEAST_CHUNK_BYTES, int(self.bytes_per_s * BURST_S))


class Lane:
    """One thread that does one piece of work after the other, in the order given.

    A caller may stop waiting; what has begun is finished before the next piece begins. The thread
    starts with the first piece and ends after IDLE_S without one; a stuck one does not keep the
    process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Pieces of work that have not ended."""
        return self._waiting

    async def run(self, call: Callable[[], T], timeout_s: float | None = None) -> T:
        """The result of ``call``, in the lane's thread.

        Work that has not begun when the caller is cancelled or times out never begins.

        Raises:
            UnavailableError: it took longer than ``timeout_s``, or too much work waits.
        """
        future = self._submit(call)
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise UnavailableError(
                f"{self._name}: the storage has not answered for {timeout_s:.0f} s",
                reason="STORAGE_UNAVAILABLE",
            ) from error

    def _submit(self, call: Callable[[], T]) -> Future[T]:
        with self._lock:
            if self._waiting >= MOST_WAITING:
                raise UnavailableError(
                    f"{self._name}: {counted(self._waiting, 'call')} "
                    f"{agreed(self._waiting, 'wait')} for the storage",
                    reason="STORAGE_UNAVAILABLE",
                )
            self._waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                self._ended()
                return
            # Counted as ended before its caller learns so: the caller may look at once.
            try:
                result = call()
            except BaseException as error:
                self._ended()
                future.set_exception(error)
            else:
                self._ended()
                future.set_result(result)

        self._queue.put(work)
        return future

    def _ended(self) -> None:
        with self._lock:
            self._waiting -= 1

    def _work(self) -> None:
        while True:
            try:
                work = self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._waiting == 0:
                        self._thread = None
                        return
            else:
                work()


class Pools:
    """Bounded thread pools, one per kind of work: a slow disk never delays the seal of a snapshot.

    ``memory``: allocation and checksums. ``populating``: the pages of slots that nobody waits for.
    ``storage``: rank files, read and written; each job has
    threads of its own (:meth:`for_job`), because one job's storage may hang. The commit log has a
    :class:`Lane` for each job.
    """

    def __init__(self, node: Pools | None = None) -> None:
        self.threads = count = min(MOST_THREADS, max(2, os.cpu_count() or 1))
        self._node = node
        self.memory: ThreadPoolExecutor
        self.populating: ThreadPoolExecutor
        if node is None:
            self.memory = ThreadPoolExecutor(count, "memory")
            self.populating = ThreadPoolExecutor(POPULATED_AT_ONCE, "populating")
        else:
            self.memory = node.memory
            self.populating = node.populating
        self.storage = ThreadPoolExecutor(count, "storage")

    def for_job(self) -> Pools:
        """Pools with threads of their own for storage, to be closed by the caller."""
        return Pools(self)

    def close(self) -> None:
        """Drop queued work; running work ends by itself."""
        self.storage.shutdown(wait=False, cancel_futures=True)
        if self._node is None:
            self.memory.shutdown(wait=False, cancel_futures=True)
            self.populating.shutdown(wait=False, cancel_futures=True)


async def in_pool(
    pool: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run a blocking call in ``pool``."""
    return await asyncio.get_running_loop().run_in_executor(pool, lambda: call(*args, **kwargs))


# Takes connections of a listening socket, a bounded number at a time, until it is cancelled.

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

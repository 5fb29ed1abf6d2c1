"""Signals between coroutines, cancellable work in threads, token buckets, and accept loops."""

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

MOST_WAITING = 64  # calls in a lane; more means that its storage is stuck
IDLE_S = 30.0  # the thread of an idle lane ends after this time
POPULATED_AT_ONCE = 2  # slots, each by several threads
BURST_S = 0.25  # bytes that can move at once after a pause, as time at the full rate
LEAST_CHUNK_BYTES = 64 * 1024
MOST_THREADS = 8  # per pool; copies and checksums by fewer already saturate a node's memory


class Signal:
    """Wakes every coroutine that waits for a change of some state.

    Check the state, then ``wait()``, without an await in between: on one event loop no change can
    be missed. If there is an await in between, take ``next()`` before the check.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Report that the state has changed."""
        # A new event per change: those who wait now are woken, later ones wait for the next change.
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
    """A request to a thread to stop, which the thread checks between two chunks of work."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._parts: weakref.WeakSet[Cancellation] = weakref.WeakSet()

    def part(self) -> Cancellation:
        """A cancellation that is set together with this one, and can also be set alone."""
        part = Cancellation()
        self._parts.add(part)
        if self._event.is_set():  # checked after the part was added, so that no cancel is missed
            part.cancel()
        return part

    def cancel(self) -> None:
        """Ask the thread to stop."""
        self._event.set()
        for part in list(self._parts):
            part.cancel()

    def check(self) -> None:
        """Raise SupersededError if cancelled."""
        self.pause(0.0)

    def pause(self, duration_s: float) -> None:
        """Sleep in the thread; raise SupersededError as soon as cancelled."""
        if self._event.wait(duration_s):
            raise SupersededError(
                "cancelled: a later attempt has begun, the worker is gone, or the daemon ends"
            )


@dataclass(slots=True)
class TokenBucket:
    """Limits bytes per second, without a clock of its own; ``bytes_per_s`` 0 is no limit.

    Attributes:
        paid_s: time until which the bytes taken so far fill the rate; a pause can leave it at most
            BURST_S in the past, which is the burst.
    """

    bytes_per_s: float
    paid_s: float = float("-inf")

    def take(self, size_bytes: int, now_s: float) -> float:
        """Take ``size_bytes``; returns the seconds to wait before they are moved.

        If several threads take in turn, each waits for those before it.
        """
        if not self.bytes_per_s:
            return 0.0
        self.paid_s = max(self.paid_s, now_s - BURST_S) + size_bytes / self.bytes_per_s
        return max(0.0, self.paid_s - now_s)

    @property
    def chunk_bytes(self) -> int:
        """Bytes to take at once, small enough that no wait is long."""
        return max(LEAST_CHUNK_BYTES, int(self.bytes_per_s * BURST_S))


class Lane:
    """One thread that runs calls one after the other, in the order given.

    A caller can stop waiting; a call that has begun still ends before the next one begins. The
    thread starts with the first call and ends after IDLE_S without one; a stuck one does not keep
    the process from ending.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Number of calls that have not ended."""
        return self._waiting

    async def run(self, call: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run ``call`` in the lane's thread and return its result.

        A call that has not begun when the caller is cancelled or times out never begins.

        Raises:
            UnavailableError: it took longer than ``timeout_s``, or too many calls wait.
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
                # A daemon thread, so that one stuck in a storage does not keep the process alive.
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                self._ended()
                return
            # Counted as ended before the caller gets the result, since it may look at the count.
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
                # Under the lock of _submit: no call is queued to a thread that has decided to end.
                with self._lock:
                    if self._waiting == 0:
                        self._thread = None
                        return
            else:
                work()


class Pools:
    """Bounded thread pools, one per kind of work: a slow disk never delays the seal of a snapshot.

    Attributes:
        memory: allocation and checksums.
        populating: allocates the pages of slots ahead of their use.
        storage: reads and writes rank files. Each job has its own threads (:meth:`for_job`),
            because one job's storage may hang. Commit logs have a :class:`Lane` each instead.
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
        """Pools with storage threads of their own, to be closed by the caller."""
        return Pools(self)

    def close(self) -> None:
        """Drop queued work; calls that run end by themselves."""
        self.storage.shutdown(wait=False, cancel_futures=True)
        if self._node is None:
            self.memory.shutdown(wait=False, cancel_futures=True)
            self.populating.shutdown(wait=False, cancel_futures=True)


async def in_pool(
    pool: ThreadPoolExecutor, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run a blocking call in ``pool``."""
    return await asyncio.get_running_loop().run_in_executor(pool, lambda: call(*args, **kwargs))


PAUSE_S = 0.2  # after running out of descriptors, until a connection ends and frees some
REPORT_INTERVAL_S = 10.0  # a flood of refused connections must not fill the log


class Reported:
    """A log line about connections: at most one per REPORT_INTERVAL_S, with their count."""

    def __init__(self, event: str, **fields: object) -> None:
        self._event = event
        self._fields = fields
        self._count = 0
        self._due_s = 0.0

    def one_more(self) -> None:
        """Count one connection, and log if it is time."""
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
    """Pass each new connection to ``take``, until cancelled; close it at once if ``full`` is true.

    Args:
        who: the callers, for the log.
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

"""Batches of spans on their way into the store, and out of it: bounded, and beside the loop.

Nothing waits for telemetry: a batch for which there is no room is dropped and counted. One thread
does everything that touches the store, so its files have one writer.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from megascale.v1 import link_pb2
from megascale_common.service import logs
from megascale_driver.telemetry.store import SpanStore

MAX_WAITING_BYTES = 64 << 20
STORE_S = 1.0

P = ParamSpec("P")
T = TypeVar("T")
_log = logs.get(__name__)


class SpanIntake:
    """The queue before a store. ``counts``: spans by what became of them."""

    def __init__(self, store: SpanStore, limit_bytes: int = MAX_WAITING_BYTES) -> None:
        self._store = store
        self._limit = limit_bytes
        self._waiting: deque[link_pb2.ReportSpansRequest] = deque()
        self._bytes = 0
        self._thread = ThreadPoolExecutor(1, "spans")
        self.counts: Counter[str] = Counter(stored=0, dropped=0, damaged=0)
        self._failed = False

    def take(self, batch: link_pb2.ReportSpansRequest) -> bool:
        """Take a batch; False if there is no room for it. Never waits."""
        size = batch.ByteSize() if batch.counters else len(batch.columns)
        if self._bytes + size > self._limit:
            self.counts["dropped"] += batch.count
            return False
        self._waiting.append(batch)
        self._bytes += size
        return True

    async def run(self) -> None:
        """Store what has come, for ever."""
        while True:
            await asyncio.sleep(STORE_S)
            await self.store_waiting()

    async def store_waiting(self) -> None:
        """Store what waits now."""
        batches, size = list(self._waiting), self._bytes
        self._waiting.clear()
        try:
            counts = await self.ask(self._store.add, batches)
        except OSError as error:
            self.counts["dropped"] += sum(batch.count for batch in batches)
            if not self._failed:
                _log.warning("spans cannot be stored, and are dropped", reason=str(error))
            self._failed = True
        else:
            self.counts.update(counts)
            self._failed = False
        finally:
            self._bytes -= size

    async def ask(self, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Run a method of the store, or what reads it, in the store's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, functools.partial(call, *args, **named))

    async def close(self) -> None:
        """Store what waits, and end."""
        await self.store_waiting()
        try:
            await self.ask(self._store.flush)
        except OSError as error:
            _log.warning("the last spans cannot be stored", reason=str(error))
        self._thread.shutdown()

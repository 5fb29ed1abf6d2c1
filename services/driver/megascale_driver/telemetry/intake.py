"""Batches of spans on their way into the store, and queries of it.

Note [One store thread]. Everything that touches the store runs in one thread outside the event
loop: writing batches, merging files, and also the queries and the arithmetic of heat map, slow
nodes, decline and timeline. So the files have one writer, a query never sees half of a merge, and
no lock is needed. A long query delays the others and the next write, but never heartbeats or
decisions. Writes cannot pile up meanwhile: the queue of batches is bounded, and a batch for which
there is no room is dropped and counted. Every query is bounded too (see
:mod:`megascale_driver.telemetry.views`).
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
    """The queue in front of a store. ``counts``: numbers of spans stored, dropped and damaged."""

    def __init__(self, store: SpanStore, limit_bytes: int = MAX_WAITING_BYTES) -> None:
        self._store = store
        self._limit = limit_bytes
        self._waiting: deque[link_pb2.ReportSpansRequest] = deque()
        self._bytes = 0
        self._thread = ThreadPoolExecutor(1, "spans")
        self.counts: Counter[str] = Counter(stored=0, dropped=0, damaged=0)
        self._failed = False

    def take(self, batch: link_pb2.ReportSpansRequest) -> bool:
        """Queue a batch without waiting; False if there is no room for it."""
        size = batch.ByteSize() if batch.counters else len(batch.columns)
        if self._bytes + size > self._limit:
            self.counts["dropped"] += batch.count
            return False
        self._waiting.append(batch)
        self._bytes += size
        return True

    async def run(self) -> None:
        """Store the queued batches every STORE_S, without end."""
        while True:
            await asyncio.sleep(STORE_S)
            await self.store_waiting()

    async def store_waiting(self) -> None:
        """Store the batches that are queued now."""
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
        """Run a method of the store, or a query of it, in the store's thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, functools.partial(call, *args, **named))

    async def close(self) -> None:
        """Store the queued batches, write all that is held to files, and end the thread."""
        await self.store_waiting()
        try:
            await self.ask(self._store.flush)
        except OSError as error:
            _log.warning("the last spans cannot be stored", reason=str(error))
        self._thread.shutdown()

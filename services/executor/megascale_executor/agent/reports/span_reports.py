"""Sends the spans in the ranks' rings to the driver, in batches and on a connection of their own.

Every few seconds one batch carries the node's counters instead.

Telemetry never delays anything else. Rings are read in a thread, a bounded part at a time. Batches
wait in a bounded queue; when it is full the newest one is dropped and counted. A driver that reads
slowly therefore fills only that queue: the link uses another connection.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from megascale.v1 import link_pb2, link_pb2_grpc
from megascale_common.node.spans.record import SPAN, to_columns
from megascale_common.node.spans.ring import SpanRingReader
from megascale_common.service import logs
from megascale_common.service.errors import OptionError
from megascale_common.service.wire_text import encodable
from megascale_executor.agent.attempt import NO_ATTEMPT, AttemptKey
from megascale_executor.counters.sampler import WITH_SPANS, Sample

_log = logs.get(__name__)

READ_S = 1.0
COUNTERS_S = 5.0
MAX_BATCHES = 64  # in the queue; each has at most 64 KiB
# With the most operations that a rank can have, a batch of this size is below 64 KiB uncompressed.
BATCH_SPANS = 1024
_BATCHES_PER_READ = 8  # of one ring, which holds no more than that
_RETRY_S = 2.0
_UNKNOWN_RETRY_S = 60.0  # for a driver of a build without this call
_CLOCK_READINGS = 5


@dataclass(slots=True)
class _Ring:
    """The ring of one rank. ``taken``: records whose operations could not be read yet."""

    rank: int
    path: Path
    reader: SpanRingReader | None = None
    taken: bytes = b""
    dropped: int = 0
    damaged: bool = False


@dataclass(frozen=True, slots=True)
class _Watched:
    key: AttemptKey = NO_ATTEMPT
    rings: tuple[_Ring, ...] = ()


class SpanReports:
    """The spans of one node's ranks, and their sender."""

    def __init__(
        self,
        node: str,
        limit: int = MAX_BATCHES,
        counters: Callable[[], Sample] = Sample,
        counters_s: float = COUNTERS_S,
    ) -> None:
        """``counters`` returns the newest sample, sent every ``counters_s`` during an attempt."""
        self._node = node
        self._limit = limit
        self._counters = counters
        self._counters_s = counters_s
        self._counted_s = -math.inf
        self._watched = _Watched()
        self._reading = threading.Lock()  # guards the rings of ``_watched``
        self._waiting: deque[link_pb2.ReportSpansRequest] = deque()
        self._filled = asyncio.Event()
        self.sent = 0
        # Lost spans by where there was no room: "ring" if the agent was slower than the rank,
        # "queue" if the driver was slower than the agent.
        self.dropped: Counter[str] = Counter(ring=0, queue=0)

    def __len__(self) -> int:
        """Number of batches that wait to be sent."""
        return len(self._waiting)

    def watch(self, key: AttemptKey, rings: Mapping[int, Path]) -> None:
        """Read the rings of this attempt, by rank, from now on; they need not exist yet."""
        self._watched = _Watched(key, tuple(_Ring(rank, path) for rank, path in rings.items()))

    async def run(self) -> None:
        """Read the rings every READ_S."""
        while True:
            await asyncio.sleep(READ_S)
            await self.read()

    async def read(self) -> None:
        """Move the spans in the rings to the queue."""
        for batch in await asyncio.to_thread(self._read_all):
            if len(self._waiting) >= self._limit:
                self.dropped["queue"] += batch.count
                continue
            self._waiting.append(batch)
            self._filled.set()

    async def end(self) -> None:
        """Read once more after the ranks have ended, then close the rings."""
        await self.read()
        watched = self._watched
        self._watched = _Watched()
        await asyncio.to_thread(self._close, watched)

    async def send_forever(self, open_channel: Callable[[], grpc.aio.Channel]) -> None:
        """Send the batches over channels that ``open_channel`` opens, one after the other."""
        while True:
            await self._filled.wait()
            pause_s = _RETRY_S
            try:
                async with open_channel() as channel:
                    stub: link_pb2_grpc.ExecutorLinkServiceAsyncStub = (
                        link_pb2_grpc.ExecutorLinkServiceStub(channel)
                    )
                    await stub.ReportSpans(self._requests())
            except grpc.aio.AioRpcError as error:
                _log.info("the driver takes no spans", reason=error.details())
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    pause_s = _UNKNOWN_RETRY_S
            except OptionError as error:  # certificates that are being replaced
                _log.info("spans cannot be sent", reason=str(error))
            await asyncio.sleep(pause_s)

    async def _requests(self) -> AsyncIterator[link_pb2.ReportSpansRequest]:
        while True:
            await self._filled.wait()
            # Removed before it is sent, because a batch that may have arrived must not be sent
            # again: the driver would count its spans twice.
            batch = self._waiting.popleft()
            if not self._waiting:
                self._filled.clear()
            self.sent += batch.count
            yield batch

    def _read_all(self) -> list[link_pb2.ReportSpansRequest]:
        with self._reading:
            watched = self._watched
            offset_ns, error_ns = unix_offset()
            found = []
            for ring in watched.rings:
                for batch in self._read_ring(watched.key, ring):
                    batch.unix_offset_ns = offset_ns
                    batch.unix_offset_error_ns = error_ns
                    found.append(batch)
            found += self._read_counters(watched)
            return found

    def _read_counters(self, watched: _Watched) -> list[link_pb2.ReportSpansRequest]:
        """A batch of the node's counters if one is due and ranks run."""
        now_s = time.monotonic()
        running = [ring.rank for ring in watched.rings if ring.reader is not None]
        if not running or now_s - self._counted_s < self._counters_s:
            return []
        chosen = [each for each in self._counters().readings if each.name in WITH_SPANS]
        if not chosen:
            return []
        self._counted_s = now_s
        batch = link_pb2.ReportSpansRequest(
            node=self._node,
            job=watched.key.job,
            attempt=watched.key.attempt,
            rank=running[0],
            counters_at_unix_ns=time.time_ns(),
        )
        for each in chosen:
            batch.counters.add(name=each.name, target=encodable(each.target), value=each.value)
        return [batch]

    def _read_ring(self, key: AttemptKey, ring: _Ring) -> list[link_pb2.ReportSpansRequest]:
        if ring.damaged or not _opened(key, ring):
            return []
        assert ring.reader is not None
        batches: list[link_pb2.ReportSpansRequest] = []
        try:
            for _ in range(_BATCHES_PER_READ):
                ring.taken = ring.taken or ring.reader.take(BATCH_SPANS)
                if not ring.taken:
                    break
                try:
                    operations = ring.reader.ops()
                except ValueError:
                    break  # the rank is writing them; the next read gets them
                batch = link_pb2.ReportSpansRequest(
                    node=self._node,
                    job=key.job,
                    attempt=key.attempt,
                    rank=ring.rank,
                    count=len(ring.taken) // SPAN.size,
                    columns=zlib.compress(to_columns(ring.taken), 1),
                )
                for op in operations:
                    batch.operations.add(name=op.name, kind=op.kind, group=op.group)
                batches.append(batch)
                ring.taken = b""
            dropped = ring.reader.dropped
            self.dropped["ring"] += dropped - ring.dropped
            ring.dropped = dropped
        except (OSError, ValueError) as error:
            ring.damaged = True
            _log.warning("a ring of spans is no longer read", rank=ring.rank, error=str(error))
        return batches

    def _close(self, watched: _Watched) -> None:
        with self._reading:
            for ring in watched.rings:
                if ring.reader is not None:
                    ring.reader.close()
                    ring.reader = None
                ring.damaged = True


def unix_offset() -> tuple[int, int]:
    """Unix time minus the monotonic clock in ns, and a bound on its error in ns."""
    best = (0, 1 << 62)
    for _ in range(_CLOCK_READINGS):
        before, unix, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        error_ns = (after - before + 1) // 2
        if error_ns < best[1]:
            best = (unix - (before + after) // 2, error_ns)
    return best


def _opened(key: AttemptKey, ring: _Ring) -> bool:
    """Whether the ring can be read; a rank without measurements has none."""
    if ring.reader is not None:
        return True
    try:
        reader = SpanRingReader(ring.path)
    except OSError:
        return False
    except ValueError as error:
        ring.damaged = True
        _log.warning("a ring of spans cannot be read", rank=ring.rank, error=str(error))
        return False
    if (reader.rank, reader.attempt) != (ring.rank, key.attempt):
        reader.close()
        return False
    ring.reader = reader
    return True

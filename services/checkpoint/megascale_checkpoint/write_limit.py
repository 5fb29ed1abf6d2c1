"""The bandwidth limit of stage 2: what one job writes to storage from one node.

The ranks of a job on a node share one token bucket, which lives in the node's daemon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megascale_checkpoint.concurrency import Cancellation

MIB = 2**20
BURST_S = 0.25  # how much of a second's bytes may be written at once after a pause
LEAST_CHUNK_BYTES = 64 * 1024
KEPT_JOBS = 64


@dataclass(slots=True)
class TokenBucket:
    """Bytes per second, without a clock of its own.

    Attributes:
        paid_s: until when the bytes taken so far are paid for; may lie BURST_S before the present.
    """

    bytes_per_s: float
    paid_s: float = float("-inf")

    def take(self, size_bytes: int, now_s: float) -> float:
        """Take so many bytes; returns how many seconds to wait before they are written."""
        self.paid_s = max(self.paid_s, now_s - BURST_S) + size_bytes / self.bytes_per_s
        return max(0.0, self.paid_s - now_s)

    @property
    def chunk_bytes(self) -> int:
        """How much to take at once, so that no wait is long."""
        return max(LEAST_CHUNK_BYTES, int(self.bytes_per_s * BURST_S))


class WriteLimits:
    """The buckets of a daemon's jobs; for any number of threads."""

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}
        self._lock = threading.Lock()

    def paced(
        self,
        job: str,
        mib_per_s: float,
        chunks: Iterable[memoryview],
        cancelled: Cancellation,
    ) -> Iterator[memoryview]:
        """The chunks, perhaps in smaller ones, no faster than the job's limit; 0 is no limit.

        Raises:
            SupersededError: cancelled while it waits.
        """
        if not mib_per_s:
            yield from chunks
            return
        for chunk in chunks:
            rest = chunk
            while rest:
                size, wait_s = self._take(job, mib_per_s * MIB, len(rest))
                cancelled.pause(wait_s)
                yield rest[:size]
                rest = rest[size:]

    def _take(self, job: str, bytes_per_s: float, wanted: int) -> tuple[int, float]:
        with self._lock:
            bucket = self._buckets.pop(job, None) or TokenBucket(bytes_per_s)
            self._buckets[job] = bucket  # the least recently used one is the first
            while len(self._buckets) > KEPT_JOBS:
                del self._buckets[next(iter(self._buckets))]
            bucket.bytes_per_s = bytes_per_s  # a later attempt may have another limit
            size = min(wanted, bucket.chunk_bytes)
            return size, bucket.take(size, time.monotonic())


LIMITS = WriteLimits()

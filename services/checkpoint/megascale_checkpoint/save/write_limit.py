"""The bandwidth limit of stage 2: what one job writes to storage from one node.

The ranks of a job on a node share one token bucket, which lives in the node's daemon. Its rate is
the job's own limit, or the lower one that steps beside it allow for now
(:class:`PersistPace`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from megascale_checkpoint.concurrency import Cancellation, TokenBucket

MIB = 2**20
KEPT_JOBS = 64
HELD_PAUSE_S = 0.05  # between two looks at whether writing is still held
# A pace ends when no step has come for so long: the run has ended, or waits for the write itself.
PACE_STEPS, LEAST_PACE_S = 5.0, 2.0


@dataclass(frozen=True, slots=True)
class Pace:
    """What steps allow for now: bytes per second (0: any), or nothing while ``hold``."""

    bytes_per_s: float
    hold: bool
    until_s: float


class WriteLimits:
    """The buckets of a daemon's jobs; for any number of threads."""

    def __init__(self) -> None:
        self._buckets: dict[str, TokenBucket] = {}
        self._paces: dict[str, Pace] = {}
        self._taken: dict[str, int] = {}
        self._lock = threading.Lock()

    def set_pace(self, job: str, bytes_per_s: float, *, hold: bool, step_s: float) -> None:
        """What the steps of ``job``, of ``step_s`` each, allow until the next of them."""
        until_s = time.monotonic() + max(LEAST_PACE_S, PACE_STEPS * step_s)
        with self._lock:
            self._paces[job] = Pace(bytes_per_s, hold, until_s)
            while len(self._paces) > KEPT_JOBS:
                del self._paces[next(iter(self._paces))]

    def taken(self, job: str) -> int:
        """Bytes that were given to the storage for ``job`` so far."""
        with self._lock:
            return self._taken.get(job, 0)

    def forget(self, job: str) -> None:
        """The job has no slots here any more."""
        with self._lock:
            for kept in (self._buckets, self._paces, self._taken):
                kept.pop(job, None)

    def paced(
        self,
        job: str,
        mib_per_s: float,
        chunks: Iterable[memoryview],
        cancelled: Cancellation,
        held: Callable[[], None] = lambda: None,
    ) -> Iterator[memoryview]:
        """The chunks, perhaps in smaller ones, no faster than the job's limit; 0 is no limit.

        ``held`` is called again and again while the pace of the job holds writing.

        Raises:
            SupersededError: cancelled while it waits.
        """
        for chunk in chunks:
            rest = chunk
            while rest:
                while (pace := self._pace(job)) is not None and pace.hold:
                    held()
                    cancelled.pause(HELD_PAUSE_S)
                slowed = pace.bytes_per_s if pace is not None else 0.0
                rate = min((each for each in (mib_per_s * MIB, slowed) if each), default=0.0)
                size, wait_s = self._take(job, rate, len(rest))
                if wait_s:
                    cancelled.pause(wait_s)
                yield rest[:size]
                rest = rest[size:]

    def _pace(self, job: str) -> Pace | None:
        with self._lock:
            pace = self._paces.get(job)
            return pace if pace is not None and time.monotonic() < pace.until_s else None

    def _take(self, job: str, bytes_per_s: float, wanted: int) -> tuple[int, float]:
        with self._lock:
            if not bytes_per_s:
                self._taken[job] = self._taken.get(job, 0) + wanted
                return wanted, 0.0
            bucket = self._buckets.pop(job, None) or TokenBucket(bytes_per_s)
            self._buckets[job] = bucket  # the least recently used one is the first
            while len(self._buckets) > KEPT_JOBS:
                del self._buckets[next(iter(self._buckets))]
            bucket.bytes_per_s = bytes_per_s  # a later attempt may have another limit
            size = min(wanted, bucket.chunk_bytes)
            self._taken[job] = self._taken.get(job, 0) + size
            return size, bucket.take(size, time.monotonic())


LIMITS = WriteLimits()


# Slows persistence down while steps are slower beside it than without it: pure, no clock.
#
# The daemon gets the time of each step, and knows beside which of them it wrote to storage. Where
# those take longer than the quiet ones by more than the job tolerates, the job's bandwidth on this
# node is lowered, and raised again as soon as they do not. Nodes decide for themselves: a step
# takes the same time on all of them.

KEPT_QUIET = 64  # steps
LEAST_QUIET = 3  # steps without a write before others are compared with them
WINDOW_STEPS = 8  # beside a write, between two decisions
LOWER, RAISE = 0.7, 1.25
# The bound: a checkpoint becomes durable at most so many times later for it.
LEAST_SHARE = 1 / 8
# A store that is busy all the time leaves no quiet steps: then writing is held for a few.
FIRST_HOLD_AFTER, HOLD_AFTER = 2 * WINDOW_STEPS, 512


class PersistPace:
    """The bandwidth of one job on one node; ``tolerated`` as checkpoint.max_step_slowdown.

    Attributes:
        limit: bytes per second that may be written; 0 is no limit.
        hold: write nothing, until quiet steps have been measured.
        slowdown: by which share steps beside a write took longer, when that was last compared.
    """

    def __init__(self, tolerated: float) -> None:
        self.tolerated = tolerated
        self.limit = 0.0
        self.hold = False
        self.slowdown = 0.0
        self._step = 0
        self._quiet: deque[float] = deque(maxlen=KEPT_QUIET)
        self._beside: list[float] = []
        self._written = 0
        self._beside_s = 0.0
        self._fastest = 0.0  # bytes per second, without a limit
        self._since_quiet = 0
        self._was_writing = False
        self._was_held = False

    def add(self, step: int, time_s: float, *, writing: bool, written: int) -> None:
        """``step`` took ``time_s``; every rank of the node reports it, and the first one counts.

        ``writing``: a state is on its way to storage; ``written``: bytes since the step before.
        """
        if not self.tolerated or step <= self._step:
            return
        self._step = step
        beside = writing and not self.hold
        # A step in which a write, or a hold, began or ended is neither the one nor the other.
        mixed = beside is not self._was_writing or self.hold is not self._was_held
        self._was_writing = beside
        self._was_held = self.hold
        if beside:
            self._written += written
            self._beside_s += time_s
            self._since_quiet += 1
        if mixed:
            return
        if beside:
            self._beside.append(time_s)
        else:
            self._quiet.append(time_s)
            self._since_quiet = 0
        self._decide()

    def _decide(self) -> None:
        known = len(self._quiet) >= LEAST_QUIET
        if self.hold:
            self.hold = not known
            return
        if self._since_quiet >= (HOLD_AFTER if known else FIRST_HOLD_AFTER):
            # What a quiet step takes may have changed since: the old ones are forgotten.
            self._quiet.clear()
            self.hold = True
            return
        if known and len(self._beside) >= WINDOW_STEPS:
            self._compare()

    def _compare(self) -> None:
        self.slowdown = median(self._beside) / median(self._quiet) - 1
        rate = self._written / self._beside_s if self._beside_s else 0.0
        if not self.limit:
            self._fastest = max(self._fastest, rate)
        self._beside.clear()
        self._written = 0
        self._beside_s = 0.0
        if not self._fastest:
            return
        if self.slowdown > self.tolerated:
            lowered = LOWER * (self.limit or rate)
            self.limit = max(LEAST_SHARE * self._fastest, lowered)
        elif self.limit and self.slowdown < self.tolerated / 2:
            raised = RAISE * self.limit
            self.limit = 0.0 if raised >= self._fastest else raised

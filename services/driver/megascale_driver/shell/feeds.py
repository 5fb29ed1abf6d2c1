"""Feeds of jobs for their watchers: a bounded ring of updates per job, with resume tokens.

A token has the ring of this process and a position in it. With a token of another process (the
driver was restarted) a watcher gets everything that is held, from the beginning. A position that is
no longer in the ring is refused, so that a watcher never misses updates without an error.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
from collections import deque
from collections.abc import AsyncIterator, Iterable

from megascale.v1 import driver_pb2, types_pb2
from megascale_common.service.errors import ExpiredError
from megascale_job.visible import agreed, counted

RING_UPDATES = 20_000  # updates held per job
MAX_TOKEN_DIGITS = 18
KEPT_ENDED = 64  # ended jobs whose feeds are kept whole, for late watchers
ENDED_UPDATES = 500  # updates kept of all other ended jobs
PACE_STEPS = 50  # newest steps, whose median time is the pace of a job
BATCH_UPDATES = 256  # updates sent before other tasks get a turn


class JobFeed:
    """The updates of one job, oldest first."""

    def __init__(self, ring_id: str) -> None:
        self.last_record: types_pb2.StepRecord | None = None
        self.last_evaluation: types_pb2.StepRecord | None = None
        self.ended = False
        self._step_times_s: deque[float] = deque(maxlen=PACE_STEPS)
        self._ring_id = ring_id
        self._updates: deque[driver_pb2.WatchJobResponse] = deque(maxlen=RING_UPDATES)
        self._next = 0
        self._last_event = 0
        self._changed = asyncio.Event()

    def add_job(self, job: driver_pb2.Job, ended: bool) -> None:
        """Add a new state of the job; ``ended``: it is the last update."""
        self.ended = ended
        self._add(driver_pb2.WatchJobResponse(job=job))

    def add_event(self, event: types_pb2.Event) -> None:
        """Add a line of the audit log; lines that were added before are ignored."""
        if event.seq <= self._last_event:
            return
        self._last_event = event.seq
        self._add(driver_pb2.WatchJobResponse(event=event))

    def add_step(self, record: types_pb2.StepRecord) -> bool:
        """Add a step record; False if it is known: agents repeat unacknowledged ones."""
        last = self.last_record
        if last is not None and (record.attempt, record.step) <= (last.attempt, last.step):
            return False
        self.last_record = record
        if record.HasField("evaluation_loss"):
            self.last_evaluation = record
        self._step_times_s.append(record.step_time.ToNanoseconds() / 1e9)
        self._add(driver_pb2.WatchJobResponse(step=record))
        return True

    @property
    def typical_step_s(self) -> float | None:
        """Median time of the newest steps; None before the first."""
        return statistics.median(self._step_times_s) if self._step_times_s else None

    def adopt(self, stored: types_pb2.StepRecord) -> types_pb2.StepRecord:
        """Take over the stored record, unless a newer one is held; returns the newest.

        Watchers do not get it as a step: the state of the job, which they get first, has it.
        """
        last = self.last_record or types_pb2.StepRecord()
        if (stored.attempt, stored.step) > (last.attempt, last.step):
            self.last_record = last = stored
        return last

    async def follow(self, token: str) -> AsyncIterator[driver_pb2.WatchJobResponse]:
        """Updates behind ``token`` as they come, until the job has ended.

        Raises:
            ExpiredError: the position is no longer in the ring.
            ValueError: not a token.
        """
        position = self._position(token)
        while True:
            # Taken before the ring is read, so that a later addition sets it.
            changed = self._changed
            first = self._next - len(self._updates)
            if position < first:
                raise ExpiredError(
                    f"{counted(first - position, 'update')} behind the resume token "
                    f"{agreed(first - position, 'are')} no longer held"
                )
            batch = [
                self._updates[i - first]
                for i in range(position, min(self._next, position + BATCH_UPDATES))
            ]
            for update in batch:
                yield update
            position += len(batch)
            if position < self._next:
                continue
            if self.ended:
                return
            await changed.wait()

    def shrink(self) -> None:
        """Drop all but the newest ENDED_UPDATES updates."""
        while len(self._updates) > ENDED_UPDATES:
            self._updates.popleft()

    def _position(self, token: str) -> int:
        ring_id, _, number = token.partition("-")
        is_number = number.isdecimal() and len(number) <= MAX_TOKEN_DIGITS
        if not token or (ring_id != self._ring_id and is_number):
            return self._next - len(self._updates)
        if not is_number or int(number) > self._next:
            raise ValueError(f"{token!r} is not a token that WatchJob returned")
        return int(number)

    def _add(self, update: driver_pb2.WatchJobResponse) -> None:
        self._next += 1
        update.resume_token = f"{self._ring_id}-{self._next}"
        self._updates.append(update)
        # A new event for each update: a follower that holds the old one wakes, and none can miss
        # one.
        self._changed.set()
        self._changed = asyncio.Event()


class JobFeeds:
    """The feeds of all jobs of one driver process."""

    def __init__(self) -> None:
        self._ring_id = secrets.token_hex(6)
        self._feeds: dict[str, JobFeed] = {}

    def of(self, job: str) -> JobFeed:
        """The feed of a job, created on first use."""
        return self._feeds.setdefault(job, JobFeed(self._ring_id))

    def release(self, job: str) -> None:
        """Keep the feed of an ended job whole, and only its tail once KEPT_ENDED others ended."""
        # Moved to the end, so that the order is that in which jobs ended.
        self._feeds[job] = self._feeds.pop(job)
        ended = [feed for feed in self._feeds.values() if feed.ended]
        for feed in ended[:-KEPT_ENDED]:
            feed.shrink()

    def forget(self, jobs: Iterable[str]) -> None:
        """These jobs are deleted; watches of them have ended with the jobs."""
        for job in jobs:
            self._feeds.pop(job, None)

    def evaluation_of(self, job: str) -> types_pb2.StepRecord | None:
        """The newest step record of a job with a loss on held-out data, if one came here."""
        feed = self._feeds.get(job)
        return feed.last_evaluation if feed is not None else None

    def record_of(self, job: str) -> types_pb2.StepRecord | None:
        """The newest step record of a job; None before the first."""
        feed = self._feeds.get(job)
        return feed.last_record if feed is not None else None

    def typical_step_of(self, job: str) -> float | None:
        """Median time of the newest steps of a job in seconds; None before the first."""
        feed = self._feeds.get(job)
        return feed.typical_step_s if feed is not None else None

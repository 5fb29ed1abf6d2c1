"""What watchers of jobs see: a bounded ring of updates per job, with resume tokens.

A token names this process's ring and a position in it. A token of another process (the driver was
restarted) starts over with everything that is held; one that has fallen off the ring is refused, so
that no gap goes unseen.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator

from megascale.v1 import driver_pb2, types_pb2

RING_UPDATES = 20_000  # of one job
MAX_TOKEN_DIGITS = 18
KEPT_ENDED = 64  # ended jobs whose updates are all kept, for those who watch late
ENDED_UPDATES = 500  # kept of the others
BATCH_UPDATES = 256  # handed out before other tasks get a turn


class TokenExpired(ValueError):
    """The position named by a resume token is no longer held."""


class JobFeed:
    """Updates of one job, oldest first."""

    def __init__(self, ring_id: str) -> None:
        self.last_record: types_pb2.StepRecord | None = None
        self.ended = False
        self._ring_id = ring_id
        self._updates: deque[driver_pb2.WatchJobResponse] = deque(maxlen=RING_UPDATES)
        self._next = 0
        self._last_event = 0
        self._changed = asyncio.Event()

    def add_job(self, job: driver_pb2.Job, ended: bool) -> None:
        """The job's state has changed; ``ended``: nothing comes after it."""
        self.ended = ended
        self._add(driver_pb2.WatchJobResponse(job=job))

    def add_event(self, event: types_pb2.Event) -> None:
        """A line was added to the audit log; lines that were added before are passed over."""
        if event.seq <= self._last_event:
            return
        self._last_event = event.seq
        self._add(driver_pb2.WatchJobResponse(event=event))

    def add_step(self, record: types_pb2.StepRecord) -> bool:
        """A step was completed; False when it is known already (executors repeat what was not
        acknowledged).
        """
        last = self.last_record
        if last is not None and (record.attempt, record.step) <= (last.attempt, last.step):
            return False
        self.last_record = record
        self._add(driver_pb2.WatchJobResponse(step=record))
        return True

    async def follow(self, token: str) -> AsyncIterator[driver_pb2.WatchJobResponse]:
        """Updates behind ``token`` as they come, until the job has ended.

        Raises:
            TokenExpired: the position has fallen off the ring.
            ValueError: not a token.
        """
        position = self._position(token)
        while True:
            changed = self._changed
            first = self._next - len(self._updates)
            if position < first:
                raise TokenExpired(
                    f"{first - position} updates behind the resume token are no longer held"
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
        """Let go of all but the newest ENDED_UPDATES updates."""
        while len(self._updates) > ENDED_UPDATES:
            self._updates.popleft()

    def _position(self, token: str) -> int:
        ring_id, _, number = token.partition("-")
        is_number = number.isdecimal() and len(number) <= MAX_TOKEN_DIGITS
        if not token or (ring_id != self._ring_id and is_number):
            return self._next - len(self._updates)
        if not is_number or int(number) > self._next:
            raise ValueError(f"resume_token {token!r} is not one that WatchJob gave out")
        return int(number)

    def _add(self, update: driver_pb2.WatchJobResponse) -> None:
        self._next += 1
        update.resume_token = f"{self._ring_id}-{self._next}"
        self._updates.append(update)
        self._changed.set()
        self._changed = asyncio.Event()


class JobFeeds:
    """The feeds of all jobs of one driver process."""

    def __init__(self) -> None:
        self._ring_id = secrets.token_hex(6)
        self._feeds: dict[str, JobFeed] = {}

    def of(self, job: str) -> JobFeed:
        """The feed of a job, made on first use."""
        return self._feeds.setdefault(job, JobFeed(self._ring_id))

    def release(self, job: str) -> None:
        """The job has ended: its feed is kept whole until KEPT_ENDED others have ended, then its
        tail only.
        """
        self._feeds[job] = self._feeds.pop(job)
        ended = [feed for feed in self._feeds.values() if feed.ended]
        for feed in ended[:-KEPT_ENDED]:
            feed.shrink()

    def record_of(self, job: str) -> types_pb2.StepRecord | None:
        """Newest step record of a job."""
        feed = self._feeds.get(job)
        return feed.last_record if feed is not None else None

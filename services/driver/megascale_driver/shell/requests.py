"""The queue of events for the core, with the callers that wait for an outcome.

Most events have no caller: what they change is their answer. A request of a client has one: it gets
the outcome when the decision is committed, or an error if the leadership ends before.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from megascale_common.service.errors import NotLeaderError
from megascale_driver.core.values.events import Event, Outcome
from megascale_driver.presence.inbox import MAX_PROGRESS, Inbox

CALL_TIMEOUT_S = 4.0  # etcd has to confirm a request within this time


@dataclass(slots=True)
class Entry:
    """An event, and the caller that waits for its outcome, if any."""

    event: Event
    answer: asyncio.Future[Outcome] | None = field(default=None)

    def succeed(self, outcome: Outcome) -> None:
        """Give the committed outcome to the caller, if it still waits."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(outcome)

    def fail(self, error: Exception) -> None:
        """Give an error to the caller, if it still waits."""
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)

    def refuse(self) -> None:
        """The leadership ended before the commit was confirmed."""
        self.fail(
            NotLeaderError(
                "the leadership ended before the commit was confirmed; send the request again"
            )
        )


class Requests:
    """One inbox for all events; :meth:`wait` returns when there is something to decide."""

    def __init__(self, max_progress: int = MAX_PROGRESS) -> None:
        self._inbox: Inbox[Entry] = Inbox(max_progress)
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._inbox)

    @property
    def dropped(self) -> int:
        """Number of progress reports that found no room."""
        return self._inbox.dropped

    def put(self, event: Event, node: str = "") -> None:
        """Add an event that must not be lost; ``node``: the node that it is about, if any."""
        self._inbox.put(Entry(event), node)
        self._arrived.set()

    def put_report(self, event: Event, node: str) -> None:
        """Add a report of a node that must not be lost."""
        self._inbox.put_report(Entry(event), node)
        self._arrived.set()

    def put_progress(self, event: Event, node: str, job: str) -> bool:
        """Add a report that only shows progress, without waking; False: there is no room."""
        return self._inbox.put_progress(Entry(event), node, job)

    async def call(self, event: Event) -> Outcome:
        """Add a request and wait until it is committed.

        Raises:
            NotLeaderError: the leadership ended before the commit.
            TimeoutError: etcd did not confirm the commit in time; it may still happen.
        """
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._inbox.put(Entry(event, answer))
        self._arrived.set()
        # The entry stays in the queue after a timeout: it may still be committed, so the caller has
        # to repeat the request under the same id.
        async with asyncio.timeout(CALL_TIMEOUT_S):
            return await answer

    async def wait(self) -> None:
        """Wait until something has arrived, or :meth:`wake` was called."""
        self._arrived.clear()
        await self._arrived.wait()

    def wake(self) -> None:
        """End the wait."""
        self._arrived.set()

    def take(self, limit: int) -> list[Entry]:
        """Remove and return at most ``limit`` entries, in the order of the core."""
        return self._inbox.take(limit)

    def clear(self) -> list[Entry]:
        """Remove and return everything."""
        return self._inbox.clear()

"""One writer per commit log: whatever a daemon reads or appends in it goes through one lane.

A caller may give up waiting, as a handler does at its deadline; the append that it has asked for is
then finished, or found out about, before the next one begins. So a storage that stalls never has
two appends of one daemon under way. Each log has a lane of its own: a storage that is stuck stops
only the jobs that use it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.concurrency import Lane
from megascale_checkpoint.storage import open_storage

T = TypeVar("T")
KEPT_WRITERS = 64  # of logs that nothing is under way in; the least recently used one goes first


class LogWriter:
    """The commit log at ``uri``. Only :meth:`call` touches it."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._lane = Lane(f"commit log {uri}")
        self._log: CommitLog | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is under way, waits, or has to be found out about."""
        return self._lane.waiting == 0 and (self._log is None or self._log.settled)

    async def call(
        self,
        work: Callable[[CommitLog], T],
        timeout_s: float | None = None,
        *,
        anew: bool = False,
    ) -> T:
        """The result of ``work``, which is given the log, in the lane.

        Args:
            timeout_s: how long the caller waits; what has begun is finished all the same.
            anew: read the log from storage again, and do not go by what was read before.

        Raises:
            UnavailableError: not done in time.
        """
        return await self._lane.run(lambda: work(self._open(anew)), timeout_s)

    def _open(self, anew: bool) -> CommitLog:
        if self._log is not None and (anew or self._log.damaged):
            self._log.settle()  # an append of unknown outcome belongs to the log that made it
            self._log = None
        if self._log is None:
            self._log = CommitLog(open_storage(self._uri))
        return self._log


class LogWriters:
    """The writers of a daemon, by uri."""

    def __init__(self) -> None:
        self._writers: dict[str, LogWriter] = {}

    def of(self, uri: str) -> LogWriter:
        """The writer of the log at ``uri``, made on first use. Call for each use: do not keep it.

        Raises:
            RequestError: the uri is not supported.
        """
        open_storage(uri)
        writer = self._writers.pop(uri, None) or LogWriter(uri)
        self._writers[uri] = writer
        idle = [key for key, other in self._writers.items() if other.idle and key != uri]
        for key in idle[: max(0, len(self._writers) - KEPT_WRITERS)]:
            del self._writers[key]
        return writer

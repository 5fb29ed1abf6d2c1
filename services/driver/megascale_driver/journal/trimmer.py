"""Bounds the stored history: old lines and attempts are exported, then removed.

The state is in the rows, so a log is only history: the cluster loses nothing with its old end.
Lines are first appended to a file as JSON, and removed once the file is on disk. If a leader ends
in between, the lines are in the file and in etcd, and the next export has them again, with the same
``log`` and ``seq``.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megascale_common.etcd.election import Leadership
from megascale_common.etcd.errors import EtcdError
from megascale_common.etcd.operations import Etcd
from megascale_common.service import logs
from megascale_common.service.clock import Clock
from megascale_common.service.errors import CodecError, NotLeaderError
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import Audit
from megascale_driver.core.values.job import Job
from megascale_driver.journal import codec, records
from megascale_driver.journal.fenced import FencedWriter
from megascale_driver.journal.pieces import Change
from megascale_driver.journal.rows import attempt_key

INTERVAL_S = 60.0
PAGE_RECORDS = 500  # exported and removed at once
BOUND_LINES = 4 * PAGE_RECORDS
MARKER = "trimming"
DAY_S = 86_400.0

_log = logs.get(__name__)


@dataclass(frozen=True, slots=True)
class Retention:
    """Limits of what stays in etcd: the newest ``lines`` of each log, none older than ``age_s``.

    ``attempts``: the newest attempts of each job. ``ended_*``: the same for jobs that have ended.
    ``export_to``: the folder for exported lines; None: they are removed without export.
    """

    lines: int = 100_000
    age_s: float = 90 * DAY_S
    attempts: int = 50
    ended_lines: int = 1_000
    ended_attempts: int = 5
    export_to: Path | None = None


@dataclass(slots=True)
class _Oldest:
    """The last line of a log's oldest record: while it stays, all others do."""

    seq: int
    at_s: float


class Trimmer:
    """Trims during one leadership, concurrently with the commits of the engine."""

    def __init__(
        self, client: Etcd, leadership: Leadership, retention: Retention, clock: Clock
    ) -> None:
        self._client = client
        self._retention = retention
        self._clock = clock
        self._writer = FencedWriter(client, leadership, leadership.lease.remaining_s, MARKER)
        self._oldest: dict[str, _Oldest] = {}
        self._first_attempts: dict[str, int] = {}
        self.trimmed_lines = 0

    async def run(self, state: Callable[[], Cluster]) -> None:
        """Trim periodically until cancelled; what fails is tried again the next time."""
        await asyncio.sleep(INTERVAL_S)
        while True:
            try:
                await self.trim(state())
            except (EtcdError, NotLeaderError, OSError) as error:
                _log.warning("old records were not trimmed", error=str(error))
            await asyncio.sleep(INTERVAL_S)

    async def trim(self, state: Cluster) -> None:
        """Trim every log and every job's attempts once.

        Raises:
            OSError: the export failed; nothing of it was removed.
            NotLeaderError, EtcdError: the leadership has ended, or etcd does not answer.
        """
        if MARKER not in self._writer.revisions:
            await self._writer.adopt_marker()
        await self._trim_log("", state.log_seq, self._retention.lines)
        for name, job in state.jobs.items():
            ended = job.terminal
            lines = self._retention.ended_lines if ended else self._retention.lines
            await self._trim_log(name, job.log_seq, lines)
            await self._trim_attempts(job)
        for name in self._oldest.keys() - state.jobs.keys() - {""}:
            del self._oldest[name]

    async def _trim_log(self, log: str, last: int, lines: int) -> None:
        too_old_s = self._clock.now_s() - self._retention.age_s
        while last:
            oldest = self._oldest.get(log)
            if oldest is not None and (
                oldest.seq == last or (oldest.seq > last - lines and oldest.at_s >= too_old_s)
            ):
                return  # decided without a read
            if not await self._trim_page(log, last, last - lines, too_old_s):
                return

    async def _trim_page(self, log: str, last: int, up_to: int, too_old_s: float) -> bool:
        """Trim some of the oldest records; True if there may be more to trim.

        The newest record always stays: the next line is numbered behind it.
        """
        folder = records.folder(log)
        oldest = self._oldest.get(log)
        # A short range, once the beginning of the log is known: etcd scans all of it.
        end = records.key(log, min(last, oldest.seq + BOUND_LINES) if oldest is not None else last)
        page = await self._client.get_range(folder, end, limit=PAGE_RECORDS)
        removed: list[bytes] = []
        behind = ""
        for item in page.items:
            try:
                found = records.lines_of(item.value, item.key)
            except CodecError:
                found = []  # unreadable: exported as it is
            if found and found[-1].seq >= last:
                self._oldest[log] = _Oldest(last, found[-1].at_s)
                break
            if found and not _goes(found[-1], up_to, too_old_s):
                self._oldest[log] = _Oldest(found[-1].seq, found[-1].at_s)
                break
            removed += [codec.dump(line) for line in found] or [item.value.replace(b"\n", b" ")]
            behind = f"{item.key}\0"
        else:
            if not page.items:
                self._oldest[log] = _Oldest(last, self._clock.now_s())
        if not behind:
            return False
        # On disk before the lines leave etcd: a crash in between repeats lines, and loses none.
        await self._export(removed)
        await self._writer.write([Change(page.items[0].key, end=behind)])
        self._oldest[log] = _Oldest(records.number(page.items[-1].key), 0.0)
        self.trimmed_lines += len(removed)
        return True

    async def _trim_attempts(self, job: Job) -> None:
        keep = self._retention.ended_attempts if job.terminal else self._retention.attempts
        first = max(1, job.attempt - keep + 1)
        if first <= self._first_attempts.get(job.name, 1):
            return
        await self._writer.write(
            [Change(attempt_key(job.name, 0), end=attempt_key(job.name, first))]
        )
        self._first_attempts[job.name] = first

    async def _export(self, lines: list[bytes]) -> None:
        folder = self._retention.export_to
        if folder is not None:
            day = time.strftime("%Y-%m-%d", time.gmtime(self._clock.now_s()))
            await asyncio.to_thread(_append, folder / f"audit-{day}.jsonl", lines)


def _goes(line: Audit, up_to: int, too_old_s: float) -> bool:
    return line.seq <= up_to or line.at_s < too_old_s


def _append(path: Path, lines: list[bytes]) -> None:
    """Append lines to a file, and return once they are on disk."""
    new = not path.exists()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(b"".join(line + b"\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
    if new:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

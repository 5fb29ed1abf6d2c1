"""Runs a job's retention after its commits, beside them.

Only the records go through the lane of the commit log; files are removed in a thread of their own,
so that neither a commit nor another job waits for that.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from megascale_checkpoint.commit.commit_log import CommitLog, Record
from megascale_checkpoint.commit.commit_record import Checkpoint
from megascale_checkpoint.commit.commit_writer import LogWriters
from megascale_checkpoint.concurrency import Lane
from megascale_checkpoint.retention import loads
from megascale_checkpoint.retention.collect import collect, collect_all
from megascale_checkpoint.retention.policy import Retention
from megascale_checkpoint.retention.retire import retention_of, retire
from megascale_checkpoint.storage import open_storage, split
from megascale_common.service import logs, tasks
from megascale_common.service.errors import ServiceError

_log = logs.get("retention")
MOST = 32  # checkpoints of one run: commits wait meanwhile


@dataclass(frozen=True, slots=True)
class Run:
    """What a run of retention is about: ``newest`` was just committed, so it is whole."""

    uri: str
    newest: Checkpoint


class Collector:
    """At most one run per folder at a time; a commit during a run is followed by one more.

    Args:
        writers: those of the committer, whose lanes the records go through.
    """

    def __init__(self, writers: LogWriters) -> None:
        self._writers = writers
        self._wanted: dict[str, Run] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._clean: dict[str, int] = {}  # by uri: the attempt whose first run is done

    def begin(self, run: Run) -> None:
        """Have a run follow a commit; returns at once."""
        self._wanted[run.uri] = run
        if run.uri not in self._tasks:
            self._tasks[run.uri] = tasks.single(self._serve(run.uri), f"retention {run.uri}")

    async def idle(self) -> None:
        """Return when no run is in progress."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def close(self) -> None:
        """Begin nothing more; what a run leaves is found by the next one."""
        for task in self._tasks.values():
            task.cancel()

    async def _serve(self, uri: str) -> None:
        lane = Lane(f"retention {uri}")
        try:
            while (run := self._wanted.pop(uri, None)) is not None:
                try:
                    await self._run(run, lane)
                except (ServiceError, OSError) as error:
                    # The next commit, or `megascale checkpoint gc`, does what is left.
                    self._clean.pop(uri, None)
                    _log.warning("retention is not done", uri=uri, error=str(error))
        finally:
            # At once with the last look at what is wanted, so that no run is forgotten.
            del self._tasks[uri]

    async def _run(self, run: Run, lane: Lane) -> None:
        attempt = run.newest[0]

        def retired(log: CommitLog) -> tuple[Record | None, Retention, list[Record]]:
            log.refresh()
            rules = retention_of(log)
            found = [] if rules.keeps_all else retire(log, rules, run.newest, attempt, MOST)
            return log.find_open(attempt), rules, found

        opened, rules, records = await self._writers.of(run.uri).call(retired)

        first = self._clean.get(run.uri) != attempt
        loads_from = bool(opened and opened.values.get("load_uri"))
        if rules.keeps_all and not (first and loads_from):
            return  # who has asked for nothing to be removed keeps leftovers, too

        def remove() -> None:
            if first and opened is not None:
                loads.release(opened)
            if rules.keeps_all:
                return
            storage = open_storage(run.uri)
            for record in records:
                what = {"attempt": record.attempt, "step": record.step}
                _log.info("checkpoint retired", uri=run.uri, rules=str(rules), **what)
                collect(storage, split(record.values["manifest"])[0])
            if first:
                log = CommitLog(storage)
                log.refresh()
                collect_all(log, storage)

        await lane.run(remove)
        self._clean[run.uri] = attempt

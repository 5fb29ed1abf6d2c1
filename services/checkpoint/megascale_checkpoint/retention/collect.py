"""Removes the files of checkpoints that do not exist: retired, or never completed.

Order: first the RETIRE record is appended, then the manifest is removed, then the files, then the
folder. After a crash in between the checkpoint does not exist, and the next run finds the rest:
everything below ``attempts/`` that no COMMIT names and none can name any more.

A symbolic link in the place of a checkpoint's folder or file is itself removed, and its target
stays, because the files may have been moved to an archive. A link in the place of an attempt's
folder stays and is reported, because what lies behind it is unknown.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_log import CommitLog, LogWriters, Record
from megascale_checkpoint.commit.commit_record import Checkpoint, LogState
from megascale_checkpoint.concurrency import Lane
from megascale_checkpoint.retention.retire import Retention, release, retention_of, retire
from megascale_checkpoint.storage import Storage, is_link_error, open_storage, split
from megascale_common.service import logs, tasks
from megascale_common.service.errors import ServiceError

_log = logs.get("retention")
ATTEMPTS = "attempts"
_ATTEMPT, _STEP = re.compile(r"attempt-(\d{6,})"), re.compile(r"step-(\d{9,})")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder of files that belong to no checkpoint; ``link``: it is a symbolic link."""

    folder: str
    checkpoint: Checkpoint
    retired: bool
    link: bool = False


def leftovers(
    log: CommitLog, storage: Storage, passed_over: Callable[[OSError], None]
) -> Iterator[Leftover]:
    """The folders below ``attempts/`` that can be removed. Reads listings.

    ``passed_over`` is called with the error of each attempt's folder that is a link.

    The log must have been read before: a commit after that is newer than anything considered here,
    and its files stay.

    Raises:
        OSError: the storage does not answer.
    """
    state = log.state
    retired = {record.checkpoint for record in log.records if record.kind == "RETIRE"}
    for attempt, folder in _numbered(storage, ATTEMPTS, _ATTEMPT):
        try:
            steps = list(_numbered(storage, folder, _STEP))
        except OSError as error:
            if not is_link_error(error):
                raise
            passed_over(error)
            continue
        for step, path in steps:
            checkpoint = (attempt, step)
            if not _ended(state, checkpoint):
                continue
            # A manifest without a COMMIT was never committed, or its COMMIT was damaged and
            # replaced by a REPAIR. In the latter case it stays, because an operator may want to
            # look at it.
            sure = checkpoint in retired or not _repaired(log)
            link = is_link(storage, path)
            if sure or (not link and storage.size(f"{path}/{manifests.NAME}") is None):
                yield Leftover(path, checkpoint, checkpoint in retired, link)


def collect(storage: Storage, folder: str, beat: Callable[[], None] = lambda: None) -> int:
    """Remove a checkpoint's folder, its manifest first; return the number of files removed.

    Args:
        beat: called after each file.

    Raises:
        OSError: the storage does not answer. Call again; the checkpoint does not exist either way.
    """
    if is_link(storage, folder):
        return int(storage.delete(folder))
    count = 0
    manifest = f"{folder}/{manifests.NAME}"
    if storage.delete(manifest):
        count += 1
        beat()
    storage.remove_unfinished(folder)
    for name in storage.names(folder):
        count += storage.delete(f"{folder}/{name}")
        beat()
    storage.delete(folder)
    return count


def collect_all(log: CommitLog, storage: Storage) -> int:
    """Remove every leftover; return the number of folders. Errors are logged, not raised."""
    count = 0
    try:
        for found in list(leftovers(log, storage, _report_link)):
            collect(storage, found.folder)
            count += 1
    except OSError as error:
        # The next run finds the rest again.
        _log.warning("files are left", folder=f"{storage.uri}/{ATTEMPTS}", error=str(error))
    return count


def is_link(storage: Storage, path: str) -> bool:
    """True if there is a symbolic link at ``path``."""
    try:
        storage.size(path)
    except OSError as error:
        if not is_link_error(error):
            raise
        # Only a link at ``path``: one above it makes every call fail in the same way.
        return error.filename is not None and str(error.filename).endswith(path)
    return False


def _report_link(error: OSError) -> None:
    _log.warning("files are left", folder=error.filename, error=str(error))


def _ended(state: LogState, checkpoint: Checkpoint) -> bool:
    """True if the folder belongs to no checkpoint, and none can become complete there."""
    attempt, step = checkpoint
    if checkpoint in state.live:
        return False
    if state.older and checkpoint < _oldest_known(state):
        return False  # it may be live, because a snapshot of the log leaves out the oldest ones
    # A fenced attempt cannot commit at all, and the present one no step up to its newest.
    return attempt < state.attempt or (
        attempt == state.attempt and step <= state.newest_step(attempt)
    )


def _oldest_known(state: LogState) -> Checkpoint:
    """The oldest commit that the snapshot of the log has not left out."""
    return min((key for key in state.live if key not in state.pins), default=state.last)


def _repaired(log: CommitLog) -> bool:
    """True if the log has a REPAIR, or may have one in the part covered by a snapshot."""
    whole = len(log.records) == log.state.seq
    return not whole or any(record.kind == "REPAIR" for record in log.records)


def _numbered(storage: Storage, folder: str, pattern: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    for name in storage.names(folder):
        found = pattern.fullmatch(name)
        if found is not None:
            yield int(found[1]), f"{folder}/{name}"


MOST = 32  # checkpoints that one run retires, because commits wait meanwhile


@dataclass(frozen=True, slots=True)
class Run:
    """One run of retention; ``newest`` was just committed, so it is whole."""

    uri: str
    newest: Checkpoint


class Collector:
    """Runs a job's retention after its commits, at most one run per folder at a time.

    A commit during a run causes one more run. Only the records go through the lane of the commit
    log; files are removed in a thread of their own, so that neither a commit nor another job waits.

    Args:
        writers: the committer's writers, whose lanes append the records.
    """

    def __init__(self, writers: LogWriters) -> None:
        self._writers = writers
        self._wanted: dict[str, Run] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._clean: dict[str, int] = {}  # by uri: the attempt whose first run is done

    def begin(self, run: Run) -> None:
        """Start a run after a commit; return at once."""
        self._wanted[run.uri] = run
        if run.uri not in self._tasks:
            self._tasks[run.uri] = tasks.single(self._serve(run.uri), f"retention {run.uri}")

    async def idle(self) -> None:
        """Wait until no run is in progress."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def close(self) -> None:
        """Cancel all runs; the next run finds what they leave."""
        for task in self._tasks.values():
            task.cancel()

    async def _serve(self, uri: str) -> None:
        lane = Lane(f"retention {uri}")
        try:
            while (run := self._wanted.pop(uri, None)) is not None:
                try:
                    await self._run(run, lane)
                except (ServiceError, OSError) as error:
                    # The run after the next commit, or `megascale checkpoint gc`, does the rest.
                    self._clean.pop(uri, None)
                    _log.warning("retention is not done", uri=uri, error=str(error))
        finally:
            # No await since the last look at what is wanted, so that no run is forgotten.
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
            return  # without a rule nothing is removed, leftovers included

        def remove() -> None:
            if first and opened is not None:
                release(opened)
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

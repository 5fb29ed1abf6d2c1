"""The committer: opens attempts in the commit log, collects the ranks' reports, commits steps.

The driver makes the daemon of the attempt's first node the committer by sending it OpenAttempt.
Reports are kept in memory only, because ranks repeat theirs until the step is settled. A committer
that was restarted resumes the attempt from what its own node's workers registered. Two daemons may
both act as committer for a while; only the commit log decides which record counts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megascale.v1 import checkpoint_pb2
from megascale_checkpoint.checksums import load_json_object
from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_log import CommitLog, LogWriters, Record
from megascale_checkpoint.commit.manifest import File, Manifest
from megascale_checkpoint.commit.restore_decision import RestoreDecision, SealedStep
from megascale_checkpoint.concurrency import Signal
from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.retention.collect import Collector, Run
from megascale_checkpoint.serve.opening import (
    BY_HAND,
    Opening,
    holders_in,
    refuse_foreign,
    refuse_used,
)
from megascale_checkpoint.storage import Storage, join, open_storage
from megascale_common.service import logs
from megascale_common.service.errors import (
    DamagedError,
    ForbiddenError,
    NotReadyError,
    RequestError,
    SupersededError,
    UnavailableError,
)

log = logs.get("committer")
# Steps of an attempt that may wait for reports at once; the number of slots keeps it far lower.
MAX_OPEN_STEPS = 16
# How long a call waits for the storage: less than its caller waits for the call (the driver 20 s
# for an OpenAttempt and 10 s for a list, a daemon CALL_TIMEOUT_S), so that it learns the reason.
OPEN_S, COMMIT_S, LIST_S = 18.0, 10.0, 8.0
Report = checkpoint_pb2.ReportPreparedRequest
Epoch = tuple[int, int]


@dataclass(slots=True)
class _Attempt:
    """The attempt that this daemon commits for.

    Attributes:
        holders: the node of each rank; empty: not known, as after a restart of this daemon.
        reports: by step and rank, while the step waits for ranks.
        committing: the commits that are under way, by step.
        committed: addresses of the manifests, by step.
    """

    number: int
    uri: str
    world_size: int
    # None: this daemon was restarted within the attempt, and has not read who holds which rank.
    holders: Mapping[int, str] | None = None
    layout: dict[str, int] = field(default_factory=dict)
    reports: dict[int, dict[int, Report]] = field(default_factory=dict)
    committing: dict[int, asyncio.Task[str]] = field(default_factory=dict)
    committed: dict[int, str] = field(default_factory=dict)


class Committer:
    """Commits for any number of jobs.

    Args:
        registration: returns what a worker of this node registered for a job's newest attempt.
    """

    def __init__(self, registration: Callable[[str], RegisteredRank | None]) -> None:
        self.changed = Signal()
        self._registration = registration
        self._attempts: dict[str, _Attempt] = {}
        self._writers = LogWriters()
        self._readers = LogWriters()
        self._collector = Collector(self._writers)

    async def open_attempt(
        self,
        wanted: Opening,
        attempt: int,
        sealed: SealedStep,
        refused: frozenset[int],
        epoch: Epoch,
    ) -> tuple[Record, RestoreDecision]:
        """Append OPEN(attempt), which fences all earlier attempts, and decide what to restore.

        Idempotent: the decision is stored in the record, and a repeated call returns it.

        Raises:
            SupersededError: a later attempt is open, or a driver of a later epoch has opened one,
                or the attempt of that number was another one.
            RequestError: a uri is not supported, or the folder belongs to another job.
            UnusableError: the job has checkpoints, and none of them can be restored.
            NotFoundError: the job was to start from ``load_uri``, which holds no usable checkpoint.
            UnavailableError: the storage takes longer than OPEN_S; call again.
            DataLossError: the log is damaged.
            OSError: the storage does not answer.
        """

        def append(commit_log: CommitLog) -> Record:
            def make() -> dict[str, Any]:
                _refuse_stale(commit_log, epoch)
                return wanted.record(commit_log, sealed, refused, epoch)

            wanted.check(commit_log)
            refuse_used(commit_log, attempt)
            record = commit_log.append_open(attempt, make)
            # Checked again: append_open returns the record of the attempt number whichever job
            # wrote it.
            refuse_foreign(commit_log, wanted.job)
            return record

        return await self._open(wanted, append)

    async def open_next_attempt(self, wanted: Opening) -> tuple[Record, RestoreDecision]:
        """As :meth:`open_attempt`, for a run without a driver: the attempt after the newest one.

        A repeated call opens a further attempt. The epoch stays that of the newest driver, which
        may go on with the job later.
        """

        def append(commit_log: CommitLog) -> Record:
            def make() -> dict[str, Any]:
                epoch = commit_log.state.epoch
                fields = wanted.record(commit_log, SealedStep(0, 0), frozenset(), epoch)
                return {**fields, BY_HAND: True}

            wanted.check(commit_log)
            return commit_log.append_next_open(make)

        return await self._open(wanted, append)

    async def _open(
        self, wanted: Opening, append: Callable[[CommitLog], Record]
    ) -> tuple[Record, RestoreDecision]:
        def work(commit_log: CommitLog) -> Record:
            record = append(commit_log)
            _remove_unfinished(open_storage(wanted.checkpoint.uri), commit_log, record.attempt)
            return record

        job, uri = wanted.job, wanted.checkpoint.uri
        # Anew: what this daemon has read before may have been damaged or repaired since.
        record = await self._writers.of(uri).call(work, OPEN_S, anew=True)
        known = self._attempts.get(job)
        if known is None or known.uri != uri or known.number < record.attempt:
            self._attempts[job] = _Attempt(record.attempt, uri, wanted.world_size, wanted.holders)
        decision = RestoreDecision.from_record(record.values["restored_from"])
        log.info(
            "attempt opened",
            job=job,
            attempt=record.attempt,
            source=decision.plan.source,
            step=decision.plan.step,
        )
        return record, decision

    async def next_restore(self, wanted: Opening) -> RestoreDecision:
        """What an attempt would restore now; nothing is written.

        Raises:
            As :meth:`open_next_attempt`.
        """

        def read(commit_log: CommitLog) -> RestoreDecision:
            commit_log.refresh()
            refuse_foreign(commit_log, wanted.job)
            return wanted.decision(commit_log, SealedStep(0, 0), frozenset())

        return await self._readers.of(wanted.checkpoint.uri).call(read, OPEN_S, anew=True)

    async def report(self, report: Report, reporter: str = "") -> str:
        """Record that a rank's files are durable; return the manifest's address once all are.

        Returns "" while other ranks are missing. The last report to arrive commits the step.
        ``reporter``: the node in the caller's certificate; "" where callers show none.

        Raises:
            ForbiddenError: the rank is another node's.
            SupersededError: a later attempt is open, or a later step is committed.
            RequestError: the report does not fit the attempt.
            DamagedError: a file that a rank reported cannot be seen from this node.
            UnavailableError: the commit takes longer than COMMIT_S. It goes on; report again.
            ServiceError, OSError: the commit failed; the same report may be sent again.
        """
        attempt = self._attempt_of(report)
        if reporter and attempt.holders is None:
            attempt.holders = await self._holders_of(attempt)
        if reporter and attempt.holders and attempt.holders.get(report.rank) != reporter:
            text = f"node {reporter} holds no rank {report.rank} of job {report.job}"
            raise ForbiddenError(text, reason="NOT_ITS_JOB")
        if report.step in attempt.committed:
            return attempt.committed[report.step]
        _check(report, attempt)
        reports = attempt.reports.setdefault(report.step, {})
        reports[report.rank] = report
        if len(attempt.reports) > MAX_OPEN_STEPS:
            del attempt.reports[min(attempt.reports)]
        if len(reports) < attempt.world_size:
            return ""
        # A task of its own: a caller that is cancelled, or has waited long enough, does not end it,
        # and the next report of the step waits for it instead of beginning another.
        commit = attempt.committing.get(report.step)
        if commit is None:
            commit = asyncio.create_task(self._commit_step(attempt, report, dict(reports)))
            attempt.committing[report.step] = commit
            commit.add_done_callback(_retrieve)
        try:
            async with asyncio.timeout(COMMIT_S) as limit:
                return await asyncio.shield(commit)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise UnavailableError(
                f"{attempt.uri}: the storage has not answered for {COMMIT_S:.0f} s",
                reason="STORAGE_UNAVAILABLE",
            ) from error

    async def commits(self, uri: str) -> list[tuple[Record, str, str]]:
        """COMMIT records of a log, newest first, each with its manifest's address and its pin.

        Raises:
            DamagedError: the log is damaged, so there may be more.
            UnavailableError, OSError: the storage does not answer.
        """

        def read(commit_log: CommitLog) -> list[tuple[Record, str, str]]:
            commit_log.refresh()
            commit_log.refuse_damaged()
            pins = commit_log.pins()
            return [
                (record, join(uri, record.values["manifest"]), pins.get(record.checkpoint, ""))
                for record in commit_log.commits()
            ]

        # Not the writer's lane: reading neither waits for an append nor holds it up.
        return await self._readers.of(uri).call(read, LIST_S, anew=True)

    async def newest_attempt(self, uri: str) -> int:
        """The newest attempt that is open in a log, which fences all others.

        Raises:
            ServiceError, OSError: the log cannot be read now.
        """

        def read(commit_log: CommitLog) -> int:
            commit_log.refresh()
            return commit_log.state.attempt

        return await self._readers.of(uri).call(read, LIST_S)

    async def check(self, uri: str) -> None:
        """Find out whether the storage at ``uri`` can be reached and written.

        Raises:
            RequestError: it cannot be right.
            UnavailableError, OSError: it does not answer, or refuses.
        """
        await self._readers.of(uri).call(lambda _: open_storage(uri).check(), LIST_S)

    async def finish(self, timeout_s: float) -> None:
        """Let retention, which follows each commit, end what it has to do; then :meth:`close`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._collector.idle()
        except TimeoutError:
            log.warning("retention is cut off; the next run of the job ends it")
        self.close()

    def close(self) -> None:
        """Begin no more commits."""
        for attempt in self._attempts.values():
            for commit in attempt.committing.values():
                commit.cancel()
        self._collector.close()

    def committed_uri(self, job: str, attempt: int, step: int) -> str:
        """Address of a manifest that this committer committed, "" if it has not."""
        known = self._attempts.get(job)
        return known.committed.get(step, "") if known and known.number == attempt else ""

    async def _commit_step(
        self, attempt: _Attempt, report: Report, reports: dict[int, Report]
    ) -> str:
        try:
            manifest_uri = await self._writers.of(attempt.uri).call(
                lambda commit_log: _commit(commit_log, attempt, report, reports)
            )
        finally:
            del attempt.committing[report.step]
        attempt.committed[report.step] = manifest_uri
        self._collector.begin(Run(attempt.uri, (attempt.number, report.step)))
        # append_commit refuses steps older than the newest commit: drop what waits for them.
        for step in [step for step in attempt.reports if step <= report.step]:
            del attempt.reports[step]
        self.changed.notify()
        return manifest_uri

    async def _holders_of(self, attempt: _Attempt) -> Mapping[int, str]:
        """Who holds which rank, by the OPEN record of the attempt; empty where it does not say."""

        def read(commit_log: CommitLog) -> Mapping[int, str]:
            commit_log.refresh()
            return holders_in(commit_log.find_open(attempt.number))

        return await self._readers.of(attempt.uri).call(read, COMMIT_S, anew=True)

    def _attempt_of(self, report: Report) -> _Attempt:
        known = self._attempts.get(report.job)
        local = self._registration(report.job)
        if (
            (known is None or known.number < report.attempt)
            and local
            and local.attempt == report.attempt
        ):
            # This daemon was restarted within the attempt. A commit still requires OPEN(attempt)
            # in the log, so resuming on a worker's word cannot commit anything that is fenced.
            known = _Attempt(local.attempt, local.uri, local.world_size)
            self._attempts[report.job] = known
        if known is None or known.number < report.attempt:
            raise NotReadyError(
                f"attempt {report.attempt} of {report.job} is unknown to this committer"
            )
        if known.number > report.attempt:
            raise SupersededError(
                f"attempt {report.attempt} is superseded: attempt {known.number} has been opened"
            )
        if not known.layout and local and local.attempt == known.number:
            known.layout = local.layout_info
        return known


def _commit(
    commit_log: CommitLog, attempt: _Attempt, report: Report, reports: dict[int, Report]
) -> str:
    """Commit a step whose ranks have all reported; returns the manifest's address. Blocking."""
    # Order: every rank's file is durable (it reported), then the manifest, then the COMMIT
    # record. A crash before the last of these leaves files that no record names: no checkpoint.
    manifest = _manifest(attempt, report, reports)
    folder = manifests.step_folder(report.attempt, report.step)
    path = f"{folder}/{manifests.NAME}"
    try:
        manifests.check_sizes(open_storage(join(attempt.uri, folder)), manifest)
    except DamagedError as error:
        # The rank reported its file as durable, so it wrote to another disk.
        problem = f"{error.problem} on rank 0's node: is the checkpoint folder shared by all nodes?"
        raise DamagedError(error.file, problem) from error
    data = manifests.write(open_storage(attempt.uri), path, manifest)
    fields = manifests.commit_fields(manifest, path, data)
    commit_log.append_commit(report.attempt, report.step, fields)
    return join(attempt.uri, path)


def _retrieve(commit: asyncio.Task[str]) -> None:
    """Mark a commit's error as retrieved: its callers may have gone, and ranks report again."""
    if not commit.cancelled() and (error := commit.exception()) is not None:
        log.info("commit not done", error=str(error))


def _manifest(attempt: _Attempt, report: Report, reports: dict[int, Report]) -> Manifest:
    small_states = {rank: json.loads(r.small_state_json or "{}") for rank, r in reports.items()}
    return Manifest(
        job=report.job,
        attempt=report.attempt,
        step=report.step,
        world_size=attempt.world_size,
        layout=dict(attempt.layout),
        files=tuple(
            File(file.path, file.size_bytes, file.xxh3, rank, reports[rank].layout_digest)
            for rank in sorted(reports)
            for file in reports[rank].files
        ),
        small_state=small_states[0],
        rank_small_states=manifests.differing(small_states),
        created_at=manifests.now(),
    )


def _check(report: Report, attempt: _Attempt) -> None:
    if not 0 <= report.rank < attempt.world_size:
        raise RequestError(
            f"rank {report.rank} is outside the attempt's world of {attempt.world_size}"
        )
    newest = max(attempt.committed, default=0)
    if report.step < newest:
        raise SupersededError(f"step {report.step} comes too late: step {newest} is committed")
    if len(attempt.reports) == MAX_OPEN_STEPS and report.step < min(attempt.reports):
        raise SupersededError(
            f"step {report.step} is given up: {MAX_OPEN_STEPS} later steps wait for ranks"
        )
    try:
        load_json_object(report.small_state_json or "{}", "small_state_json")
    except DamagedError as error:
        raise RequestError(str(error)) from error
    if not report.files:
        raise RequestError(f"rank {report.rank} reports no file")
    for file in report.files:
        if "/" in file.path or file.path in ("", ".", ".."):
            raise RequestError(f"file path {file.path!r} must be a name in the checkpoint's folder")


def _remove_unfinished(storage: Storage, commit_log: CommitLog, attempt: int) -> None:
    """Remove temporary files of killed writers of the previous attempt, which is fenced by now."""
    before = max((number for number in commit_log.state.opens if number < attempt), default=0)
    if not before:
        return
    folder = manifests.attempt_folder(before)
    try:
        # Every rank persists its steps in order, so only the newest folders hold unfinished files.
        for name in storage.names(folder)[-MAX_OPEN_STEPS:]:
            count = storage.remove_unfinished(f"{folder}/{name}")
            if count:
                log.info(
                    "unfinished files removed", folder=f"{storage.uri}/{folder}/{name}", count=count
                )
    except OSError as error:
        log.warning(
            "unfinished files not removed", folder=f"{storage.uri}/{folder}", error=str(error)
        )


def _refuse_stale(commit_log: CommitLog, epoch: Epoch) -> None:
    """Raise SupersededError for a driver that lost its leadership: its epoch is lower."""
    newer = commit_log.state.epoch
    if newer > epoch:
        raise SupersededError(
            f"a driver of epoch {newer} has opened an attempt; "
            f"this call carries the older epoch {epoch}"
        )

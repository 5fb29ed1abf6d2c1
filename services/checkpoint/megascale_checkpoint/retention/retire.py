"""Ends the existence of checkpoints in the commit log, and pins those that are to stay.

A checkpoint exists by its COMMIT; RETIRE ends that, before anything of it is removed
(:mod:`megascale_checkpoint.retention.collect`). What is checked before a record is appended is
checked again whenever another writer has appended first, so neither a PIN nor an OPEN that restores
the checkpoint is overtaken.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from megascale_checkpoint.commit.commit_log import CommitLog, Record
from megascale_checkpoint.commit.commit_record import Checkpoint, LogState
from megascale_checkpoint.commit.restore_decision import check_commit
from megascale_checkpoint.retention.policy import Commit, Retention, expendable
from megascale_checkpoint.storage import join, open_storage
from megascale_common.service import logs
from megascale_common.service.errors import (
    DamagedError,
    NotFoundError,
    NotReadyError,
    ServiceError,
    StateError,
)
from megascale_job.restore import RestorePlan, RestoreSource

MAX_REASON = 200  # characters of a pin's reason


class _StaysError(Exception):
    """The log has changed: the record is no longer to be appended."""


def retention_of(log: CommitLog) -> Retention:
    """The rules that the newest attempt was opened with."""
    newest = log.find_open(log.state.attempt)
    return Retention.from_record(newest.values.get("retention", {}) if newest else {})


def loaded(state: LogState) -> set[Checkpoint]:
    """The checkpoints that the newest attempt may restore, until it has committed its own."""
    newest = state.opens.get(state.attempt)
    if newest is None or state.last[0] == state.attempt:
        return set()
    decision = newest.values.get("restored_from", {})
    found = {(int(decision.get("attempt", 0)), int(decision.get("step", 0)))}
    # Those that it falls to where that one is damaged.
    older = decision.get("older", ())
    return found | {(int(each["written_by_attempt"]), int(each["step"])) for each in older}


def newest_whole(log: CommitLog, uri: str) -> Checkpoint | None:
    """The newest checkpoint whose manifest and files are all there, by size; None for none.

    Raises:
        OSError: the storage does not answer.
    """
    for record in log.commits():
        try:
            check_commit(record, join(uri, record.values["manifest"]))
        except DamagedError:
            continue
        return record.checkpoint
    return None


def to_retire(log: CommitLog, retention: Retention, whole: Checkpoint | None) -> list[Commit]:
    """The checkpoints that would be retired now, oldest first; none while none is known whole."""
    state = log.state
    if whole is None or whole not in state.live:
        return []
    commits = [_commit(record) for record in state.live.values()]
    return expendable(commits, retention, {*state.pins, *loaded(state), whole})


def retire(
    log: CommitLog,
    retention: Retention,
    whole: Checkpoint | None,
    attempt: int | None = None,
    most: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Record]:
    """Append RETIRE for every checkpoint that no rule keeps; returns their COMMIT records.

    Args:
        whole: the newest checkpoint that is known to be whole; without one nothing is retired.
        attempt: that of the committer; None for an administrator.
        most: retire at most so many, the oldest first.

    Raises:
        SupersededError: a later attempt has been opened.
        DamagedError: the log is damaged.
        OSError: the storage does not answer; what was retired before stays so.
    """
    log.refresh()
    done = []
    wanted = to_retire(log, retention, whole)[:most]
    for number, each in enumerate(wanted):
        progress(number, len(wanted))

        def make(each: Commit = each) -> dict[str, Any]:
            if each not in to_retire(log, retention, whole):
                raise _StaysError
            return {"kind": "RETIRE", "of_attempt": each.attempt, "step": each.step}

        commit = log.state.live[each.key]
        try:
            log.append(attempt, make)
        except _StaysError:
            continue
        done.append(commit)
    return done


def pin(log: CommitLog, checkpoint: Checkpoint, reason: str) -> Record:
    """Append PIN, so that the checkpoint is never retired; a second PIN changes the reason.

    Raises:
        NotFoundError: there is no such checkpoint, or no longer.
        DamagedError, OSError: as :meth:`CommitLog.append`.
    """

    def make() -> dict[str, Any]:
        if checkpoint not in log.state.live:
            raise NotFoundError(
                f"step {checkpoint[1]} of attempt {checkpoint[0]} is no complete checkpoint: "
                "`megascale checkpoint list` has those that are",
                reason="CHECKPOINT_NOT_FOUND",
            )
        return {"kind": "PIN", **_named(checkpoint), "name": reason[:MAX_REASON]}

    return log.append(None, make)


def unpin(log: CommitLog, checkpoint: Checkpoint, reason: str | None = None) -> Record:
    """Append UNPIN: the rules hold for the checkpoint again.

    Args:
        reason: only if it is pinned for this one.

    Raises:
        StateError: it is not pinned, or for another reason.
        DamagedError, OSError: as :meth:`CommitLog.append`.
    """

    def make() -> dict[str, Any]:
        found = log.state.pins.get(checkpoint)
        if found is None or reason not in (None, found):
            raise StateError(
                f"step {checkpoint[1]} of attempt {checkpoint[0]} is not pinned: "
                "`megascale checkpoint list` shows what is",
                reason="NOT_PINNED",
            )
        return {"kind": "UNPIN", **_named(checkpoint)}

    return log.append(None, make)


def _named(checkpoint: Checkpoint) -> dict[str, int]:
    return {"of_attempt": checkpoint[0], "step": checkpoint[1]}


def _commit(record: Record) -> Commit:
    time_s = datetime.fromisoformat(record.values["time"]).timestamp()
    return Commit(record.attempt, record.step, time_s)


# Keeps the checkpoint of another job while a job starts from it (checkpoint.load_uri).
#
# The job that loads pins it in the other's log before it restores it, and takes the pin back after
# its own first commit. Where it may only read there, nothing holds the checkpoint: the reading then
# depends on nobody removing it meanwhile.

_log = logs.get("retention")


def hold(job: str, load_uri: str, plan: RestorePlan) -> None:
    """Pin what ``plan`` restores from ``load_uri``; nothing where it restores something else.

    Raises:
        NotReadyError: it was removed meanwhile; decide again.
    """
    if not load_uri or plan.source is not RestoreSource.STORAGE or plan.written_by_attempt:
        return
    log = CommitLog(open_storage(load_uri))
    try:
        log.refresh()
        found = [
            record.checkpoint
            for record in log.commits()
            if join(load_uri, record.values["manifest"]) == plan.manifest_uri
        ]
        if not found:
            raise NotFoundError(f"{plan.manifest_uri} is retired")
        if found[0] not in log.state.pins:
            pin(log, found[0], _reason(job))
    except NotFoundError as error:
        raise NotReadyError(
            f"checkpoint.load_uri: {plan.manifest_uri} was removed while it was chosen: try again"
        ) from error
    except (ServiceError, OSError) as error:
        _log.warning("the loaded checkpoint is not pinned", uri=load_uri, error=str(error))


def release(opened: Record) -> None:
    """Take the pin back that :func:`hold` has set for the job whose OPEN this is."""
    load_uri = opened.values.get("load_uri", "")
    if not load_uri:
        return
    try:
        other = CommitLog(open_storage(load_uri))
        other.refresh()
        reason = _reason(opened.values["job"])
        for checkpoint, found in other.pins().items():
            if found == reason:
                unpin(other, checkpoint, reason)
    except (ServiceError, OSError) as error:
        _log.warning("the loaded checkpoint stays pinned", uri=load_uri, error=str(error))


def _reason(job: str) -> str:
    return f"job {job} starts from it"

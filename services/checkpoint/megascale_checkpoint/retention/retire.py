"""Retires and pins checkpoints in the commit log, by the job's rules or an operator's command.

A checkpoint exists through its COMMIT. RETIRE ends that, before any of its files are removed
(:mod:`megascale_checkpoint.retention.collect`). Each condition of a RETIRE is checked again
whenever another writer has appended first, so it never overtakes a PIN, or an OPEN that restores
the checkpoint.

:func:`expendable` applies the rules to the commits of a log; it is pure. Without a rule all are
kept, because a removed checkpoint cannot be brought back.

A job that starts from another job's checkpoint (checkpoint.load_uri) pins it in that job's log
before it restores it (:func:`hold`), and unpins it after its own first commit (:func:`release`). If
it can only read there, nothing protects the checkpoint, and the restore fails if it is removed
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from megascale_checkpoint.commit.commit_log import CommitLog, Record
from megascale_checkpoint.commit.commit_record import Checkpoint, LogState
from megascale_checkpoint.commit.restore_decision import check_commit
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
from megascale_job.visible import counted

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Commit:
    """A checkpoint that exists; ``time_s`` is when it was committed, in seconds since 1970."""

    attempt: int
    step: int
    time_s: float

    @property
    def key(self) -> Checkpoint:
        """Attempt and step, which identify it."""
        return self.attempt, self.step


@dataclass(frozen=True, slots=True)
class Retention:
    """The rules; a checkpoint is kept if any of them keeps it. 0 is no rule.

    Attributes:
        keep_latest: keep this many of the newest.
        keep_every_steps: keep the first at or after every multiple of this many steps.
        keep_every_hours: keep the first of every period of this many hours, counted from 1970.
    """

    keep_latest: int = 0
    keep_every_steps: int = 0
    keep_every_hours: float = 0.0

    @property
    def keeps_all(self) -> bool:
        """True if there is no rule."""
        return not (self.keep_latest or self.keep_every_steps or self.keep_every_hours)

    def to_record(self) -> dict[str, Any]:
        """Plain values for an OPEN record; their names never change."""
        return asdict(self)

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> Retention:
        """The inverse of :meth:`to_record`; records of older builds have no rules."""
        return cls(
            int(values.get("keep_latest", 0)),
            int(values.get("keep_every_steps", 0)),
            float(values.get("keep_every_hours", 0.0)),
        )

    def __str__(self) -> str:
        rules = {
            f"the newest {self.keep_latest}": self.keep_latest,
            f"one of every {counted(self.keep_every_steps, 'step')}": self.keep_every_steps,
            f"one of every {counted(self.keep_every_hours, 'hour')}": self.keep_every_hours,
        }
        return " and ".join(text for text, given in rules.items() if given) or "all"


def expendable(
    commits: Sequence[Commit], retention: Retention, protected: Collection[Checkpoint]
) -> list[Commit]:
    """The commits that no rule keeps, oldest first.

    Args:
        commits: those that exist, oldest first in the order of the log.
        protected: kept in any case: pinned, being loaded, or the newest whole one.
    """
    if retention.keeps_all or not commits:
        return []
    kept = {commits[-1].key, *protected}  # the newest stays whatever the rules are
    if retention.keep_latest:
        kept |= {each.key for each in commits[-retention.keep_latest :]}
    if retention.keep_every_steps:
        spans = _spans(commits, lambda each: each.step // retention.keep_every_steps)
        kept |= {each.key for span, each in spans.items() if span}  # 0 is before the first multiple
    if retention.keep_every_hours:
        length_s = retention.keep_every_hours * HOUR_S
        kept |= {each.key for each in _spans(commits, lambda c: c.time_s // length_s).values()}
    return [each for each in commits if each.key not in kept]


def _spans(commits: Sequence[Commit], span_of: Callable[[Commit], float]) -> dict[float, Commit]:
    """The first commit in each span, by the newest attempt that has one there.

    Steps that an earlier attempt committed after the step that a later one restored were given up.
    """
    first: dict[float, Commit] = {}
    for each in commits:
        found = first.get(span_of(each))
        if found is None or each.attempt > found.attempt:
            first[span_of(each)] = each
    return first


MAX_REASON = 200  # characters of a pin's reason


class _NotExpendableError(Exception):
    """The log has changed, and the record must no longer be appended."""


def retention_of(log: CommitLog) -> Retention:
    """The rules with which the newest attempt was opened."""
    newest = log.find_open(log.state.attempt)
    return Retention.from_record(newest.values.get("retention", {}) if newest else {})


def loaded(state: LogState) -> set[Checkpoint]:
    """The checkpoints that the newest attempt can restore, until it has its own commit."""
    newest = state.opens.get(state.attempt)
    if newest is None or state.last[0] == state.attempt:
        return set()
    decision = newest.values.get("restored_from", {})
    found = {(int(decision.get("attempt", 0)), int(decision.get("step", 0)))}
    # Those to which it falls back if that one is damaged.
    older = decision.get("older", ())
    return found | {(int(each["written_by_attempt"]), int(each["step"])) for each in older}


def newest_whole(log: CommitLog, uri: str) -> Checkpoint | None:
    """The newest checkpoint with a manifest and all files, checked by size; None for none.

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
    """The checkpoints to retire now, oldest first; empty while none is known to be whole."""
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
    """Append RETIRE for every checkpoint that no rule keeps; return their COMMIT records.

    Args:
        whole: the newest checkpoint that is known to be whole; without one nothing is retired.
        attempt: attempt of the committer; None for an administrator.
        most: retire at most this many, the oldest first.

    Raises:
        SupersededError: a later attempt has been opened.
        DamagedError: the log is damaged.
        OSError: the storage does not answer; records appended before remain.
    """
    log.refresh()
    done = []
    wanted = to_retire(log, retention, whole)[:most]
    for number, each in enumerate(wanted):
        progress(number, len(wanted))

        def make(each: Commit = each) -> dict[str, Any]:
            # On the log as it is now: a PIN or an OPEN may have come in between.
            if each not in to_retire(log, retention, whole):
                raise _NotExpendableError
            return {"kind": "RETIRE", "of_attempt": each.attempt, "step": each.step}

        commit = log.state.live[each.key]
        try:
            log.append(attempt, make)
        except _NotExpendableError:
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
                f"step {checkpoint[1]} of attempt {checkpoint[0]} is not a complete checkpoint: "
                "`megascale checkpoint list` shows those that are",
                reason="CHECKPOINT_NOT_FOUND",
            )
        return {"kind": "PIN", **_named(checkpoint), "name": reason[:MAX_REASON]}

    return log.append(None, make)


def unpin(log: CommitLog, checkpoint: Checkpoint, reason: str | None = None) -> Record:
    """Append UNPIN: the rules apply to the checkpoint again.

    Args:
        reason: unpin it only if it is pinned for this reason.

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


_log = logs.get("retention")


def hold(job: str, load_uri: str, plan: RestorePlan) -> None:
    """Pin the checkpoint that ``plan`` restores from ``load_uri``, if it restores from there.

    Raises:
        NotReadyError: it was removed meanwhile; decide again.
    """
    # An attempt number means that the job's own log holds the checkpoint.
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
        # Such as a folder that this job can only read: it starts all the same.
        _log.warning("the loaded checkpoint is not pinned", uri=load_uri, error=str(error))


def release(opened: Record) -> None:
    """Remove the pin that :func:`hold` has set for the job whose OPEN record this is."""
    load_uri = opened.values.get("load_uri", "")
    if not load_uri:
        return
    try:
        other = CommitLog(open_storage(load_uri))
        other.refresh()
        reason = _reason(opened.values["job"])
        for checkpoint, found in other.pins().items():
            if found == reason:  # a pin of an operator, with another reason, stays
                unpin(other, checkpoint, reason)
    except (ServiceError, OSError) as error:
        _log.warning("the loaded checkpoint stays pinned", uri=load_uri, error=str(error))


def _reason(job: str) -> str:
    return f"job {job} starts from it"

"""Decides what a new attempt restores: the newest whole state, in memory or on storage.

The committer decides once per attempt, for all ranks; the room ``restore`` then fills each rank's
slot.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.commit_log import CommitLog, Record
from megascale_checkpoint.commit.commit_record import FOLDER
from megascale_checkpoint.storage import join, open_storage
from megascale_common.service.errors import DamagedError, NotFoundError, UnusableError
from megascale_job.restore import RestorePlan, RestoreSource

MAX_NAMED = 20  # damaged files that one answer lists
MOST_OLDER = 3  # older checkpoints that an attempt can fall back to while it restores


@dataclass(frozen=True, slots=True)
class SealedStep:
    """The newest step that all ranks hold sealed under one attempt and layout; step 0 is none."""

    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class RestoreDecision:
    """The plan for all ranks. ``passed_over`` names the damaged files of newer checkpoints."""

    plan: RestorePlan
    passed_over: tuple[str, ...] = ()

    def to_record(self) -> dict[str, Any]:
        """Plain values for an OPEN record of the commit log, whose names never change."""
        plan = self.plan
        return {
            "source": plan.source.value,
            "step": plan.step,
            "attempt": plan.written_by_attempt,
            "manifest_uri": plan.manifest_uri,
            "manifest_xxh3": plan.manifest_xxh3,
            "older": [older.to_mapping() for older in plan.older],
            "passed_over": list(self.passed_over),
        }

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> RestoreDecision:
        """The inverse of :meth:`to_record`; raises DamagedError if a field is missing.

        Types need no check here: reading the record has checked them.
        """
        try:
            plan = RestorePlan(
                RestoreSource(values["source"]),
                values["step"],
                values["attempt"],
                values["manifest_uri"],
                values["manifest_xxh3"],
                tuple(RestorePlan.from_mapping(older) for older in values["older"]),
            )
            return cls(plan, tuple(values["passed_over"]))
        except KeyError as error:
            raise DamagedError(FOLDER, f"an OPEN lacks restored_from.{error.args[0]}") from error


def decide(
    log: CommitLog,
    uri: str,
    sealed: SealedStep,
    refused_steps: frozenset[int],
    load_uri: str = "",
    *,
    weights: bool = False,
) -> RestoreDecision:
    """Choose the newest state that is sealed or committed, whole, and not refused. Reads storage.

    A job that has neither starts from the newest whole checkpoint in the folder ``load_uri``, if
    one is given; with ``weights`` it takes the parameters alone, at step 0. Files are checked here
    by name and size, one stat each; their bytes are verified when they are read.

    Raises:
        UnusableError: the job has checkpoints, and none of them can be used. Starting from step 0
            would silently lose its work.
        NotFoundError: ``load_uri`` is needed and holds no checkpoint that can be used.
        RequestError: ``load_uri`` is not supported.
        OSError: the storage does not answer, which is no evidence of damage.
    """
    passed_over: list[str] = []
    # A commit wins only if it is newer than the sealed step: at the same step, memory is faster.
    in_memory = sealed.step > 0 and sealed.step not in refused_steps
    after_step = sealed.step if in_memory else 0
    committed = _newest_whole(log, uri, after_step, refused_steps, passed_over)
    # Memory wins: from here on `committed` is the plan from memory.
    if committed is None and in_memory:
        committed = _with_stored_copy(log, uri, sealed)
    if committed is not None:
        plan = replace(committed, older=_older(log, uri, committed.step, refused_steps))
        return RestoreDecision(plan, tuple(passed_over[:MAX_NAMED]))
    # Only a job without any commit can get past this: load_uri never replaces a job's own work.
    _refuse_to_start_over(log, uri, refused_steps, passed_over)
    if load_uri:
        other = CommitLog(open_storage(load_uri))
        other.refresh()
        # Above -1, because an imported model is step 0.
        loaded = _newest_whole(other, load_uri, -1, refused_steps, passed_over)
        if loaded is None:
            damaged = f": {'; '.join(passed_over[:MAX_NAMED])}" if passed_over else ""
            raise NotFoundError(
                f"checkpoint.load_uri: {load_uri} holds no complete checkpoint to start "
                f"from{damaged}; {_what_to_give(load_uri)}"
            )
        # Attempt numbers of two jobs are unrelated: no attempt of this job wrote the state.
        plan = replace(
            loaded,
            written_by_attempt=0,
            older=tuple(
                replace(older, written_by_attempt=0)
                for older in _older(other, load_uri, loaded.step, refused_steps)
            ),
        )
        if weights:
            # Step 0 tells each rank to take the parameters and to begin with new optimizer states.
            older = tuple(replace(each, step=0) for each in plan.older)
            plan = replace(plan, step=0, older=older)
        return RestoreDecision(plan, tuple(passed_over[:MAX_NAMED]))
    return RestoreDecision(RestorePlan(), tuple(passed_over[:MAX_NAMED]))


def _what_to_give(load_uri: str) -> str:
    """The remedy for a folder that holds no job's checkpoint but maybe one of other software."""
    storage = open_storage(load_uri)
    if storage.size("config.json") is not None:
        command = f"megascale checkpoint import {load_uri} --format hf --to NEW"
        return f"it is a Hugging Face model: `{command}` writes it to a folder to give here"
    if storage.size(".metadata") is not None:
        return (
            "it is one of torch.distributed.checkpoint: give the folder of the job that it was "
            "exported from; `megascale checkpoint import` reads Hugging Face models"
        )
    return "give the folder of a job that has committed one, or leave it out"


def _with_stored_copy(log: CommitLog, uri: str, sealed: SealedStep) -> RestorePlan:
    """A plan from memory that names the manifest of the same state, if it is committed and whole.

    With it, a rank whose memory turns out damaged or lost reads storage within the same attempt.
    """
    record = _stored_copy(log, sealed)
    if record is not None:
        manifest_uri = join(uri, record.values["manifest"])
        try:
            check_commit(record, manifest_uri)
        except DamagedError:
            record = None  # memory is read first and can still be whole
    if record is None:
        return RestorePlan(RestoreSource.MEMORY, sealed.step, sealed.attempt)
    digest = record.values["manifest_xxh3"]
    return RestorePlan(RestoreSource.MEMORY, sealed.step, sealed.attempt, manifest_uri, digest)


def _stored_copy(log: CommitLog, sealed: SealedStep) -> Record | None:
    """The COMMIT of the sealed state, by its own attempt or by one that continued from it.

    An attempt that restores an unstored step from memory commits that step as its own.
    """
    for record in log.commits():
        if record.step != sealed.step:
            continue
        opened = log.find_open(record.attempt)
        source = opened.values.get("restored_from", {}) if opened is not None else {}
        adopted = (source.get("step"), source.get("attempt")) == (sealed.step, sealed.attempt)
        if record.attempt == sealed.attempt or adopted:
            return record
    return None


def _older(
    log: CommitLog, uri: str, step: int, refused_steps: frozenset[int]
) -> tuple[RestorePlan, ...]:
    """Commits below ``step``, newest first; their files are not checked yet."""
    found = (
        RestorePlan(
            RestoreSource.STORAGE,
            record.step,
            record.attempt,
            join(uri, record.values["manifest"]),
            record.values["manifest_xxh3"],
            checked=False,
        )
        for record in log.commits()
        if record.step < step and record.step not in refused_steps
    )
    return tuple(itertools.islice(found, MOST_OLDER))


def _refuse_to_start_over(
    log: CommitLog, uri: str, refused_steps: frozenset[int], passed_over: list[str]
) -> None:
    """Raise UnusableError if the log holds a COMMIT, or a damaged record that may be one."""
    commits = log.commits()
    if not commits and not log.damaged:
        return
    refused = [
        f"step {r.step} failed its checksums when it was restored"
        for r in commits
        if r.step in refused_steps
    ]
    problems = "; ".join([*passed_over, *refused][:MAX_NAMED])
    raise UnusableError(
        f"the checkpoints of this job in {uri} cannot be used: {problems}. "
        "Put the files back, or submit the job again with a new checkpoint.uri"
    )


def _newest_whole(
    log: CommitLog, uri: str, after_step: int, refused_steps: frozenset[int], passed_over: list[str]
) -> RestorePlan | None:
    """The newest usable COMMIT above ``after_step``; adds damaged ones to ``passed_over``."""
    passed_over += [str(error) for error in log.damaged]
    for record in log.commits():
        if record.step <= after_step:
            break
        if record.step in refused_steps:
            continue
        manifest_uri = join(uri, record.values["manifest"])
        try:
            check_commit(record, manifest_uri)
        except DamagedError as error:
            passed_over.append(str(error))
            continue
        xxh3 = record.values["manifest_xxh3"]
        return RestorePlan(RestoreSource.STORAGE, record.step, record.attempt, manifest_uri, xxh3)
    return None


def check_commit(record: Record, manifest_uri: str) -> manifests.Manifest:
    """The manifest that a COMMIT names, verified; its files are checked by size.

    Raises:
        DamagedError: the manifest is not the one committed, or a file is missing or has another
            size.
    """
    storage, manifest = manifests.load(manifest_uri, record.values["manifest_xxh3"])
    manifests.check_sizes(storage, manifest)
    return manifest

"""An attempt that is to be opened, by a driver or by hand: what its OPEN record says.

A driver asks over gRPC (:mod:`megascale_checkpoint.serve.service`) and issues the attempt's number.
A run by hand has no driver: its first process asks over the daemon's local socket
(:mod:`megascale_checkpoint.serve.driverless`), and the commit log gives the number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.commit.commit_record import Record
from megascale_checkpoint.commit.restore_decision import RestoreDecision, SealedStep, decide
from megascale_checkpoint.retention.retire import Retention, hold
from megascale_checkpoint.storage import open_storage
from megascale_common.service.errors import RequestError, SupersededError
from megascale_job.config import CheckpointConfig

BY_HAND = "by_hand"  # field of the OPEN records of runs without a driver
HELD = "held"  # field of the OPEN records that say which node holds which ranks


@dataclass(frozen=True, slots=True)
class Opening:
    """What is asked for, but for the attempt's number.

    ``holders``: the node of each rank, whose daemon alone may report for it; empty: any daemon may.
    """

    job: str
    checkpoint: CheckpointConfig
    world_size: int
    holders: Mapping[int, str] = field(default_factory=dict)

    def check(self, commit_log: CommitLog) -> None:
        """Find out before anything is trained whether the folder can be used.

        Raises:
            RequestError: it belongs to another job.
            OSError: the storage does not answer, or refuses.
        """
        open_storage(
            self.checkpoint.uri
        ).check()  # also what is only needed later, such as large files
        commit_log.refresh()
        refuse_foreign(commit_log, self.job)

    def record(
        self,
        commit_log: CommitLog,
        sealed: SealedStep,
        refused: frozenset[int],
        epoch: tuple[int, ...],
    ) -> dict[str, Any]:
        """The fields of the OPEN record, with what the attempt restores.

        Raises:
            RequestError, UnusableError, NotFoundError, OSError: see
                :func:`megascale_checkpoint.commit.restore_decision.decide`.
        """
        refuse_foreign(commit_log, self.job)
        # Stored in the record: ranks of one attempt must all restore the same step, even if the
        # call is repeated after the storage has changed.
        decision = self.decision(commit_log, sealed, refused)
        settings = self.checkpoint
        hold(self.job, settings.load_uri, decision.plan)
        retention = Retention(
            settings.keep_latest, settings.keep_every_steps, settings.keep_every_hours
        )
        held = {HELD: runs_of(self.holders)} if self.holders else {}
        return {
            **held,
            "job": self.job,
            "world_size": self.world_size,
            "epoch": list(epoch),
            "restored_from": decision.to_record(),
            "load_uri": settings.load_uri,
            "load_weights": settings.load == "weights",
            "retention": retention.to_record(),
        }

    def decision(
        self, commit_log: CommitLog, sealed: SealedStep, refused: frozenset[int]
    ) -> RestoreDecision:
        """What the attempt restores; raises as :meth:`record`."""
        settings = self.checkpoint
        return decide(
            commit_log,
            settings.uri,
            sealed,
            refused,
            settings.load_uri,
            weights=settings.load == "weights",
        )


def refuse_foreign(commit_log: CommitLog, job: str) -> None:
    """Raise RequestError where another job has written: two jobs would fence each other."""
    owner = next((name for name in commit_log.state.jobs if name != job), None)
    if owner is not None:
        raise RequestError(
            f"checkpoint.uri: the checkpoint folder belongs to job {owner}: give {job} a "
            "checkpoint.uri of its own"
        )


def refuse_used(commit_log: CommitLog, attempt: int) -> None:
    """Raise SupersededError where the number was that of another attempt, which has run.

    A driver may repeat its call, and gets the record of the first one, as long as nothing runs. If
    the attempt was opened by hand or has committed, the call is another job's of the same name: it
    would start from what that one started from, and lose its work.
    """
    record = commit_log.find_open(attempt)
    if record is None:
        return
    by_hand = record.values.get(BY_HAND, False)
    if by_hand or commit_log.state.newest_step(attempt) >= 0:
        how = "was opened by hand" if by_hand else "has committed checkpoints"
        raise SupersededError(
            f"attempt {attempt} {how}: an attempt behind {commit_log.state.attempt} may be opened",
            metadata={"attempt": str(commit_log.state.attempt)},
        )


def holders_in(record: Record | None) -> dict[int, str]:
    """The node of each rank by an OPEN record; empty where it says nothing."""
    held = record.values.get(HELD, {}) if record is not None else {}
    return {
        rank: node
        for node, runs in held.items()
        for first, last in runs
        for rank in range(first, last + 1)
    }


def runs_of(holders: Mapping[int, str]) -> dict[str, list[list[int]]]:
    """The ranks of each node as runs from first to last: those of a node mostly are one."""
    found: dict[str, list[list[int]]] = {}
    for rank, node in sorted(holders.items()):
        runs = found.setdefault(node, [])
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return found

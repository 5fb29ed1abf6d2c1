"""What a node's checkpoint daemon reports of a job: snapshots, replicas, commits, failures."""

from __future__ import annotations

from dataclasses import dataclass

from megascale_driver.core.values.conditions import CheckpointFailure


@dataclass(frozen=True, slots=True)
class SealedSnapshot:
    """A complete snapshot of one rank in its node's staging memory."""

    rank: int
    attempt: int
    step: int
    layout_digest: str


@dataclass(frozen=True, slots=True)
class Progress:
    """Snapshots and checkpoints of one job as a node's daemon reports them."""

    job: str
    sealed: tuple[SealedSnapshot, ...] = ()
    committed_step: int = 0
    committed_by_attempt: int = 0
    manifest_uri: str = ""
    failure: CheckpointFailure | None = None
    skipped_snapshots: int = 0
    skipped_step: int = 0
    skipped_by_attempt: int = 0
    replicas: tuple[SealedSnapshot, ...] = ()
    replica_failure: CheckpointFailure | None = None
    damaged: tuple[CheckpointFailure, ...] = ()

"""What goes wrong with a job beside its phase: its conditions, and failures that nodes report."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class ConditionType(enum.StrEnum):
    """What a condition of a job is about."""

    NOT_SAVED = "NOT_SAVED"
    CHECKPOINT_FAILING = "CHECKPOINT_FAILING"


@dataclass(frozen=True, slots=True)
class Condition:
    """Something about a job beside its phase; ``reason`` is for programs."""

    type: ConditionType
    reason: str
    message: str
    since_s: float


@dataclass(frozen=True, slots=True)
class CheckpointFailure:
    """A rank's part of a checkpoint that could not be made durable, or a commit that failed."""

    attempt: int
    step: int
    rank: int
    error: str

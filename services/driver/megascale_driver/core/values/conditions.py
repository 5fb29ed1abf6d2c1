"""What goes wrong beside a phase: conditions of jobs, failures that nodes report, slow targets."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

MAX_SLOW: Final = 32  # slow targets that are kept of a node


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


@dataclass(frozen=True, slots=True)
class SlowCheck:
    """A target of a node that was slower than the fleet in ``check``, ``times`` in a row.

    ``origin``: the attempt (JOB/NUMBER) whose checks measured it last; "" on demand.
    """

    check: str
    target: str
    times: int
    origin: str = ""

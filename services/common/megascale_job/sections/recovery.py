"""A job's section ``recovery``, and its checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megascale_job.problems import JobProblem
from megascale_job.sections.fields import ADDED, bounds

_MAX_REPAIR_HOURS = 8760.0
_MAX_SPARE_PROBABILITY = 0.999999
_MAX_ROLL_BACKS = 8  # as many as the driver keeps (MAX_ROLLBACKS of its core)
_RISE = f"give more than 1 up to {10**6}, or 0 (off)"
_REPAIR = f"give more than 0 up to {_MAX_REPAIR_HOURS:g} hours until a lost node is back"

DivergenceAction = Literal["stop", "continue", "roll_back"]
SpareRule = Literal["count", "auto"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """Limits of automatic recovery; ``spare_nodes`` is the number of spares unless that is auto.

    A run counts as diverged after ``divergence_steps`` steps in a row (0: never; half of the job's
    steps if that is less) that are not finite, or whose loss is above ``loss_rise_factor`` (0:
    never) times that of the start. With roll_back it continues from the last checkpoint before
    that, without the data since then; it ends after ``max_roll_backs`` of them.
    """

    max_restarts: int = field(default=20, metadata=bounds(0, 10**6, low="give 0 or more"))
    max_restarts_without_progress: int = field(
        default=3, metadata=bounds(0, 10**6, low="give 0 or more")
    )
    spare_nodes: int = field(default=0, metadata=bounds(0, 10**4, low="give 0 or more"))
    collective_timeout_s: float = field(
        default=300.0, metadata=bounds(1, 86_400, remedy="give 1 second to 86400")
    )
    divergence_steps: int = field(default=10, metadata=bounds(0, 10**6, low="give 0 or more"))
    on_non_finite: DivergenceAction = "stop"
    loss_rise_factor: float = field(
        default=3.0, metadata=bounds(above=1, most=10**6, or_zero=True, remedy=_RISE)
    )
    on_loss_rise: DivergenceAction = "continue"
    spares: SpareRule = field(default="count", metadata=ADDED)
    repair_hours: float = field(
        default=7.5, metadata=bounds(above=0, most=_MAX_REPAIR_HOURS, remedy=_REPAIR, added=True)
    )
    spare_probability: float = field(
        default=0.99,
        metadata=bounds(
            0.5, _MAX_SPARE_PROBABILITY, remedy=f"give 0.5 to {_MAX_SPARE_PROBABILITY}", added=True
        ),
    )
    max_roll_backs: int = field(
        default=3,
        metadata=bounds(1, _MAX_ROLL_BACKS, remedy=f"give 1 to {_MAX_ROLL_BACKS}", added=True),
    )


def recovery_problems(recovery: RecoveryConfig, checkpoint_uri: str) -> Iterator[JobProblem]:
    """Problems of a job's section ``recovery``, except bounds of its numbers."""
    actions = {"on_non_finite": recovery.on_non_finite, "on_loss_rise": recovery.on_loss_rise}
    for name, action in actions.items():
        if action == "roll_back" and not checkpoint_uri:
            yield JobProblem(
                f"recovery.{name}",
                "is roll_back, and checkpoint.uri is empty",
                "give a folder for checkpoints, or use stop",
            )
    if recovery.spares == "auto" and recovery.spare_nodes:
        yield JobProblem(
            "recovery.spare_nodes",
            f"{recovery.spare_nodes} is given, and recovery.spares is auto",
            "give one of the two",
        )

"""Detects divergence from step records: values that are not finite, or a loss far above its start.

A loss or gradient norm that is not finite is a fact; if it stays so for many steps, the weights are
lost or every update is skipped. A loss above a multiple of its start is an inference, so only a
series of steps counts, never a single high step, and no step of the warm-up.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from megascale_job.config import JobConfig

START_STEPS = 10  # the start is the mean of this many finite losses


class DivergenceKind(enum.StrEnum):
    """Kinds of divergence."""

    NON_FINITE = "NON_FINITE"
    LOSS_RISE = "LOSS_RISE"


@dataclass(frozen=True, slots=True)
class StepSample:
    """The fields of a step record that show divergence.

    ``empty``: its batch had no target, so it has no loss.
    """

    attempt: int
    step: int
    loss: float
    gradient_norm: float
    skipped_updates: int = 0
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Divergence:
    """A series of ``count`` bad steps, from ``first_step`` to the sample's step."""

    kind: DivergenceKind
    first_step: int
    count: int
    sample: StepSample
    start_loss: float


@dataclass(frozen=True, slots=True)
class DivergenceTrack:
    """The state of a job's detection, of constant size.

    ``kind``, ``first_step`` and ``count`` describe the episode in progress; ``count`` is 0 without
    one. ``starts`` losses of the job's start were seen, with the sum ``start_sum``; later attempts
    do not change the start.
    """

    starts: int = 0
    start_sum: float = 0.0
    kind: DivergenceKind = DivergenceKind.NON_FINITE
    first_step: int = 0
    count: int = 0
    last: StepSample | None = None

    @property
    def start_loss(self) -> float:
        """Mean loss of the start; 0 before it is known."""
        return self.start_sum / self.starts if self.starts >= START_STEPS else 0.0


def observe(track: DivergenceTrack, sample: StepSample, config: JobConfig) -> DivergenceTrack:
    """The track after the next step record."""
    if sample.empty:
        return track  # its loss is 0/0, which says nothing about the weights
    kind = _kind(track, sample, config)
    if math.isfinite(sample.loss) and track.starts < START_STEPS:
        track = replace(track, starts=track.starts + 1, start_sum=track.start_sum + sample.loss)
    if kind is None:
        return replace(track, count=0, last=sample)
    # A new attempt starts a new series: it has restored older weights.
    again = track.last is not None and track.last.attempt == sample.attempt
    if again and track.count and track.kind is kind:
        return replace(track, count=track.count + 1, last=sample)
    return replace(track, kind=kind, first_step=sample.step, count=1, last=sample)


def found(track: DivergenceTrack, config: JobConfig) -> Divergence | None:
    """The divergence at the newest record; reported again at each multiple of the limit."""
    limit = _limit(config)
    if not limit or track.last is None or not track.count or track.count % limit:
        return None
    return Divergence(track.kind, track.first_step, track.count, track.last, track.start_loss)


def _limit(config: JobConfig) -> int:
    """Bad steps in a row that count as divergence; fewer for a job that would end before that."""
    return min(config.recovery.divergence_steps, max(1, config.training.steps // 2))


def _kind(track: DivergenceTrack, sample: StepSample, config: JobConfig) -> DivergenceKind | None:
    if not (math.isfinite(sample.loss) and math.isfinite(sample.gradient_norm)):
        return DivergenceKind.NON_FINITE
    limit = config.recovery.loss_rise_factor * track.start_loss
    if limit > 0 and sample.step > config.schedule.warmup_steps and sample.loss > limit:
        return DivergenceKind.LOSS_RISE
    return None

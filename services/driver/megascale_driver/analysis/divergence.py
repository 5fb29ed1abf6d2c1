"""Whether a run diverges, from its step records: not finite, or a loss far above its start.

A loss or gradient norm that is not finite is a fact; that it stays so for many steps means that the
weights are lost, or that every update is skipped. A loss above a multiple of its start is an
inference, so a single high step never counts: only steps in a row do, and none of the warm-up.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from megascale_job.config import JobConfig

START_STEPS = 10  # whose mean loss is the start, unless they are not finite


class DivergenceKind(enum.StrEnum):
    """What diverges."""

    NON_FINITE = "NON_FINITE"
    LOSS_RISE = "LOSS_RISE"


@dataclass(frozen=True, slots=True)
class StepSample:
    """What a step record shows of divergence; ``empty``: its batch had no target, so no loss."""

    attempt: int
    step: int
    loss: float
    gradient_norm: float
    skipped_updates: int = 0
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Divergence:
    """``count`` steps in a row up to the sample's; the first of them is ``first_step``."""

    kind: DivergenceKind
    first_step: int
    count: int
    sample: StepSample
    start_loss: float


@dataclass(frozen=True, slots=True)
class DivergenceTrack:
    """What is kept of a job's records, O(1).

    ``kind`` and the two figures after it are of the episode in progress; without one ``count`` is
    0. ``starts`` losses with the sum ``start_sum`` are seen of the job's start, which later
    attempts do not change.
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
    """The track with the next step record."""
    if sample.empty:
        return track  # 0/0 says nothing about the weights, for or against
    kind = _kind(track, sample, config)
    if math.isfinite(sample.loss) and track.starts < START_STEPS:
        track = replace(track, starts=track.starts + 1, start_sum=track.start_sum + sample.loss)
    if kind is None:
        return replace(track, count=0, last=sample)
    again = track.last is not None and track.last.attempt == sample.attempt
    if again and track.count and track.kind is kind:
        return replace(track, count=track.count + 1, last=sample)
    return replace(track, kind=kind, first_step=sample.step, count=1, last=sample)


def found(track: DivergenceTrack, config: JobConfig) -> Divergence | None:
    """The divergence that the newest record shows; repeated while the episode goes on."""
    limit = _limit(config)
    if not limit or track.last is None or not track.count or track.count % limit:
        return None
    return Divergence(track.kind, track.first_step, track.count, track.last, track.start_loss)


def _limit(config: JobConfig) -> int:
    """Steps in a row that are a divergence; a short job would end before the usual number."""
    return min(config.recovery.divergence_steps, max(1, config.training.steps // 2))


def _kind(track: DivergenceTrack, sample: StepSample, config: JobConfig) -> DivergenceKind | None:
    if not (math.isfinite(sample.loss) and math.isfinite(sample.gradient_norm)):
        return DivergenceKind.NON_FINITE
    limit = config.recovery.loss_rise_factor * track.start_loss
    if limit > 0 and sample.step > config.schedule.warmup_steps and sample.loss > limit:
        return DivergenceKind.LOSS_RISE
    return None

"""Control of an update: learning rate, clip factor, gradient scale, and whether it is applied.

The learning rate is a pure function of the step number; all else is decided on the device. One
all-reduce over all ranks at the end of a step carries everything that is a sum over ranks, in
float64. Nothing here waits for the device: the results are tensors that the update reads, and the
host reads them later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from megascale_job.config import JobConfig
from megascale_job.layout import Coordinates
from megascale_job.sizes.parameter_table import BufferPlan, stands_for


def learning_rate(config: JobConfig, step: int) -> float:
    """Learning rate of update ``step``, counted from 0.

    It rises linearly over the first ``schedule.warmup_steps`` updates, reaches
    ``optimizer.learning_rate`` at the last of them, and falls by ``schedule.decay`` to
    ``schedule.min_ratio`` of that at update ``training.steps - 1``.
    """
    schedule, peak = config.schedule, config.optimizer.learning_rate
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak
    length = max(1, config.training.steps - 1 - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / length)
    share = 1.0 - done if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (schedule.min_ratio + (1.0 - schedule.min_ratio) * share)


# Reasons for a skipped update; the index is the number on the device, 0 for an applied update.
SKIP_REASONS = ("", "no_targets", "not_finite", "norm")
_NO_TARGETS, _NOT_FINITE, _NORM = range(1, len(SKIP_REASONS))
_CLIP_EPSILON = 1e-6  # keeps the clip factor finite at norm 0


@dataclass(frozen=True)
class StepTotals:
    """Sums over all ranks, float64 scalars on the device.

    ``entropy``, ``z_loss``, ``weight`` and the auxiliary terms ``balance`` and ``router_z`` are
    sums over the tokens of the global batch. ``squared_norm`` is the squared norm of the summed
    gradient, with each parameter counted once. ``broken_ranks`` counts ranks with a non-finite
    gradient. ``votes`` and ``wishes`` are about snapshots
    (:mod:`megascale_trainer.process.snapshot_steps`).
    """

    entropy: torch.Tensor
    z_loss: torch.Tensor
    weight: torch.Tensor
    squared_norm: torch.Tensor
    broken_ranks: torch.Tensor
    votes: torch.Tensor
    wishes: torch.Tensor
    balance: torch.Tensor
    router_z: torch.Tensor


@dataclass(frozen=True)
class StageSums:
    """Sums over the micro-batches that a rank has run, a tensor for each micro-batch and stage.

    ``losses``: float64 [3] of the last stage: entropy, z-loss, weight. ``terms``: float64 [2] of
    stages with experts: balance, z-loss of the router.
    """

    losses: list[torch.Tensor] = field(default_factory=list)
    terms: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class StepControl:
    """The decision about one update, as scalars on the device.

    ``scale`` turns summed gradients into clipped means, ``apply`` is 1 or 0; both are float32.
    ``reason`` is an index of :data:`SKIP_REASONS`. ``skipped`` (float64) counts the updates of the
    run before this one that were not applied.
    """

    norm: torch.Tensor
    clip: torch.Tensor
    scale: torch.Tensor
    apply: torch.Tensor
    reason: torch.Tensor
    skipped: torch.Tensor


def local_totals(
    sums: StageSums,
    gradients: Iterable[tuple[BufferPlan, torch.Tensor]],
    at: Coordinates,
    vote: int,
    device: torch.device,
    wish: int = 0,
    *,
    experts: bool = False,
) -> torch.Tensor:
    """This rank's share of the totals, to be summed over all ranks.

    float64 [7], or [9] with the auxiliary terms of a model with experts.

    All tp ranks have the same loss, so only tp rank 0 contributes it; auxiliary terms are those of
    each rank's own tokens. In the same way only one rank contributes the norm of parameters that
    several ranks hold.
    """
    zero = torch.zeros((), dtype=torch.float64, device=device)
    losses = _total(sums.losses, 3, zero) if at.tp == 0 else zero.expand(3)
    terms = _total(sums.terms, 2 if experts else 0, zero)
    shards = [shard for plan, shard in gradients if stands_for(at, plan.replicated_over)]
    # A list, because on CUDA the norm of a single tensor in another dtype first copies the tensor
    # to that dtype, here to twice its size.
    norms = torch._foreach_norm(shards, 2, torch.float64) if shards else (zero,)
    squared_norm = torch.stack(tuple(norms)).square().sum()
    # A NaN in the sum would hide how many ranks have one. So a broken rank counts itself, and adds
    # nothing to the norm.
    finite = squared_norm.isfinite()
    squared_norm = torch.where(finite, squared_norm, zero)
    rest = torch.stack((squared_norm, 1.0 - finite.double(), zero + vote, zero + wish))
    return torch.cat((losses, rest, terms))


def _total(sums: Sequence[torch.Tensor], number: int, zero: torch.Tensor) -> torch.Tensor:
    return torch.stack(tuple(sums)).sum(dim=0) if sums else zero.expand(number)


def step_control(
    vector: torch.Tensor,
    clip_norm: float,
    skip_norm: float = 0.0,
    skipped: torch.Tensor | None = None,
) -> tuple[StepTotals, StepControl]:
    """Clip factor min(1, clip_norm / norm) over the whole model, and whether the update is applied.

    Both follow from the summed vector of :func:`local_totals`. A global batch without any weight
    has no loss (0/0), which is not a divergence: such an update is skipped for a reason of its own.
    ``skipped``: see :class:`StepControl`; None: no update was skipped.

    ``clip_norm`` 0 turns clipping off. An update is applied if all gradients, the loss and its
    weight are finite, and the norm is at most ``skip_norm`` (0: any norm). This bound is a constant
    of the job, not a multiple of earlier norms, so a restored run decides as the first run did.
    """
    sums = vector.unbind()
    none = torch.zeros_like(sums[0])
    totals = StepTotals(*sums[:7], *(sums[7:] or (none, none)))
    norm = totals.squared_norm.sqrt() / totals.weight
    clip = (
        (clip_norm / (norm + _CLIP_EPSILON)).clamp(max=1.0)
        if clip_norm > 0
        else torch.ones_like(norm)
    )
    sound = (totals.broken_ranks == 0) & totals.squared_norm.isfinite() & totals.entropy.isfinite()
    usable = sound & norm.isfinite() & (totals.weight > 0)
    reason = torch.where(usable, 0, _NOT_FINITE)
    reason = torch.where(sound & (totals.weight == 0), _NO_TARGETS, reason)
    if skip_norm > 0:
        below = norm <= skip_norm
        reason = torch.where(usable & ~below, _NORM, reason)
        usable = usable & below
    scale = torch.where(usable, clip / totals.weight, torch.zeros_like(clip)).float()
    before = torch.zeros_like(norm) if skipped is None else skipped
    return totals, StepControl(norm, clip, scale, usable.float(), reason, before)

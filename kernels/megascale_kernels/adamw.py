"""One AdamW update of a run of parameters, in place and without host sync.

Source: Loshchilov and Hutter, arXiv 1711.05101. This is the plain version;
:mod:`megascale_kernels.fused.adamw` does the same in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class BiasCorrection:
    """The divisors of the two moments of one update, which started from zero.

    ``number`` counts updates from 1. ``skipped`` (float64, on the device) counts the updates before
    it that were not applied: the divisors count only the others, which the moments hold. Both
    properties are computed once, on the device.
    """

    beta1: float
    beta2: float
    number: int
    skipped: torch.Tensor

    @cached_property
    def corrections(self) -> torch.Tensor:
        """float32 [2]: the divisors."""
        return self._exact.float()

    @cached_property
    def factors(self) -> torch.Tensor:
        """float32 [2]: the reciprocals of :attr:`corrections`, rounded once."""
        return self._exact.reciprocal().float()

    @property
    def _exact(self) -> torch.Tensor:
        """1 - beta^n in float64; a run that has skipped nothing gets Python's own powers."""
        # The number of skipped updates is known on the device alone: reading it would wait for the
        # device in every step. So both cases are computed, and the device takes one.
        skipped, number = self.skipped, self.number
        return torch.stack(
            [
                torch.where(skipped == 0, 1.0 - beta**number, 1.0 - beta ** (number - skipped))
                for beta in (self.beta1, self.beta2)
            ]
        )


@dataclass(frozen=True)
class AdamWUpdate:
    """The numbers of one update; updates of other weight decays can share its ``bias``."""

    learning_rate: float
    epsilon: float
    weight_decay: float
    bias: BiasCorrection

    @property
    def beta1(self) -> float:
        """Decay of the first moment."""
        return self.bias.beta1

    @property
    def beta2(self) -> float:
        """Decay of the second moment."""
        return self.bias.beta2


# The signature of adamw, plain or fused.
AdamWKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, AdamWUpdate], None
]


def adamw(
    states: torch.Tensor,
    gradient: torch.Tensor,
    parameters: torch.Tensor,
    scale: torch.Tensor,
    apply: torch.Tensor,
    update: AdamWUpdate,
) -> None:
    """Update ``states`` and round the new master into ``parameters``.

    If ``apply`` is 0, no bit of either changes.

    Args:
        states: float32 [3, n], rows contiguous: master, first moment, second moment.
        gradient: float32 [n]; may be overwritten. Not finite only if ``apply`` is 0.
        parameters: [n] in the compute dtype: the rounded master, before and after.
        scale: float32 scalar on the device, a factor of the gradient.
        apply: float32 scalar on the device, 1 or 0.
        update: the numbers of this update.
    """
    correction1, correction2 = update.bias.corrections.unbind()
    gradient.mul_(scale)
    # The states stay as they are until all is computed: a skipped update must not change them.
    mean = states[1].lerp(gradient, 1.0 - update.beta1)
    square = states[2].lerp(gradient.square_(), 1.0 - update.beta2)
    change = (mean / correction1).div_((square / correction2).sqrt_().add_(update.epsilon))
    if update.weight_decay:
        change.add_(states[0], alpha=update.weight_decay)
    master = states[0] - change.mul_(update.learning_rate)
    # The device selects; it does not multiply by ``apply``: NaN * 0 is NaN, and -0.0 + 0 is 0.0.
    applies = apply != 0
    for state, found in zip(states, (master, mean, square), strict=True):
        torch.where(applies, found, state, out=state)
    parameters.copy_(states[0])

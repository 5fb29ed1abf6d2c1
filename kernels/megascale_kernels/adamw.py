"""One AdamW update of a run of parameters, in place and without host sync.

Source: Loshchilov and Hutter, arXiv 1711.05101. The plain version;
:mod:`megascale_kernels.fused.adamw` does the same in one pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class AdamWUpdate:
    """The numbers of one update.

    ``number`` counts from 1, ``skipped`` (float64, on the device) those before it that were not
    applied: bias correction counts the others, as many as the moments hold.
    """

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    number: int
    skipped: torch.Tensor

    @cached_property
    def corrections(self) -> torch.Tensor:
        """float32 [2]: what the two moments are divided by, as they started from zero."""
        return self._corrections.float()

    @cached_property
    def factors(self) -> torch.Tensor:
        """float32 [2]: the reciprocals of :attr:`corrections`, rounded once."""
        return self._corrections.reciprocal().float()

    @property
    def _corrections(self) -> torch.Tensor:
        """1 - beta^n in float64; a run that has skipped nothing gets Python's own powers."""
        skipped, number = self.skipped, self.number
        return torch.stack(
            [
                torch.where(skipped == 0, 1.0 - beta**number, 1.0 - beta ** (number - skipped))
                for beta in (self.beta1, self.beta2)
            ]
        )


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

    Where ``apply`` is 0 no bit of either changes.

    Args:
        states: float32 [3, n], rows contiguous: master, first moment, second moment.
        gradient: float32 [n]; may be overwritten. Non-finite only where ``apply`` is 0.
        parameters: [n] in the compute dtype: the rounded master, before and after.
        scale: float32 scalar on the device, a factor of the gradient.
        apply: float32 scalar on the device, 1 or 0.
        update: the numbers of this update.
    """
    correction1, correction2 = update.corrections.unbind()
    gradient.mul_(scale)
    mean = states[1].lerp(gradient, 1.0 - update.beta1)
    square = states[2].lerp(gradient.square_(), 1.0 - update.beta2)
    change = (mean / correction1).div_((square / correction2).sqrt_().add_(update.epsilon))
    if update.weight_decay:
        change.add_(states[0], alpha=update.weight_decay)
    master = states[0] - change.mul_(update.learning_rate)
    # A choice and not a multiplication by ``apply``: NaN * 0 is NaN, and -0.0 + 0 is 0.0.
    applies = apply != 0
    for state, found in zip(states, (master, mean, square), strict=True):
        torch.where(applies, found, state, out=state)
    parameters.copy_(states[0])

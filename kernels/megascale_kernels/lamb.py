"""LAMB over a flat shard, which holds one matrix after another: direction, norms, update.

Source: You et al., arXiv 1904.00962, Algorithm 2. LAMB takes AdamW's direction r, with weight decay
inside, and moves each matrix x by lr * phi(|x|) / |r| along it. A shard holds parts of
matrices, so an update has two passes. :meth:`LambRuns.direction` updates the moments and finds
the squared norms of the parts. The caller sums these over the ranks and makes ratios of them; then
:meth:`LambRuns.apply` takes the step. This is the plain version;
:mod:`megascale_kernels.fused.lamb` does the same in one launch per pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megascale_kernels.adamw import AdamWUpdate


@dataclass(frozen=True, slots=True)
class Segment:
    """``start:stop`` of a shard, all of one matrix or vector; ``decay``: whether it decays."""

    start: int
    stop: int
    decay: bool


class LambKernel(Protocol):
    """Both passes over the segments of one shard, plain or fused."""

    def direction(
        self,
        states: torch.Tensor,
        gradient: torch.Tensor,
        scale: torch.Tensor,
        apply: torch.Tensor,
        update: AdamWUpdate,
        sums: torch.Tensor,
    ) -> None:
        """Update the moments, write the direction over ``gradient``, and the norms to ``sums``.

        If ``apply`` is 0, no bit of the states changes, and ``sums`` has no meaning.

        Args:
            states: float32 [3, n], rows contiguous: master, first moment, second moment.
            gradient: float32 [n], overwritten inside the segments. Not finite only if ``apply`` is
                0.
            scale: float32 scalar on the device, a factor of the gradient.
            apply: float32 scalar on the device, 1 or 0.
            update: the numbers of this update; its learning rate is not used.
            sums: float64 [2, segments], overwritten: squares of masters, and of directions.
        """
        ...

    def apply(
        self,
        states: torch.Tensor,
        direction: torch.Tensor,
        parameters: torch.Tensor,
        ratios: torch.Tensor,
        apply: torch.Tensor,
        learning_rate: float,
    ) -> None:
        """Take the step and round the new masters into ``parameters``.

        If ``apply`` is 0, no bit changes, whatever the direction and the ratios are.

        Args:
            states: as above; row 0 is updated.
            direction: float32 [n], as :meth:`direction` left it; may be overwritten.
            parameters: [n] in the compute dtype: the rounded master, before and after.
            ratios: float32 [segments], trust ratios.
            apply: as above.
            learning_rate: a factor of each ratio.
        """
        ...


class LambRuns:
    """The plain version of :class:`LambKernel`."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        del device  # the plain version keeps no tables
        self._segments = tuple(segments)

    def direction(
        self,
        states: torch.Tensor,
        gradient: torch.Tensor,
        scale: torch.Tensor,
        apply: torch.Tensor,
        update: AdamWUpdate,
        sums: torch.Tensor,
    ) -> None:
        """See :class:`LambKernel`."""
        correction1, correction2 = update.bias.corrections.unbind()
        applies = apply != 0
        for number, segment in enumerate(self._segments):
            found = gradient[segment.start : segment.stop]
            master, mean, square = states[:, segment.start : segment.stop]
            found.mul_(scale)
            torch.where(applies, mean.lerp(found, 1.0 - update.beta1), mean, out=mean)
            torch.where(applies, square.lerp(found * found, 1.0 - update.beta2), square, out=square)
            torch.div(mean, correction1, out=found)
            found.div_((square / correction2).sqrt_().add_(update.epsilon))
            if segment.decay and update.weight_decay:
                found.add_(master, alpha=update.weight_decay)
            # On CUDA the norm of a list makes no float64 copy of its tensors; that of one tensor
            # does.
            norms = torch._foreach_norm([master, found], 2, torch.float64)
            sums[:, number] = torch.stack(norms).square()

    def apply(
        self,
        states: torch.Tensor,
        direction: torch.Tensor,
        parameters: torch.Tensor,
        ratios: torch.Tensor,
        apply: torch.Tensor,
        learning_rate: float,
    ) -> None:
        """See :class:`LambKernel`."""
        applies = apply != 0
        for number, segment in enumerate(self._segments):
            master = states[0, segment.start : segment.stop]
            change = direction[segment.start : segment.stop].mul_(learning_rate * ratios[number])
            torch.where(applies, master - change, master, out=master)
            parameters[segment.start : segment.stop].copy_(master)

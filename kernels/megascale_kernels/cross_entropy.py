"""Vocabulary-parallel cross entropy: the logits are never gathered and never copied.

Each rank holds the logits of its own columns and passes over them twice: in forward for each row's
maximum, the sum of exponentials below it and the target's logit; in backward to put the gradient in
their place. Two reductions of a few numbers per row join the ranks: the maximum, then the rescaled
sum together with the target's logit. They are arguments, functions that reduce a tensor in place
over the ranks, so that this module depends on no process group; with one rank they do nothing.

The two passes are functions as well: torch's here, one kernel each in
:mod:`megascale_kernels.fused.cross_entropy`. What joins them is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megascale_kernels.torch_calls import apply

Reduce = Callable[[torch.Tensor], None]
# The signature of cross_entropy, plain or fused.
CrossEntropy = Callable[
    [torch.Tensor, torch.Tensor, int, int, Reduce, Reduce], tuple[torch.Tensor, torch.Tensor]
]


@dataclass(frozen=True)
class Passes:
    """The two passes over a rank's own logits.

    Args:
        statistics: (logits, local target, columns) to each row's maximum [T], and [2, T]: the sum
            of exp(logit - maximum) and the target's logit, 0 where that is on another rank; float32
            at least. A rank without real columns returns a maximum below all others, and zeros.
        gradient: (logits, local target, columns, maximum, sum, d_loss, d_log_z): writes the
            gradient over the logits.
    """

    statistics: Callable[[torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
    gradient: Callable[
        [torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
        None,
    ]


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first_column: int,
    columns: int,
    reduce_max: Reduce,
    reduce_sum: Reduce,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-log softmax(logits)[target] and log Z of every token, in float32.

    Differentiable once in ``logits``: backward writes the gradient over them, the only tensor of
    that size that a step keeps, so the operation that made them must not need them any more. A
    second backward is an error.

    Args:
        logits: [T, width], this rank's columns; those from ``columns`` on are padding and take no
            part.
        targets: integer [T], columns of the whole vocabulary.
        first_column: the vocabulary entry of the first local column.
        columns: how many local columns are real.
        reduce_max: maximum over the ranks, in place.
        reduce_sum: sum over the ranks, in place.

    Returns:
        (loss, log_z), each [T], float32 (float64 of float64 logits), the same on all ranks.
    """
    passes = Passes(_statistics, _gradient)
    return joined(logits, targets, first_column, columns, reduce_max, reduce_sum, passes)


def joined(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first_column: int,
    columns: int,
    reduce_max: Reduce,
    reduce_sum: Reduce,
    passes: Passes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`cross_entropy` by the given ``passes``."""
    result: tuple[torch.Tensor, torch.Tensor] = apply(
        _CrossEntropy, logits, targets - first_column, columns, reduce_max, reduce_sum, passes
    )
    return result


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        local: torch.Tensor,
        columns: int,
        reduce_max: Reduce,
        reduce_sum: Reduce,
        passes: Passes,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own, sums = passes.statistics(logits, local, columns)
        # Sums are relative to the rank's own maximum, and are rescaled to that of all ranks. The
        # target's logit is 0 on all ranks but one: a sum over ranks finds it.
        maximum = own.clone()
        reduce_max(maximum)
        sums[0].mul_((own - maximum).exp_())
        reduce_sum(sums)
        total, target = sums
        log_total = total.log()
        ctx.save_for_backward(logits, local, maximum, total)
        ctx.columns = columns
        ctx.gradient = passes.gradient
        return log_total + (maximum - target), log_total + maximum

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_loss: torch.Tensor, d_log_z: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        # d loss = softmax - onehot(target); d log_z = softmax
        logits, local, maximum, total = ctx.saved_tensors
        ctx.gradient(logits, local, ctx.columns, maximum, total, d_loss, d_log_z)
        # Autograd does not see a kernel write. The version marks that the saved logits are gone: a
        # second backward would take gradients for logits and be silently wrong; so it is an error.
        torch.autograd.graph.increment_version(logits)
        return logits, None, None, None, None, None


def _statistics(
    logits: torch.Tensor, local: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(logits.dtype, torch.float32)
    if not columns:  # nothing but padding
        sums = torch.zeros((2, logits.shape[0]), dtype=wide, device=logits.device)
        return sums[0] - torch.inf, sums
    real = logits[:, :columns]
    maximum = real.amax(dim=1).to(wide)
    index, here = _place(local, columns)
    target = real.gather(1, index)[:, 0].to(wide).masked_fill(~here, 0.0)
    # bf16 minus float32 is computed in float32: no wide copy of the logits precedes the
    # exponentials.
    return maximum, torch.stack(((real - maximum[:, None]).exp_().sum(dim=1), target))


def _gradient(
    logits: torch.Tensor,
    local: torch.Tensor,
    columns: int,
    maximum: torch.Tensor,
    total: torch.Tensor,
    d_loss: torch.Tensor,
    d_log_z: torch.Tensor,
) -> None:
    logits[:, columns:].zero_()
    if not columns:
        return
    real = logits[:, :columns]
    softmax = (real - maximum[:, None]).exp_().div_(total[:, None])
    d_logits = softmax.mul_((d_loss + d_log_z)[:, None])
    # gather and scatter rather than scatter_add: one entry per row needs no atomics, so the result
    # repeats. In one dimension, because in deterministic mode torch's scatter in two dimensions
    # waits for the device.
    index, here = _place(local, columns)
    flat = d_logits.view(-1)
    at = index[:, 0] + torch.arange(0, flat.numel(), columns, device=flat.device)
    flat.scatter_(0, at, flat.gather(0, at) - d_loss * here)
    real.copy_(d_logits)


def _place(local: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A column [T, 1] to read for each target, and whether the target is on this rank [T]."""
    return local.clamp(0, columns - 1)[:, None], (local >= 0) & (local < columns)

"""Cross entropy over a vocabulary that is cut over several ranks, without ever gathering the logits.

Each rank holds the logits of its own columns. Two reductions join the ranks: the row maximum, then the sum of
exponentials together with the target's logit. They are passed in as functions that reduce a tensor in place over
the ranks, so that this module knows no process group; with one rank they do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Reduce = Callable[[torch.Tensor], None]


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first_column: int,
    columns: int,
    reduce_max: Reduce,
    reduce_sum: Reduce,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-log softmax(logits)[target] and log Z of every token, in float32; differentiable in ``logits``.

    Args:
        logits: [T, width], this rank's columns; those from ``columns`` on are padding and take no part.
        targets: integer [T], columns of the whole vocabulary.
        first_column: the vocabulary entry of the first local column.
        columns: how many local columns are real.

    Returns:
        (loss, log_z), each float32 [T], the same on all ranks.
    """
    result: tuple[torch.Tensor, torch.Tensor] = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits, targets, first_column, columns, reduce_max, reduce_sum
    )
    return result


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        first_column: int,
        columns: int,
        reduce_max: Reduce,
        reduce_sum: Reduce,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        if columns < wide.shape[1]:
            column = torch.arange(wide.shape[1], device=wide.device)
            wide = wide.masked_fill(column >= columns, float("-inf"))
        # A rank whose columns are all padding has no maximum of its own; the others' must win, and -inf does lose.
        maximum = wide.amax(dim=1)
        reduce_max(maximum)
        shifted = wide - maximum[:, None]
        local = targets - first_column
        here = (local >= 0) & (local < columns)
        index = local.clamp(0, wide.shape[1] - 1)[:, None]
        target_logit = shifted.gather(1, index)[:, 0].masked_fill(~here, 0.0)
        exponentials = shifted.exp()
        sums = torch.stack((exponentials.sum(dim=1), target_logit))
        reduce_sum(sums)
        log_sum = sums[0].log()
        ctx.save_for_backward(exponentials.div_(sums[0][:, None]), index, here)
        ctx.dtype = logits.dtype
        return log_sum - sums[1], log_sum + maximum

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # d loss = softmax - onehot(target); d log_z = softmax
        d_loss, d_log_z = gradients
        softmax, index, here = ctx.saved_tensors
        d_logits = softmax * (d_loss + d_log_z)[:, None]
        # gather and scatter rather than scatter_add: one entry per row needs no atomics, so the result is repeatable
        d_logits.scatter_(1, index, d_logits.gather(1, index) - (d_loss * here)[:, None])
        return d_logits.to(ctx.dtype), None, None, None, None, None

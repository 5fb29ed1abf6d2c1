"""Vocabulary-parallel cross entropy in two kernels, each of which passes once over the logits.

Forward reads a row and keeps its maximum and sum of exponentials as it goes (Milakov and
Gimelshein, arXiv 1805.02867); backward reads the logits and writes their gradient in the same
place. No other tensor has the size of the logits. There are no atomics: the result repeats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megascale_kernels.cross_entropy import Passes, Reduce, cross_entropy_by

_BLOCK = 2048  # columns at a time: 16 per thread of 4 warps, two 16-byte loads of bf16
_WARPS = 4
# exp(x - m) is 2^(x log2(e) - m log2(e)): one multiply-add and one power of two.
_LOG2_E = tl.constexpr(1.4426950408889634)


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    first_column: int,
    columns: int,
    reduce_max: Reduce,
    reduce_sum: Reduce,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fused :func:`megascale_kernels.cross_entropy.cross_entropy`, computed in float32.

    Rows of ``logits`` are contiguous.
    """
    passes = Passes(_statistics, _gradient)
    return cross_entropy_by(logits, targets, first_column, columns, reduce_max, reduce_sum, passes)


def _statistics(
    logits: torch.Tensor, local: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """:class:`megascale_kernels.cross_entropy.Passes`' statistics, in one pass."""
    tokens, width = logits.shape
    found = torch.empty((3, tokens), dtype=torch.float32, device=logits.device)
    _entropy_kernel[(tokens,)](
        logits, local, *found, logits.stride(0), width, columns, BLOCK=_BLOCK, num_warps=_WARPS
    )
    return found[0], found[1:]


def _gradient(
    logits: torch.Tensor,
    local: torch.Tensor,
    columns: int,
    maximum: torch.Tensor,
    total: torch.Tensor,
    d_loss: torch.Tensor,
    d_log_z: torch.Tensor,
) -> None:
    """:class:`megascale_kernels.cross_entropy.Passes`' gradient in one pass, over the logits."""
    tokens, width = logits.shape
    _entropy_gradient_kernel[(tokens, triton.cdiv(width, _BLOCK))](
        logits=logits,
        local=local,
        maximum=maximum,
        total=total,
        d_loss=d_loss.contiguous(),
        d_log_z=d_log_z.contiguous(),
        stride=logits.stride(0),
        width=width,
        columns=columns,
        BLOCK=_BLOCK,
        num_warps=_WARPS,
    )


@triton.jit
def _entropy_kernel(
    logits: tl.tensor,
    local: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    target: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    columns: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One row: its maximum, the sum of exponentials below it, and the target's logit if here."""
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    # The start is finite, even times log2(e): from -inf, a block of masked logits would compute
    # -inf minus -inf, which is NaN. The maximum loses a NaN among the logits, but the sum keeps it.
    highest = tl.full((), -1e38, tl.float32)
    weight = tl.full((), 0.0, tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        # Padding is read and discarded: the width is a multiple of wide loads, but the number of
        # real columns may not be.
        x = tl.load(start + column, mask=column < width, other=0.0).to(tl.float32)
        if first + BLOCK > columns:
            x = tl.where(column < columns, x, float("-inf"))
        higher = tl.maximum(highest, tl.max(x, axis=0))
        shift = higher * _LOG2_E
        # Subtract first, then multiply, so that the factor is exactly 1 if the maximum stays. Of
        # two multiplications the compiler would fuse one into the subtraction: they would differ in
        # the last bit, with the same sign in every step.
        weight = weight * tl.exp2((highest - higher) * _LOG2_E) + tl.sum(
            tl.exp2(x * _LOG2_E - shift), axis=0
        )
        highest = higher
    index = tl.load(local + row)
    logit = tl.load(start + index, mask=(index >= 0) & (index < columns), other=0.0).to(tl.float32)
    tl.store(maximum + row, highest)
    tl.store(total + row, weight)
    tl.store(target + row, logit)


@triton.jit
def _entropy_gradient_kernel(
    logits: tl.tensor,
    local: tl.tensor,
    maximum: tl.tensor,
    total: tl.tensor,
    d_loss: tl.tensor,
    d_log_z: tl.tensor,
    stride: tl.tensor,
    width: tl.tensor,
    columns: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One block: softmax * (d_loss + d_log_z) - onehot(target) * d_loss, over the logits."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + row.to(tl.int64) * stride + column
    x = tl.load(place, mask=column < width, other=0.0).to(tl.float32)
    x = tl.where(column < columns, x, float("-inf"))
    of_loss = tl.load(d_loss + row)
    # One division per row, not one per logit.
    share = (of_loss + tl.load(d_log_z + row)) / tl.load(total + row)
    is_target = (column == tl.load(local + row)) & (column < columns)
    gradient = tl.exp2(x * _LOG2_E - tl.load(maximum + row) * _LOG2_E) * share - tl.where(
        is_target, of_loss, 0.0
    )
    tl.store(place, gradient.to(logits.dtype.element_ty), mask=column < width)

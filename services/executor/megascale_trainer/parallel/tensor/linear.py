"""The linear operators behind every GEMM of the model: column-parallel in, row-parallel out.

They own what a weight needs: its gradient is accumulated into ``main_grad`` in float32, at once or
when :class:`megascale_trainer.weights.WeightGradients` runs it. How GEMMs and
transfers run is decided by :class:`megascale_trainer.parallel.tensor.matmul.SequenceMatmuls`.
Forward and backward of each operator gather the sequence once and scatter it once: a parallel
block has one of each operator and so two all-gathers and two reduce-scatters, a serial block twice
that (full recompute gathers once more for each column-parallel one).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megascale_trainer import compat
from megascale_trainer.compat import apply
from megascale_trainer.parallel.tensor.matmul import SequenceMatmuls
from megascale_trainer.weights import Weight, WeightGradients


def column_parallel(
    x: torch.Tensor, weight: Weight, matmuls: SequenceMatmuls, weight_gradients: WeightGradients
) -> torch.Tensor:
    """This rank's columns for the whole sequence (input projections, head).

    Args:
        x: [S / tp, B, in].
        weight: [out / tp, in].

    Returns:
        [S, B, out / tp] in the dtype of ``x``.
    """
    y = apply(_Column, x, weight.value, weight.main_grad, matmuls, weight_gradients)
    return y


def row_parallel(
    x: torch.Tensor, weight: Weight, matmuls: SequenceMatmuls, weight_gradients: WeightGradients
) -> torch.Tensor:
    """The ranks' partial results summed, for this rank's part of the sequence (output projections).

    Args:
        x: [S, B, in / tp].
        weight: [in / tp, out].

    Returns:
        [S / tp, B, out] in the dtype of ``x``.
    """
    gradient = _Gradient()
    x = apply(_RowInput, x, weight.main_grad, gradient, weight_gradients)
    y = apply(_Row, x, weight.value, matmuls, gradient)
    return y


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        weight: torch.Tensor,
        main_grad: torch.Tensor,
        matmuls: SequenceMatmuls,
        weight_gradients: WeightGradients,
    ) -> torch.Tensor:
        y, x = matmuls.all_gather_matmul(part, weight.t())
        ctx.save_for_backward(x, weight)
        ctx.main_grad, ctx.matmuls, ctx.weight_gradients = main_grad, matmuls, weight_gradients
        return y

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        matmuls: SequenceMatmuls = ctx.matmuls
        left, right = d_y.flatten(0, 1).t(), x.flatten(0, 1)
        accumulate = partial(compat.accumulate_matmul, ctx.main_grad, left, right)
        # The weight gradient does not need the scattered result: the last rows travel under it.
        meanwhile = partial(ctx.weight_gradients.run, accumulate)
        return matmuls.matmul_reduce_scatter(d_y, weight, meanwhile), None, None, None, None


class _Gradient:
    """The gathered gradient of a row-parallel result: from :class:`_Row` to :class:`_RowInput`."""

    gathered: torch.Tensor | None = None


class _RowInput(torch.autograd.Function):
    """Keeps the operator's input for the weight gradient.

    A node of its own, and the last of a layer to save a tensor: a layer that is recomputed in full
    stops here, and repeats neither the GEMM nor the reduce-scatter behind it, whose result would
    not be used.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        main_grad: torch.Tensor,
        gradient: _Gradient,
        weight_gradients: WeightGradients,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.main_grad, ctx.gradient = main_grad, gradient
        ctx.weight_gradients = weight_gradients
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        [x] = ctx.saved_tensors
        d_y, ctx.gradient.gathered = ctx.gradient.gathered, None
        left, right = x.flatten(0, 1).t(), d_y.flatten(0, 1)
        ctx.weight_gradients.run(partial(compat.accumulate_matmul, ctx.main_grad, left, right))
        return d_x, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        matmuls: SequenceMatmuls,
        gradient: _Gradient,
    ) -> torch.Tensor:
        # weight.t() of a leaf is no saved tensor: what is saved here would have to be recomputed
        # (see _RowInput)
        ctx.factor, ctx.matmuls, ctx.gradient = weight.detach().t(), matmuls, gradient
        return matmuls.matmul_reduce_scatter(x, weight)

    @staticmethod
    def backward(ctx: Any, d_part: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        matmuls: SequenceMatmuls = ctx.matmuls
        # The weight needs the gathered gradient too: _RowInput's backward runs next and takes it.
        d_x, ctx.gradient.gathered = matmuls.all_gather_matmul(d_part, ctx.factor)
        return d_x, None, None, None

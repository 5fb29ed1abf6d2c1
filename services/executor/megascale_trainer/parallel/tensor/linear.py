"""The operators behind every GEMM of the model: column-parallel into a block of the model,
row-parallel out of it.

They own what a weight needs: its gradient is accumulated into ``main_grad`` in float32. How
products and transfers are made is the
:class:`megascale_trainer.parallel.tensor.matmul.TensorParallel`'s matter. Forward and backward of
each operator gather the sequence once and scatter it once: a parallel block has one of each
operator and so two all-gathers and two reduce-scatters, a serial block twice that (full recompute
gathers once more for each column).
"""

from __future__ import annotations

from typing import Any

import torch

from megascale_trainer import compat
from megascale_trainer.parallel.tensor.matmul import Products, TensorParallel
from megascale_trainer.weights import Weight


def column_parallel(x: torch.Tensor, weight: Weight, tp: TensorParallel) -> torch.Tensor:
    """This rank's columns for the whole sequence (input projections, head).

    Args:
        x: [S / tp, B, in].
        weight: [out / tp, in].

    Returns:
        [S, B, out / tp] in the dtype of ``x``.
    """
    y: torch.Tensor = _Column.apply(x, weight.value, weight.main_grad, tp.products)  # type: ignore[no-untyped-call]
    return y


def row_parallel(x: torch.Tensor, weight: Weight, tp: TensorParallel) -> torch.Tensor:
    """The sum over ranks of their columns' products, for this rank's part of the sequence (output
    projections).

    Args:
        x: [S, B, in / tp].
        weight: [in / tp, out].

    Returns:
        [S / tp, B, out] in the dtype of ``x``.
    """
    gradient = _Gradient()
    x = _RowInput.apply(x, weight.main_grad, gradient)  # type: ignore[no-untyped-call]
    y: torch.Tensor = _Row.apply(x, weight.value, tp.products, gradient)  # type: ignore[no-untyped-call]
    return y


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        part: torch.Tensor,
        weight: torch.Tensor,
        main_grad: torch.Tensor,
        products: Products,
    ) -> torch.Tensor:
        y, x = products.gather_multiply(part, weight.t())
        ctx.save_for_backward(x, weight)
        ctx.main_grad, ctx.products = main_grad, products
        return y

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        products: Products = ctx.products

        def accumulate() -> None:
            compat.accumulate_product(ctx.main_grad, d_y.flatten(0, 1).t(), x.flatten(0, 1))

        return products.multiply_scatter(d_y, weight, accumulate), None, None, None


class _Gradient:
    """Of a row-parallel operator's result, gathered: backward of :class:`_Row` leaves it to
    :class:`_RowInput`'s.
    """

    gathered: torch.Tensor | None = None


class _RowInput(torch.autograd.Function):
    """Keeps the operator's input for the weight gradient.

    A node of its own, and the last of a layer to save a tensor: a layer that is recomputed in full
    stops here, and repeats neither the product nor the reduce-scatter behind it, whose result
    nobody would look at.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, main_grad: torch.Tensor, gradient: _Gradient
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.main_grad, ctx.gradient = main_grad, gradient
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        [x] = ctx.saved_tensors
        d_y, ctx.gradient.gathered = ctx.gradient.gathered, None
        compat.accumulate_product(ctx.main_grad, x.flatten(0, 1).t(), d_y.flatten(0, 1))
        return d_x, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, products: Products, gradient: _Gradient
    ) -> torch.Tensor:
        # weight.t() of a leaf is no saved tensor: what is saved here would have to be recomputed
        # (see _RowInput)
        ctx.factor, ctx.products, ctx.gradient = weight.detach().t(), products, gradient
        return products.multiply_scatter(x, weight)

    @staticmethod
    def backward(ctx: Any, d_part: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        products: Products = ctx.products
        d_x, ctx.gradient.gathered = products.gather_multiply(d_part, ctx.factor)
        return d_x, None, None, None

"""The one operator behind every GEMM of the model."""

from __future__ import annotations

from typing import Any, Literal

import torch

from megascale_executor.trainer import compat
from megascale_executor.trainer.model.weights import Weight

Order = Literal["out_in", "in_out"]


def linear(x: torch.Tensor, weight: Weight, order: Order) -> torch.Tensor:
    """``x`` times ``weight``; the weight gradient is accumulated into ``weight.main_grad`` in float32.

    Args:
        x: [..., in].
        weight: [out, in] for order "out_in" (input projections, head), [in, out] for "in_out" (output projections).
        order: how the weight is stored.

    Returns:
        [..., out] in the dtype of ``x``.
    """
    y: torch.Tensor = _Linear.apply(x, weight.value, weight.main_grad, order)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, main_grad: torch.Tensor, order: Order) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad, ctx.order = main_grad, order
        return torch.matmul(x, weight.t() if order == "out_in" else weight)

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = torch.matmul(d_y, weight if ctx.order == "out_in" else weight.t())
        rows, d_rows = x.reshape(-1, x.shape[-1]), d_y.reshape(-1, d_y.shape[-1])
        if ctx.order == "out_in":
            compat.accumulate_product(ctx.main_grad, d_rows.t(), rows)
        else:
            compat.accumulate_product(ctx.main_grad, rows.t(), d_rows)
        return d_x, None, None, None

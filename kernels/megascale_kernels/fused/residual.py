"""The residual addition with the output projection's biases in Triton: one pass in each direction.

The biases' gradient is the sum of the stream's gradient over the tokens: partial sums over fixed
runs of rows, added up in order, so it repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from megascale_kernels.fused.partial_sums import add_column_sums
from megascale_kernels.parameter import Parameter
from megascale_kernels.torch_calls import apply

_ELEMENTS = 2048  # of a program: 16 per thread of 4 warps


def add(stream: torch.Tensor, x: torch.Tensor, biases: Sequence[Parameter]) -> torch.Tensor:
    """Fused :func:`megascale_kernels.residual.add`, of float32 or bf16."""
    if not biases:  # torch's own addition is one pass already
        return stream + x
    total: torch.Tensor = apply(
        _Add, stream, x, total_value(biases), [bias.main_grad for bias in biases]
    )
    return total


def total_value(biases: Sequence[Parameter]) -> torch.Tensor:
    """The sum of the values of ``biases`` (at least one, [H] each), outside autograd."""
    first, *others = (bias.value.detach() for bias in biases)
    return sum(others, first)


class _Add(torch.autograd.Function):
    """(stream, x, the biases' sum) to their sum; backward needs none of them."""

    @staticmethod
    def forward(
        ctx: Any,
        stream: torch.Tensor,
        x: torch.Tensor,
        shift: torch.Tensor,
        main_grads: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        stream, x = stream.contiguous(), x.contiguous()
        total, count = torch.empty_like(x), x.numel()
        _residual_kernel[(triton.cdiv(count, _ELEMENTS),)](
            stream, x, shift, total, count, x.shape[-1], _ELEMENTS
        )
        ctx.main_grads = main_grads
        return total

    @staticmethod
    def backward(ctx: Any, d_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        add_column_sums(ctx.main_grads, d_total.contiguous())
        return d_total, d_total, None, None


@triton.jit
def _residual_kernel(
    stream: tl.tensor,
    x: tl.tensor,
    shift: tl.tensor,
    total: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    ELEMENTS: tl.constexpr,
) -> None:
    """ELEMENTS of all rows as one sequence, so that rows of any width use all threads."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < count
    found = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    found += tl.load(shift + at % width, mask=inside, other=0.0).to(tl.float32)
    found += tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, found.to(total.dtype.element_ty), mask=inside)

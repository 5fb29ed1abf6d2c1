"""An activation that exists in FP8 alone, and what autograd has in its place.

A tensor in FP8 would get its gradient cast to FP8. So autograd is given a *stand-in*: a tensor of
the activation's shape in the model's dtype without memory of its own, whose values are never read
and whose gradient is that of the activation. The FP8 numbers travel beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megascale_kernels.quantize import Operand
from megascale_kernels.torch_calls import apply

# Memory for FP8 rows of the shape of a tensor, which the next linear operator reads.
OwnPart = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Fp8Activation:
    """An input of a linear layer.

    Args:
        stand_in: [S, B, width], differentiable.
        operand: [S * B, width] in FP8; not differentiable.
    """

    stand_in: torch.Tensor
    operand: Operand


def stand_in(shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """A tensor of ``shape`` over one element, in the dtype and on the device of ``like``."""
    return torch.empty_strided(shape, (0,) * len(shape), dtype=like.dtype, device=like.device)


def in_fp8(x: torch.Tensor, cast: Callable[[torch.Tensor], Operand]) -> Fp8Activation:
    """``x`` [S, B, width] in FP8; backward passes the gradient through as it is.

    Args:
        cast: of ``x`` to [S * B, width].
    """
    kept: list[Operand] = []
    standing: torch.Tensor = apply(_Cast, x, cast, kept)
    return Fp8Activation(standing, kept[0])


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cast: Callable[[torch.Tensor], Operand], kept: list[Operand]
    ) -> torch.Tensor:
        kept.append(cast(x))
        return stand_in(x.shape, x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None

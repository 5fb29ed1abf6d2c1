"""An activation that exists in FP8 alone, and the tensor that represents it in autograd.

Autograd casts the gradient of an FP8 tensor to FP8. So the graph holds a *placeholder* instead: a
tensor of the activation's shape in the model's dtype without memory of its own. Its values are
never read, and its gradient is that of the activation. The FP8 numbers are passed with it.
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
        placeholder: [S, B, width], the differentiable placeholder.
        operand: [S * B, width] in FP8; not differentiable.
    """

    placeholder: torch.Tensor
    operand: Operand


def make_placeholder(shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """A placeholder of ``shape`` over one element, in the dtype and on the device of ``like``."""
    return torch.empty_strided(shape, (0,) * len(shape), dtype=like.dtype, device=like.device)


def in_fp8(x: torch.Tensor, cast: Callable[[torch.Tensor], Operand]) -> Fp8Activation:
    """``x`` [S, B, width] in FP8; backward passes the gradient through as it is.

    Args:
        cast: casts ``x`` to [S * B, width].
    """
    # The forward puts the operand into a list: it is not part of autograd's graph.
    kept: list[Operand] = []
    placeholder: torch.Tensor = apply(_Cast, x, cast, kept)
    return Fp8Activation(placeholder, kept[0])


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cast: Callable[[torch.Tensor], Operand], kept: list[Operand]
    ) -> torch.Tensor:
        kept.append(cast(x))
        return make_placeholder(x.shape, x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient, None, None

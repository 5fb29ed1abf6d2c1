"""Weights: tensors to compute with, each beside the float32 gradient that operators add into.

Both are views of the stage's flat buffers. autograd carries the gradients of activations alone: an
operator that has a weight adds that weight's gradient to ``main_grad`` itself (in float32 whatever
the compute dtype is) and returns none. So the gradients of all micro-batches add up in one buffer,
and recomputation, FP8 and delayed weight gradients have one place to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megascale_common.sizes.parameter_slices import ParameterTable, StoredTensor


@dataclass(frozen=True)
class Weight:
    """A stored tensor; ``value`` is a leaf that requires grad, so autograd records its users."""

    value: torch.Tensor
    main_grad: torch.Tensor

    def tracked(self) -> torch.Tensor:
        """``value`` for torch's own operations (norms, biases); gradients go to ``main_grad``."""
        tracked: torch.Tensor = _Tracked.apply(self.value, self.main_grad)  # type: ignore[no-untyped-call]
        return tracked


Weights = Mapping[str, Weight]


def bind_weights(
    table: ParameterTable,
    parameters: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
) -> dict[str, Weight]:
    """The stored tensors of ``table`` by name: views of each buffer's parameters and gradients."""
    return {
        tensor.name: Weight(
            _view(parameters, tensor).detach().requires_grad_(),
            _view(gradients, tensor),
        )
        for tensor in table.tensors
    }


def subset(weights: Weights, prefix: str) -> dict[str, Weight]:
    """The weights whose names start with ``prefix``, without it."""
    return {
        name.removeprefix(prefix): weight
        for name, weight in weights.items()
        if name.startswith(prefix)
    }


def _view(buffers: Mapping[str, torch.Tensor], tensor: StoredTensor) -> torch.Tensor:
    flat = buffers[tensor.buffer]
    size = torch.Size(tensor.shape).numel()
    return flat[tensor.offset : tensor.offset + size].view(tensor.shape)


class _Tracked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        ctx.main_grad = main_grad
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(gradient)
        return None, None

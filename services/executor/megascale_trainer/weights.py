"""Weights: tensors that the model computes with, each beside the float32 gradient that its
operators add into.

Both are views of the stage's flat buffers. autograd only carries the gradients of activations: an
operator that has a weight adds that weight's gradient to ``main_grad`` itself (in float32 whatever
the compute dtype is) and returns none. So gradients of all micro-batches gather in one buffer;
recomputation, FP8 and delayed weight gradients have one seam.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megascale_common.sizes.parameter_slices import ParameterTable, StoredTensor


@dataclass(frozen=True)
class Weight:
    """A stored tensor. ``value`` is a leaf that requires grad, so that operators on it are seen by
    autograd.
    """

    value: torch.Tensor
    main_grad: torch.Tensor

    def tracked(self) -> torch.Tensor:
        """``value`` for use in ordinary torch operations: its gradient arrives in ``main_grad``
        (norms, biases).
        """
        tracked: torch.Tensor = _Tracked.apply(self.value, self.main_grad)  # type: ignore[no-untyped-call]
        return tracked


Weights = Mapping[str, Weight]


def bind_weights(
    table: ParameterTable,
    parameters: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
) -> dict[str, Weight]:
    """The stored tensors of ``table`` as views of the flat ``parameters`` and ``gradients`` of each
    buffer, by name.
    """
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

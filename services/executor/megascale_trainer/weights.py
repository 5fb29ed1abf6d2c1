"""Weights: tensors to compute with, each beside the float32 gradient that operators add into.

Both are views of the stage's flat buffers. autograd carries the gradients of activations alone: an
operator that has a weight adds that weight's gradient to ``main_grad`` itself (in float32 whatever
the compute dtype is) and returns none. So the gradients of all micro-batches add up in one buffer,
and recomputation, FP8 and delayed weight gradients have one place to change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megascale_job.sizes.parameter_table import ParameterTable


@dataclass(frozen=True)
class Weight:
    """A stored tensor; ``value`` is a leaf that requires grad, so autograd records its users.

    Where it arrives in FP8, ``scale`` (float32 [1]) is the factor that restores it.
    """

    value: torch.Tensor
    main_grad: torch.Tensor
    scale: torch.Tensor | None = None

    def tracked(self) -> torch.Tensor:
        """``value`` for torch's own operations (norms, biases); gradients go to ``main_grad``."""
        tracked: torch.Tensor = _Tracked.apply(self.value, self.main_grad)  # type: ignore[no-untyped-call]
        return tracked


Weights = Mapping[str, Weight]


def bind_weights(
    table: ParameterTable,
    values: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    scales: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> dict[str, Weight]:
    """The stored tensors of ``table`` by name: their ``values``, beside views of ``gradients``.

    Args:
        gradients: flat, by buffer.
        scales: of the values in FP8, by tensor.
    """
    return {
        tensor.name: Weight(
            values[tensor.name].detach().requires_grad_(),
            view_at(gradients[tensor.buffer], tensor.offset, tensor.shape),
            scales.get(tensor.name),
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


def view_at(flat: torch.Tensor, offset: int, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of this shape at ``offset`` of ``flat``; a view."""
    size = torch.Size(shape)
    return flat[offset : offset + size.numel()].view(size)


class _Tracked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor:
        ctx.main_grad = main_grad
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
        ctx.main_grad.add_(gradient)
        return None, None

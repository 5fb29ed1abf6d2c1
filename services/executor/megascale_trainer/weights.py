"""Weights: tensors to compute with, each with the float32 gradient that operators add into.

Both are views of the stage's flat buffers. autograd carries only the gradients of activations: an
operator that has a weight adds the weight's gradient to ``main_grad`` itself (in float32 whatever
the compute dtype is) and returns none. So the gradients of all micro-batches add up in one buffer,
and recomputation, FP8 and delayed weight gradients have one place to change.

Weight gradients are computed in backward or later: Note [Delayed weight gradients].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from megascale_job.sizes.parameter_table import ParameterTable, StoredTensor
from megascale_kernels.torch_calls import apply

# Note [Delayed weight gradients]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# The gradient of a layer's input is needed at once, by the stage before; that of its weights only
# at the end of the step. A schedule with split backwards (Qi et al., Zero Bubble Pipeline
# Parallelism, arXiv 2401.10241) runs the first alone and fills waits with the second. For this,
# operators do not compute a weight gradient themselves: they hand a closure to
# `WeightGradients.run`, which runs it at once, or collects it while the schedule asks for input
# gradients only.
#
# Three things must hold. A closure keeps the tensors that it reads alive (the input, the output's
# gradient) and releases them when it has run. Closures run in the order in which backward handed
# them in, so the sums in `main_grad` have the same order, and the same bits, as without a delay.
# And the end of a unit's backward is handed in as a closure too, after the unit's weight
# gradients: a bucket of gradients must not leave before them.


@dataclass(frozen=True)
class Weight:
    """A stored tensor; ``value`` is a leaf that requires grad, so autograd records its users.

    ``main_grad`` has the shape of ``value``, or a first dimension more: the ranks whose gradients
    are kept apart (Note [Sums of experts in one order] of the parameter table).

    If ``value`` arrives in FP8, ``scale`` (float32 [1]) is the factor that restores it.
    """

    value: torch.Tensor
    main_grad: torch.Tensor
    scale: torch.Tensor | None = None

    def tracked(self) -> torch.Tensor:
        """``value`` for torch's operators (norms, biases); its gradient goes to ``main_grad``."""
        tracked: torch.Tensor = apply(_Tracked, self.value, self.main_grad)
        return tracked


Weights = Mapping[str, Weight]


def bind_weights(
    table: ParameterTable,
    values: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    scales: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> dict[str, Weight]:
    """The stored tensors of ``table`` by name: their ``values``, and views of ``gradients``.

    Args:
        gradients: flat, by buffer.
        scales: scales of the values in FP8, by tensor.
    """
    copies = {plan.name: plan.copies for plan in table.buffers if plan.copies > 1}
    return {
        tensor.name: Weight(
            values[tensor.name].detach().requires_grad_(),
            _gradient_at(gradients[tensor.buffer], tensor, copies.get(tensor.buffer)),
            scales.get(tensor.name),
        )
        for tensor in table.tensors
    }


def _gradient_at(flat: torch.Tensor, tensor: StoredTensor, copies: int | None) -> torch.Tensor:
    if copies is None:
        return view_at(flat, tensor.offset, tensor.shape)
    size = torch.Size(tensor.shape).numel()
    part = flat.view(copies, -1)[:, tensor.offset : tensor.offset + size]
    return part.view(copies, *tensor.shape)


def subset(weights: Weights, prefix: str) -> dict[str, Weight]:
    """The weights whose names start with ``prefix``, by the rest of the name."""
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


Work = Callable[[], object]


class WeightGradients:
    """Runs or collects the weight gradients of all operators of a rank.

    See Note [Delayed weight gradients].
    """

    def __init__(self) -> None:
        self._collected: deque[Work] | None = None

    def run(self, work: Work) -> None:
        """Run ``work`` now, or when the caller of :meth:`collected` runs it."""
        if self._collected is None:
            work()
        else:
            self._collected.append(work)

    @contextmanager
    def collected(self) -> Iterator[deque[Work]]:
        """Collect the work of the body, in its order, for :func:`run_all`, and run none of it."""
        assert self._collected is None, "weight gradients are collected once"
        self._collected = found = deque[Work]()
        try:
            yield found
        finally:
            self._collected = None


def run_all(works: deque[Work]) -> None:
    """Run ``works`` in their order; each is released, with its tensors, when it has run."""
    # Without grad, as in a backward: tensors that forward has kept may belong to autograd's graph.
    with torch.no_grad():
        while works:
            works.popleft()()

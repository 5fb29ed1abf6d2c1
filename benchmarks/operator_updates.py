"""Updates of optimizers as operators to measure; ``UPDATES`` lists them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import torch
from benchmarks.operator_cases import REFERENCE, Case, Cost, Operation, Shape, Tensors

from megascale_kernels import lamb
from megascale_kernels.adamw import AdamWKernel, AdamWUpdate, BiasCorrection, adamw
from megascale_kernels.lamb import LambKernel, Segment

_REPLICAS = 8  # that share a layer's update
_SEGMENTS = 4  # parameters of a layer's share


def _numbers(device: torch.device) -> AdamWUpdate:
    skipped = torch.zeros((), dtype=torch.float64, device=device)
    return AdamWUpdate(3e-4, 1e-8, 0.1, BiasCorrection(0.9, 0.95, 7, skipped))


def adamw_update(shape: Shape) -> Case:
    """AdamW of one layer's parameters over tp and 8 replicas."""
    size, wide = _values(shape)
    scale = apply = torch.ones((), device=shape.device)
    numbers = _numbers(shape.device)
    number = torch.tensor(float(numbers.bias.number), device=shape.device)

    def way(load: Callable[[], AdamWKernel], dtype: torch.dtype) -> dict[str, Operation]:
        kernel = load()
        states = torch.stack(wide[:3]).to(torch.promote_types(dtype, torch.float32))
        gradient = wide[3].to(states.dtype, copy=True)
        parameters = torch.empty(size, dtype=dtype, device=shape.device)

        def run() -> Tensors:
            kernel(states, gradient, parameters, scale, apply, numbers)
            return states.unbind()  # not the parameters: their rounding would hide any error

        return {"update": run}

    def of_torch(
        states: torch.Tensor,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        *rest: torch.Tensor | AdamWUpdate,
    ) -> None:
        master, mean, square = ([row] for row in states)
        torch._fused_adamw_(
            *(master, [gradient], mean, square, [], [number]),
            lr=numbers.learning_rate,
            beta1=numbers.beta1,
            beta2=numbers.beta2,
            weight_decay=numbers.weight_decay,
            eps=numbers.epsilon,
            amsgrad=False,
            maximize=False,
        )
        parameters.copy_(states[0])

    def fused() -> AdamWKernel:
        from megascale_kernels.fused import adamw as module

        return module.adamw

    def compiled() -> AdamWKernel:
        torch.compiler.reset()
        return torch.compile(adamw, dynamic=False)

    loads = {
        REFERENCE: lambda: adamw,
        "compile": compiled,
        "torch_fused": lambda: of_torch,
        "fused": fused,
    }
    ways = {name: partial(way, load) for name, load in loads.items()}
    return Case(f"{size}", {"update": Cost(size * (7 * 4 + shape.dtype.itemsize))}, ways)


def lamb_update(shape: Shape) -> Case:
    """LAMB of the same parameters, both passes; the ratios between them are given."""
    size, wide = _values(shape)
    one = torch.ones((), device=shape.device)
    numbers = _numbers(shape.device)
    ends = [size * number // _SEGMENTS for number in range(_SEGMENTS + 1)]
    pieces = [Segment(start, stop, True) for start, stop in pairwise(ends)]

    def way(load: Callable[[], _Runs], dtype: torch.dtype) -> dict[str, Operation]:
        runs = load()(pieces, shape.device)
        states = torch.stack(wide[:3]).to(torch.promote_types(dtype, torch.float32))
        gradient = wide[3].to(states.dtype, copy=True)
        parameters = torch.empty(size, dtype=dtype, device=shape.device)
        sums = torch.zeros((2, _SEGMENTS), dtype=torch.float64, device=shape.device)
        ratios = torch.full((_SEGMENTS,), 0.5, dtype=states.dtype, device=shape.device)

        def run() -> Tensors:
            runs.direction(states, gradient, one, one, numbers, sums)
            runs.apply(states, gradient, parameters, ratios, one, numbers.learning_rate)
            return states.unbind()

        return {"update": run}

    def fused() -> _Runs:
        from megascale_kernels.fused import lamb as module

        return module.LambRuns

    loads: dict[str, Callable[[], _Runs]] = {REFERENCE: lambda: lamb.LambRuns, "fused": fused}
    ways = {name: partial(way, load) for name, load in loads.items()}
    # Norms must be known before a step is taken: the direction is written and read once more.
    moved = size * (10 * 4 + shape.dtype.itemsize)
    return Case(f"{size}", {"update": Cost(moved)}, ways)


def _values(shape: Shape) -> tuple[int, list[torch.Tensor]]:
    """How many parameters; their masters, both moments and gradients, float32."""
    size = 12 * shape.hidden**2 // shape.tp // _REPLICAS
    wide = [shape.random(size, seed=seed, dtype=torch.float32) for seed in (1, 2, 3, 4)]
    wide[2] = wide[2].square()
    return size, wide


_Runs = Callable[[Sequence[Segment], torch.device], LambKernel]

UPDATES: Mapping[str, Callable[[Shape], Case]] = {"adamw": adamw_update, "lamb": lamb_update}

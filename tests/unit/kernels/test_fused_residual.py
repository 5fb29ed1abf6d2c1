"""The fused residual addition against the plain one in float64: the sum and all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from tests.harness.kernels import (
    COMPILED_ROWS,
    DEVICE,
    blank,
    gradients_of,
    relative_error,
    weight,
)

from megascale_kernels import residual as plain
from megascale_trainer.weights import Weight

pytest.importorskip("triton")


def _compile(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> None:
    from megascale_kernels.fused import residual as fused

    stream, x = (blank(*shape, dtype=dtype).requires_grad_() for _ in range(2))
    total = fused.add(stream, x, [weight(blank(shape[-1], dtype=dtype)) for _ in range(2)])
    total.backward(torch.zeros_like(total))


COMPILED = {
    "residual": lambda: _compile((*COMPILED_ROWS, 4096)),
    "small residual": lambda: _compile((8, 2, 72), torch.float32),
}


@pytest.mark.parametrize("biases", [0, 1, 2])
# Several tiles down and across, both cut; and one row.
@pytest.mark.parametrize("shape", [(70, 3, 300), (1, 1, 64)])
def test_add(shape: tuple[int, ...], biases: int) -> None:
    from megascale_kernels.fused import residual as fused

    def run(module: ModuleType, dtype: torch.dtype) -> list[torch.Tensor]:
        def added(inputs: Sequence[torch.Tensor], weights: Sequence[Weight]) -> torch.Tensor:
            total: torch.Tensor = module.add(inputs[0], inputs[1], weights)
            return total

        return gradients_of(added, inputs, weights, [gradient], dtype)

    generator = torch.Generator().manual_seed(3)
    stream, x, gradient = (
        torch.randn(shape, generator=generator).bfloat16().to(DEVICE) for _ in range(3)
    )
    inputs = [stream, x]
    weights = [
        torch.randn(shape[-1], generator=generator).bfloat16().to(DEVICE) for _ in range(biases)
    ]
    exact = run(plain, torch.float64)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 5e-3)):
        for ours, theirs in zip(run(fused, dtype), exact, strict=True):
            assert relative_error(ours, theirs) < tolerance

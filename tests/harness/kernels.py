"""Inputs of kernel tests, weights with their gradients, and the error against float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megascale_trainer.weights import Weight

# Triton's interpreter stands in where there is no CUDA (tests/unit/kernels/conftest.py).
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# [S, B] of calls that are only compiled: enough rows for programs that loop over several.
COMPILED_ROWS = (256, 4)


def blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Zeros on the host: an input of a call that is compiled and not run."""
    return torch.zeros(shape, dtype=dtype)


def weight(value: torch.Tensor) -> Weight:
    """``value`` as a weight whose gradient starts at zero: float32, or float64 like its value."""
    wide = torch.promote_types(value.dtype, torch.float32)
    return Weight(
        value.detach().clone().requires_grad_(),
        torch.zeros(value.shape, dtype=wide, device=value.device),
    )


def gradients_of(
    run: Callable[
        [Sequence[torch.Tensor], Sequence[Weight]], torch.Tensor | tuple[torch.Tensor, ...]
    ],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    out_gradients: Sequence[torch.Tensor],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Results, inputs' gradients and weights' gradients of ``run``, computed in ``dtype``."""
    leaves = [x.to(dtype).clone().requires_grad_() for x in inputs]
    bound = [weight(value.to(dtype)) for value in weights]
    out = run(leaves, bound)
    results = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(results, [gradient.to(dtype) for gradient in out_gradients])
    found = [result.detach() for result in results]
    for leaf in leaves:
        assert leaf.grad is not None
        found.append(leaf.grad)
    return found + [one.main_grad for one in bound]


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over the norm of ``exact``."""
    found, exact = found.detach().double(), exact.detach()
    return float((found - exact).norm() / exact.norm().clamp_min(1e-30))

"""Both norms against the formula in float64, values and gradients."""

from __future__ import annotations

import pytest
import torch

from megascale_kernels.norm import layer_norm, rms_norm

EPSILON = 1e-5


def _exact(kind: str, parameters: list[torch.Tensor], bias: torch.Tensor) -> torch.Tensor:
    x, weight = parameters
    if kind == "rms":
        return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight + bias


@pytest.mark.parametrize("kind", ["layer", "layer without bias", "rms"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_norm(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(2)
    x = (3 + 2 * torch.randn(5, 3, 48, generator=generator)).to(dtype).requires_grad_()
    weight = torch.randn(48, generator=generator).to(dtype).requires_grad_()
    bias = torch.randn(48, generator=generator).to(dtype) * (kind == "layer")
    if kind == "rms":
        out = rms_norm(x, weight, EPSILON)
    else:
        out = layer_norm(x, weight, bias if kind == "layer" else None, EPSILON)
    assert out.dtype == dtype
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = _exact(kind.removesuffix(" without bias"), exact, bias.double())
    gradient = torch.randn(out.shape, generator=generator).to(dtype)
    found = torch.autograd.grad(out, (x, weight), gradient)
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    for ours, theirs in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)

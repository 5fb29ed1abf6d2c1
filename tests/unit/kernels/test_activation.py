"""The activations against their formulas in float64, values and gradients."""

from __future__ import annotations

import math

import torch

from megascale_kernels.activation import gelu, swiglu


def test_gelu() -> None:
    x = torch.linspace(-6, 6, 241).requires_grad_()
    exact = x.detach().double().requires_grad_()
    inner = math.sqrt(2 / math.pi) * (exact + 0.044715 * exact**3)
    expected = 0.5 * exact * (1 + inner.tanh())
    torch.testing.assert_close(gelu(x).double(), expected, atol=1e-6, rtol=1e-5)
    [found] = torch.autograd.grad(gelu(x).sum(), x)
    [wanted] = torch.autograd.grad(expected.sum(), exact)
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=1e-5)


def test_swiglu() -> None:
    generator = torch.Generator().manual_seed(3)
    gate, up = (torch.randn(7, 11, generator=generator).requires_grad_() for _ in range(2))
    exact = [t.detach().double().requires_grad_() for t in (gate, up)]
    expected = exact[0] / (1 + (-exact[0]).exp()) * exact[1]
    torch.testing.assert_close(swiglu(gate, up).double(), expected, atol=1e-6, rtol=1e-5)
    found = torch.autograd.grad(swiglu(gate, up).sum(), (gate, up))
    wanted = torch.autograd.grad(expected.sum(), exact)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-5)

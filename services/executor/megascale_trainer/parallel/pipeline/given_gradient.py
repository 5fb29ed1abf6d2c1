"""The backward of a stage that begins with the gradient of its output, which another stage sent.

``torch.autograd.backward(output, gradient)`` does the same, and compares the two shapes as symbols:
its first call imports sympy, which takes a rank a third of a second of its first step.
"""

from __future__ import annotations

from typing import Any

import torch


def given_gradient(output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """A scalar without a value; its ``backward()`` gives ``output`` this gradient, bit for bit."""
    begin: torch.Tensor = _Given.apply(output, gradient)  # type: ignore[no-untyped-call]
    return begin


class _Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        assert gradient.shape == output.shape, "a stage was sent the gradient of another output"
        ctx.gradient = gradient
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, one: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None

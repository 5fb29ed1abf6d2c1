"""The feed-forward activations: GELU in its tanh form, and SwiGLU (Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from megascale_kernels.parameter import Parameter

Activation = Literal["gelu", "swiglu"]


def activate(x: torch.Tensor, bias: Parameter | None, activation: Activation) -> torch.Tensor:
    """The activation of ``x`` + ``bias``.

    Args:
        x: [..., width], for swiglu [..., 2 width]: gate, then up.
        bias: of the last dimension of ``x``.

    Returns:
        [..., width].
    """
    if bias is not None:
        x = x + bias.tracked()
    if activation == "gelu":
        return gelu(x)
    gate, up = x.chunk(2, dim=-1)
    return swiglu(gate, up)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), any shape."""
    return F.gelu(x, approximate="tanh")


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up; both of one shape."""
    return F.silu(gate) * up

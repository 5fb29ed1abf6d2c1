"""LayerNorm and RMSNorm over the last dimension, with statistics in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F

from megascale_kernels.parameter import Parameter
from megascale_kernels.residual import add

Kind = Literal["layernorm", "rmsnorm"]


def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: Parameter,
    bias: Parameter | None,
    kind: Kind,
    epsilon: float,
    added: Sequence[Parameter] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The residual stream and its norm: (x + residual, norm(x + residual)).

    The layer continues with the returned stream and not with ``x``, so that the backward of a fused
    operator can add both gradients at once.

    Args:
        x: [..., H].
        residual: [..., H]; None: the stream is ``x``.
        weight, bias: [H]; ``bias`` for layernorm alone.
        epsilon: added to the variance, or to the mean square.
        added: biases [H] of ``x``, added with the residual; none without one.

    Returns:
        Both [..., H] in the dtype of ``x``.

    Raises:
        ValueError: there are biases in ``added``, but no residual.
    """
    if added and residual is None:
        raise ValueError("biases are added together with a residual, and there is none")
    stream = x if residual is None else add(residual, x, added)
    if kind == "rmsnorm":
        return stream, rms_norm(stream, weight.tracked(), epsilon)
    return stream, layer_norm(
        stream, weight.tracked(), None if bias is None else bias.tracked(), epsilon
    )


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias; x [..., H], weight and bias [H]."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight, in the dtype of ``x``; x [..., H], weight [H]."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale).to(x.dtype) * weight

"""Layer normalisation and root-mean-square normalisation over the last dimension, statistics in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias; ``x`` [..., H], ``weight`` and ``bias`` [H]."""
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight; ``x`` [..., H], ``weight`` [H]. The result has the dtype of ``x``."""
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale).to(x.dtype) * weight

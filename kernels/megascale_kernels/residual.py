"""The residual addition: an output projection's result and its biases, in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megascale_kernels.parameter import Parameter


def add(stream: torch.Tensor, x: torch.Tensor, biases: Sequence[Parameter]) -> torch.Tensor:
    """``stream`` + (``x`` + ``biases``).

    Args:
        stream, x: [..., H].
        biases: any number of [H].
    """
    if biases:
        first, *others = (bias.tracked() for bias in biases)
        x = x + sum(others, first)  # one pass over x, and one over its gradient
    return stream + x

"""The sum of the ranks' partial products of a row-parallel GEMM: the plain reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

# [size, ...] partial sums in the order of ranks, to [...].
SumOfParts = Callable[[torch.Tensor], torch.Tensor]


def sum_of_parts(parts: torch.Tensor) -> torch.Tensor:
    """[size, ...] to [...]: added in float32, rounded once."""
    # The sum of two parts is an addition, which keeps more loads in flight than a reduction.
    return torch.add(*parts) if parts.shape[0] == 2 else parts.sum(0)

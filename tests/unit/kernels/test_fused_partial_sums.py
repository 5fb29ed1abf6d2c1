"""Sums of the ranks' partial products, plain and fused, beside float64."""

from __future__ import annotations

import pytest
import torch
from tests.harness.kernels import DEVICE

from megascale_kernels import partial_sums

fused = pytest.importorskip("megascale_kernels.fused.partial_sums", exc_type=ImportError)
WAYS = {"plain": partial_sums.sum_of_parts, "fused": fused.sum_of_parts}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(5, 3, 7), (33, 128)])
def test_parts_are_added_in_float32_and_rounded_once(
    way: str, size: int, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(size)
    parts = torch.randn(size, *shape, generator=generator).to(DEVICE, torch.bfloat16)
    exact = parts.double().sum(0)
    found = WAYS[way](parts)
    assert found.dtype == torch.bfloat16 and found.shape == shape
    # A unit in the last of 8 bits: Triton's interpreter cuts where a device rounds.
    assert (found.double() - exact).abs().le(exact.abs() * 2**-7 + 1e-5).all()


def test_a_sum_in_bf16_would_be_detected() -> None:
    parts = torch.tensor([[256.0], [1.0], [1.0]], device=DEVICE, dtype=torch.bfloat16)
    for way in WAYS.values():
        assert way(parts).item() == 258.0, "in bf16, 256 + 1 is 256"

"""Rotary embedding against complex rotation in float64, and its defining property."""

from __future__ import annotations

import pytest
import torch

from megascale_kernels.rotary import apply_rotary, rotary_table

THETA = 10_000.0


def test_rotary() -> None:
    generator = torch.Generator().manual_seed(4)
    position = torch.randint(0, 200_000, (2, 9), generator=generator)
    x = torch.randn(9, 2, 3, 16, generator=generator)
    out = apply_rotary(x, rotary_table(position, 16, THETA))
    frequency = THETA ** (-torch.arange(8, dtype=torch.float64) / 8)
    angle = position.t()[:, :, None, None] * frequency
    turned = torch.complex(x[..., :8].double(), x[..., 8:].double()) * torch.polar(
        torch.ones_like(angle), angle
    )
    torch.testing.assert_close(
        out.double(), torch.cat((turned.real, turned.imag), -1), atol=1e-6, rtol=1e-5
    )


def test_scores_depend_on_distance_alone() -> None:
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, 1, 1, 16, generator=generator) for _ in range(2))

    def score(query_position: int, key_position: int) -> torch.Tensor:
        tables = (
            rotary_table(torch.tensor([[p]]), 16, THETA) for p in (query_position, key_position)
        )
        return sum_product(
            *(apply_rotary(t, table) for t, table in zip((q, k), tables, strict=True))
        )

    def sum_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a * b).sum()

    torch.testing.assert_close(score(5, 2), score(1005, 1002), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(score(5, 2), score(5, 3), atol=1e-3)


def test_an_odd_head_is_refused() -> None:
    with pytest.raises(ValueError, match="even head size, got 15"):
        rotary_table(torch.zeros(1, 1, dtype=torch.int64), 15, THETA)

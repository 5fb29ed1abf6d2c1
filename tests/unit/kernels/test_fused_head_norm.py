"""The fused norm of heads with rotation against the plain one in float64, in any layout."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.harness.kernels import COMPILED_ROWS, DEVICE, blank, gradients_of, relative_error, weight

from megascale_kernels.rotary import (
    RotaryTable,
    apply_rotary,
    norm_heads,
    rotary_frequencies,
    rotary_table,
)
from megascale_trainer.weights import Weight

pytest.importorskip("triton")

BATCH, HEADS, SEQUENCE = 2, 3, 37


def _compile(heads: int, size: int) -> None:
    """Forward and backward as a layer of Qwen 3 calls them."""
    from megascale_kernels.fused.head_norm import norm_and_rotate

    sequence, batch = COMPILED_ROWS
    angles = blank(sequence, batch, 1, size // 2, dtype=torch.float32)
    x = blank(batch, heads, sequence, size).requires_grad_()
    out = norm_and_rotate(x, weight(blank(size)), 1e-6, RotaryTable(angles, angles))
    out.backward(blank(*out.shape))


def _compile_projection(heads: int, size: int) -> None:
    """Forward and backward as a layer of OLMoE calls them."""
    from megascale_kernels.fused.head_norm import norm_projection_and_rotate

    sequence, batch = COMPILED_ROWS
    angles = blank(sequence, batch, 1, size // 2, dtype=torch.float32)
    x = blank(batch, heads, sequence, size).requires_grad_()
    scale, table = weight(blank(heads * size)), RotaryTable(angles, angles)
    out = norm_projection_and_rotate(x, scale, 1e-6, table, by_position=False)
    out.backward(blank(*out.shape))


COMPILED = {
    "head norms 8b": lambda: _compile(32, 128),
    "projection norm 2048": lambda: _compile_projection(16, 128),
}
COMPILED_AT_LENGTH = {"head norms of keys": lambda: _compile(8, 128)}


@pytest.mark.parametrize(("size", "turned"), [(8, True), (6, True), (7, False)])
@pytest.mark.parametrize("by_position", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_it_is_the_norm_and_then_the_rotation(size: int, turned: bool, by_position: bool) -> None:
    from megascale_kernels.fused.head_norm import norm_and_rotate

    generator = torch.Generator().manual_seed(11)
    position = torch.randint(0, 9000, (BATCH, SEQUENCE), generator=generator).to(DEVICE)
    table = None
    if turned:
        # With a scale as of yarn, the gradient of a rotation is not its inverse.
        table = rotary_table(position, rotary_frequencies(size, 10_000.0, DEVICE), 1.25)
    shape = (BATCH, SEQUENCE, HEADS, size) if by_position else (BATCH, HEADS, SEQUENCE, size)
    x, gradient = (torch.randn(shape, generator=generator).to(DEVICE) for _ in range(2))
    scale = 1 + torch.randn(size, generator=generator).to(DEVICE)

    def laid(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2) if by_position else tensor

    def fused(leaves: Sequence[torch.Tensor], bound: Sequence[Weight]) -> torch.Tensor:
        out = norm_and_rotate(laid(leaves[0]), bound[0], 1e-5, table)
        assert laid(out).is_contiguous()  # the result lies as the input does
        return laid(out)

    def plain(leaves: Sequence[torch.Tensor], bound: Sequence[Weight]) -> torch.Tensor:
        normed = norm_heads(laid(leaves[0]).permute(2, 0, 1, 3), bound[0], 1e-5)
        turned_heads = normed if table is None else apply_rotary(normed, table)
        return laid(turned_heads.permute(1, 2, 0, 3))

    found = gradients_of(fused, [x], [scale], [gradient], torch.float32)
    exact = gradients_of(plain, [x], [scale], [gradient], torch.float64)
    for ours, theirs in zip(found, exact, strict=True):
        assert relative_error(ours, theirs) < 2e-6

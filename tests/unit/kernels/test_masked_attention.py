"""The kernel for documents and windows against the formula in float64, at any head size."""

from __future__ import annotations

import pytest
import torch
from tests.harness.kernels import COMPILED_ROWS, DEVICE, blank, relative_error

from megascale_kernels.attention import AttentionMask, attention, attention_mask
from megascale_kernels.documents import documents_of

pytest.importorskip("triton")

BATCH, SEQUENCE = 2, 150
BEGINS = ([1, 40, 41, 100], [149])


def _mask(window: int, documents: bool) -> AttentionMask:
    begins = torch.zeros(BATCH, SEQUENCE, dtype=torch.bool)
    for row, at in zip(begins, BEGINS, strict=True):
        row[at] = True
    start = torch.where(begins, torch.arange(SEQUENCE), 0).cummax(1).values
    found = documents_of(start).map(lambda x: x.to(DEVICE)) if documents else None
    return attention_mask(SEQUENCE, window=window, documents=found, device=DEVICE)


def _run(
    leaves: list[torch.Tensor], mask: AttentionMask, gradient: torch.Tensor
) -> list[torch.Tensor]:
    from megascale_kernels.masked.attention import masked_attention

    first, until = (x.expand(BATCH, -1).contiguous() for x in (mask.first, mask.until))
    query, key, value = (leaf.transpose(1, 2).contiguous() for leaf in leaves)
    out = masked_attention(query, key, value, first, until).transpose(1, 2)
    return [out, *torch.autograd.grad(out, leaves, gradient)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "window", "documents", "by_position"),
    [
        (2, 2, 16, 0, True, True),
        (4, 2, 7, 0, True, False),  # no multiple of 8, shared heads
        pytest.param(2, 1, 40, 33, False, True, marks=pytest.mark.slow),
        # a tile of another size
        pytest.param(1, 1, 130, 20, True, False, marks=pytest.mark.slow),
        (1, 1, 16, 1, False, False),  # a query sees itself alone
    ],
)
def test_it_is_attention(
    heads: int, kv_heads: int, size: int, window: int, documents: bool, by_position: bool
) -> None:
    generator = torch.Generator().manual_seed(3)

    def made(number: int) -> torch.Tensor:
        x = torch.randn(BATCH, SEQUENCE, number, size, generator=generator).to(DEVICE)
        x = x.transpose(1, 2)
        return (x if by_position else x.contiguous()).requires_grad_()

    leaves, gradient = [made(heads), made(kv_heads), made(kv_heads)], made(heads).detach()
    mask = _mask(window, documents)
    found = _run(leaves, mask, gradient)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = attention(*exact, mask, "math")
    wanted = [expected, *torch.autograd.grad(expected, exact, gradient.double())]
    for name, ours, theirs in zip(("out", "q", "k", "v"), found, wanted, strict=True):
        error = float((ours.double() - theirs).abs().max())
        assert min(relative_error(ours, theirs), error) < 2e-6, name  # a gradient may be exactly 0
    for one, two in zip(found, _run(leaves, mask, gradient), strict=True):
        assert torch.equal(one, two)


def test_what_a_query_sees_only_grows_and_both_bounds_agree() -> None:
    for window, documents in ((0, True), (20, True), (20, False)):
        mask = _mask(window, documents)
        first, until = mask.first, mask.until
        assert (first.diff(dim=1) >= 0).all() and (until.diff(dim=1) >= 0).all()
        dense = mask.dense
        assert dense is not None
        assert torch.equal(dense[:, 0].sum(1), until - torch.arange(SEQUENCE, device=DEVICE))


def _compile(size: int, dtype: torch.dtype) -> None:
    sequence, batch = COMPILED_ROWS
    query, key, value = (
        blank(batch, sequence, heads, size, dtype=dtype).requires_grad_() for heads in (8, 2, 2)
    )
    from megascale_kernels.masked.attention import masked_attention

    bounds = torch.zeros(batch, sequence, dtype=torch.int32)
    out = masked_attention(query, key, value, bounds, bounds)
    out.backward(blank(*out.shape, dtype=dtype))


COMPILED = {
    "masked attention of 32": lambda: _compile(32, torch.bfloat16),
}
# Each takes as long as ten other kernels.
COMPILED_AT_LENGTH = {
    "masked attention of 64": lambda: _compile(64, torch.bfloat16),
    "masked attention": lambda: _compile(128, torch.bfloat16),
    "masked attention fp32": lambda: _compile(128, torch.float32),
    "small masked attention of odd heads": lambda: _compile(36, torch.bfloat16),
    "small masked attention of wide heads": lambda: _compile(512, torch.float32),
}

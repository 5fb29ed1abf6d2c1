"""Attention against the formula in float64, and against what each mask promises."""

from __future__ import annotations

import pytest
import torch

from megascale_kernels.attention import attention, attention_mask

SEQUENCE, BATCH, WIDTH = 13, 2, 8


def _reference(inputs: list[torch.Tensor], seen: torch.Tensor) -> torch.Tensor:
    q, k, v = inputs
    share = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    return torch.einsum("bhst,tbhd->sbhd", weights, v).flatten(2)


def _seen(window: int, start: torch.Tensor | None) -> torch.Tensor:
    seen = torch.zeros(BATCH, SEQUENCE, SEQUENCE, dtype=torch.bool)
    for b in range(BATCH):
        for query in range(SEQUENCE):
            first = int(start[b, query]) if start is not None else 0
            first = max(first, query - window + 1) if window else first
            seen[b, query, first : query + 1] = True
    return seen


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("window", [0, 3, SEQUENCE])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_attention(kv_heads: int, window: int, documents: bool, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(SEQUENCE, BATCH, heads, WIDTH, generator=generator).to(dtype).requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    )
    start = torch.tensor([[0] * 5 + [5] * 8, [0] * 12 + [12]]) if documents else None
    out = attention(q, k, v, attention_mask(SEQUENCE, window=window, document_start=start))
    gradient = torch.randn(out.shape, generator=generator)
    found = torch.autograd.grad(out, (q, k, v), gradient.to(dtype))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = _reference(exact, _seen(window, start))
    wanted = torch.autograd.grad(expected, exact, gradient.to(dtype).double())
    assert out.is_contiguous()
    for ours, theirs in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=tolerance, rtol=tolerance)


def test_a_causal_mask_is_a_flag_and_not_a_matrix() -> None:
    assert attention_mask(SEQUENCE).dense is None
    assert attention_mask(SEQUENCE, window=SEQUENCE + 1).dense is None

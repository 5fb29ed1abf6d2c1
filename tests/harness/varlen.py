"""A stand-in for torch's variable-length attention on machines without CUDA: the same contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megascale_kernels import attention as module


def slow_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """torch.nn.attention.varlen.varlen_attn as torch 2.11 documents it, in loops.

    It asserts what the real kernels require.
    """
    assert (
        cu_seq_q.dtype == torch.int32
        and cu_seq_q.is_contiguous()
        and torch.equal(cu_seq_q, cu_seq_k)
    )
    assert all(x.is_contiguous() and x.shape[0] == int(cu_seq_q[-1]) for x in (query, key, value))
    left, right = window_size
    assert right == 0, "the future is hidden"
    parts = []
    for begin, end in zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True):
        assert end - begin <= max_q == max_k, "what lies beyond is not computed"
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
        index = torch.arange(end - begin)
        seen = index[None, :] <= index[:, None]
        if left >= 0:
            seen &= index[None, :] >= index[:, None] - left
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def use_slow_varlen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the attention backend "varlen" compute by :func:`slow_varlen_attn`, on any device.

    Returns:
        The list to which every call appends the number of documents that it was given.
    """
    calls: list[int] = []

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        calls.append(arguments[3].numel() - 1)
        return slow_varlen_attn(*arguments, **options)

    monkeypatch.setattr(module, "_varlen", lambda: counted)
    monkeypatch.setattr(module, "_device_obstacle", lambda query, capability=None: None)
    return calls

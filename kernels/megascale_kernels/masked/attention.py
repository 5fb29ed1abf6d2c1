"""Attention inside documents and sliding windows in Triton: any head size and precision, no matrix.

A query sees the keys from ``first`` of its position up to its own; both bounds only grow along a
sequence, so a block of queries meets one run of key blocks, of which only the outer ones need a
mask. Tiles, running maxima and the recomputed backward follow FlashAttention-2 (arXiv 2307.08691).
Backward takes two kernels, one that owns queries and one that owns keys, and adds nothing
atomically: it repeats bit for bit. It serves what the vendors' kernels cannot take (32-bit floats,
head sizes that are no multiple of 8), and machines without them.
"""

from __future__ import annotations

from typing import Any

import torch

from megascale_kernels.masked.backward import gradients
from megascale_kernels.masked.forward import Kept, results
from megascale_kernels.torch_calls import apply


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first: torch.Tensor,
    until: torch.Tensor,
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v, each query over the keys from ``first`` up to itself.

    Args:
        query: [B, S, heads, d], contiguous, as is the result.
        key, value: [B, S, key/value heads, d], likewise; query heads share them in equal groups.
        first: int32 [B, S]: the first key that a query sees; it never falls along a sequence.
        until: int32 [B, S]: the first query behind those that see a key.
    """
    out: torch.Tensor = apply(_MaskedAttention, query, key, value, first, until)
    return out


class _MaskedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        first: torch.Tensor,
        until: torch.Tensor,
    ) -> torch.Tensor:
        out, sums = results(query, key, value, first)
        ctx.save_for_backward(*Kept(query, key, value, first, until, out, sums))
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *gradients(d_out, Kept(*ctx.saved_tensors)), None, None

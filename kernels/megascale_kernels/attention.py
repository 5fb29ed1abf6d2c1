"""Scaled dot-product attention under a mask description: causal, sliding window, documents.

The plain path is torch's own attention. A purely causal mask is passed as a flag, so that the fused backends apply,
cuDNN's first: the fastest on Hopper. Its backward is not deterministic, so it is left out where deterministic
algorithms are asked for. Windows and documents need a dense boolean mask here, built once per micro-batch and shared by
all layers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

_REPEATABLE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class AttentionMask:
    """Who may look at whom. ``dense`` is bool [B, 1, S, S], True where a query (row) sees a key; None: all causal."""

    dense: torch.Tensor | None = None


def attention_mask(
    sequence: int, *, window: int = 0, document_start: torch.Tensor | None = None, device: torch.device | None = None
) -> AttentionMask:
    """Describe a causal mask over ``sequence`` tokens.

    Args:
        sequence: S, the length of the sequence.
        window: a query sees itself and the ``window - 1`` tokens before it; 0 means all before it.
        document_start: integer [B, S], where in the sequence the token's document starts; None: one document.
        device: where a mask without documents is built.
    """
    if document_start is None and (window == 0 or window >= sequence):
        return AttentionMask()
    where = document_start.device if document_start is not None else device
    index = torch.arange(sequence, device=where)
    query, key = index[:, None], index[None, :]
    seen = (key <= query)[None]
    if window:
        seen = seen & (key > query - window)[None]
    if document_start is not None:
        seen = seen & (key[None] >= document_start[:, :, None])
    return AttentionMask(seen[:, None])


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v under ``mask``; query heads share key/value heads in equal groups.

    Args:
        query: [S, B, heads, d].
        key, value: [S, B, key/value heads, d].

    Returns:
        [S, B, heads * d], contiguous.
    """
    # The fused backends get contiguous tensors: strided views have crashed cuDNN attention on Hopper.
    q, k, v = (t.permute(1, 2, 0, 3).contiguous() for t in (query, key, value))
    shared = q.shape[1] // k.shape[1]
    if shared > 1 and mask.dense is not None:  # no fused backend takes both a mask and shared heads
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        shared = 1
    with _fastest(causal=mask.dense is None):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.dense, is_causal=mask.dense is None, enable_gqa=shared > 1
        )
    return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def _fastest(*, causal: bool) -> AbstractContextManager[None]:
    """The order in which torch tries its backends; those that cannot take the inputs are passed over."""
    if not causal:
        return nullcontext()
    deterministic = torch.are_deterministic_algorithms_enabled()
    return sdpa_kernel(_REPEATABLE if deterministic else [SDPBackend.CUDNN_ATTENTION, *_REPEATABLE], set_priority=True)

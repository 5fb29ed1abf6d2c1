"""The operators between a block's input and output GEMMs: rotary embedding, attention, activation.

In the parallel block the activation runs parallel to the attention (MegaScale section 3.1): with
one merged GEMM in and one out, attention and feed-forward are columns of one matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megascale_kernels.activation import Activation, activate
from megascale_kernels.attention import AttentionMask, attention
from megascale_kernels.parameter import Parameter
from megascale_kernels.rotary import HeadNorms, Heads, RotaryTable, split_heads


class Attend(Protocol):
    """:func:`megascale_kernels.attention.attention`, perhaps of a part of the sequence."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: AttentionMask
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class AttentionContext:
    """The settings of the attention over the columns of q, k and v.

    Args:
        heads: those of this rank.
        rotary: None with learned positions.
        mask: of the whole sequence.
        norms: norms of q and k; None: they have none.
        attend: the attention of this rank's part of the sequence.
    """

    heads: Heads
    rotary: RotaryTable | None
    mask: AttentionMask
    norms: HeadNorms | None = None
    attend: Attend = attention


def block_inner(
    inputs: torch.Tensor,
    bias: Parameter | None,
    context: AttentionContext,
    activation: Activation | None,
) -> torch.Tensor:
    """Attention of the first columns, followed by the activation of the others.

    Args:
        inputs: the input GEMM's result [S, B, heads.width + ffn columns]: q, k, v, then what
            ``activation`` takes.
        bias: the bias of the input GEMM, not yet added; as wide as ``inputs``.
        activation: None: attention alone.

    Returns:
        [S, B, query heads * d + ffn width], the output GEMM's input.
    """
    if bias is not None:
        inputs = inputs + bias.tracked()
    if activation is None:
        return _attend(inputs, context)
    columns, ffn = inputs.tensor_split((context.heads.width,), dim=-1)
    return torch.cat((_attend(columns, context), activate(ffn, None, activation)), dim=-1)


def _attend(inputs: torch.Tensor, context: AttentionContext) -> torch.Tensor:
    """[S, B, heads.width] to [S, B, query heads * d]."""
    q, k, v = split_heads(inputs, context.heads, context.rotary, context.norms)
    return context.attend(q, k, v, context.mask).permute(2, 0, 1, 3).flatten(2)

"""What lies between a block's input and output GEMMs: rotary embedding, attention, activation.

In the parallel block the activation stands beside the attention (MegaScale section 3.1): with one
merged GEMM in and one out, attention and feed-forward meet as columns of one matrix.
"""

from __future__ import annotations

import torch

from megascale_kernels.activation import Activation, activate
from megascale_kernels.attention import AttentionMask, attention
from megascale_kernels.parameter import Parameter
from megascale_kernels.rotary import HeadNorms, Heads, RotaryTable, split_heads


def block_inner(
    inputs: torch.Tensor,
    bias: Parameter | None,
    heads: Heads,
    activation: Activation | None,
    rotary: RotaryTable | None,
    mask: AttentionMask,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Attention of the first columns beside the activation of the others.

    Args:
        inputs: the input GEMM's result [S, B, heads.width + ffn columns]: q, k, v, then what
            ``activation`` takes.
        bias: of the input GEMM, not yet added; as wide as ``inputs``.
        activation: None: attention alone.
        rotary: None with learned positions.
        norms: of the heads of q and k; None: they have none.

    Returns:
        [S, B, query heads * d + ffn width], the output GEMM's input.
    """
    if bias is not None:
        inputs = inputs + bias.tracked()
    if activation is None:
        return _attend(inputs, heads, rotary, mask, norms)
    columns, ffn = inputs.tensor_split((heads.width,), dim=-1)
    attended = _attend(columns, heads, rotary, mask, norms)
    return torch.cat((attended, activate(ffn, None, activation)), dim=-1)


def _attend(
    inputs: torch.Tensor,
    heads: Heads,
    rotary: RotaryTable | None,
    mask: AttentionMask,
    norms: HeadNorms | None,
) -> torch.Tensor:
    """[S, B, heads.width] to [S, B, query heads * d]."""
    attended = attention(*split_heads(inputs, heads, rotary, norms), mask)
    return attended.permute(2, 0, 1, 3).flatten(2)

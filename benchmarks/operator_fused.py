"""The fused operators that need Triton, and attention backends, as functions of tensors.

Imported where they are measured, and not before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megascale_kernels.attention import BACKENDS, AttentionMask, attention, attention_mask
from megascale_kernels.block_inner import AttentionContext
from megascale_kernels.fused import block_inner, rotary
from megascale_kernels.rotary import Heads, RotaryTable
from megascale_trainer.weights import Weight

Function = Callable[..., tuple[torch.Tensor, ...]]


def fused_heads(heads: Heads, table: RotaryTable) -> Function:
    """The split of q, k and v from their columns, with bias and rotary embedding."""

    def run(x: torch.Tensor, bias: Weight) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = _Heads.apply(x, bias.value, bias.main_grad, heads, table)
        return found

    return run


def fused_block_inner(heads: Heads, table: RotaryTable, sequence: int) -> Function:
    """Attention and GELU between two merged GEMMs."""
    context = AttentionContext(heads, table, attention_mask(sequence))
    return lambda x, bias: (block_inner.block_inner(x, bias, context, "gelu"),)


def backend(name: str, mask: AttentionMask) -> Function:
    """Attention under ``mask`` by one backend; NotImplementedError where it cannot run."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor]:
        if obstacle := BACKENDS[name].obstacle(q, mask):
            raise NotImplementedError(obstacle)
        return (attention(q, k, v, mask, name),)

    return run


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, main_grad: torch.Tensor, *split: Any
    ) -> Any:
        ctx.shape, ctx.main_grad, ctx.split = x.shape, main_grad, split
        return rotary.read_heads(x, bias, *split)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        d_x = gradients[0].new_empty(ctx.shape)
        rotary.write_head_gradients(d_x, ctx.main_grad, gradients, *ctx.split)
        return d_x, None, None, None, None

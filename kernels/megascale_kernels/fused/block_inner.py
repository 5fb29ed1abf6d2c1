"""The operators between a block's GEMMs without copies: they share one matrix in each direction.

The attention runs between two autograd nodes:

- ``_Open`` reads q, k and v (bias, rotary) from the input GEMM's result and makes the output GEMM's
  input, still empty. Its backward writes the gradients of q, k, v and of the activation into the
  columns of one gradient.
- The attention is an autograd node of its own, whichever backend it has.
- ``_Close`` fills the columns of that matrix: the attention's result is copied once, the activation
  writes its own columns. Its backward passes the gradient of the whole matrix to ``_Open``.

So nothing is concatenated or split. Only ``_Open`` and the attention keep tensors for backward. A
recomputation of the operator (torch.utils.checkpoint) therefore ends before ``_Close``, and repeats
neither the activation nor the copy.
"""

from __future__ import annotations

from typing import Any

import torch

from megascale_kernels.activation import Activation
from megascale_kernels.block_inner import AttentionContext
from megascale_kernels.fused.activation import write_activation, write_gradients
from megascale_kernels.fused.amax import amax_slot, note_amax
from megascale_kernels.fused.head_norm import norm_and_rotate, norm_projection_and_rotate
from megascale_kernels.fused.rotary import read_heads, read_plain, write_head_gradients, write_plain
from megascale_kernels.parameter import Parameter
from megascale_kernels.rotary import Heads, RotaryTable
from megascale_kernels.torch_calls import apply


def block_inner(
    inputs: torch.Tensor,
    bias: Parameter | None,
    context: AttentionContext,
    activation: Activation | None,
    *,
    find_amax: bool = False,
) -> torch.Tensor:
    """Fused :func:`megascale_kernels.block_inner.block_inner`, of float32 or bf16.

    Heads are rotated as they are read; if q and k are normalised, after that.

    Args:
        find_amax: note the result's largest magnitude on it, and in backward the gradient's.
    """
    slot = amax_slot(inputs.device) if find_amax else None
    value, main_grad = (None, None) if bias is None else (bias.value, bias.main_grad)
    heads, rotary, mask, norms = context.heads, context.rotary, context.mask, context.norms
    turned = rotary if norms is None else None
    q, k, v, joined = apply(
        _Open, inputs, value, main_grad, heads, activation, turned, mask.by_position, find_amax
    )
    if norms is not None and norms.over == "projection":
        q, k = (
            norm_projection_and_rotate(
                x, weight, norms.epsilon, rotary, by_position=mask.by_position
            )
            for x, weight in ((q, norms.query), (k, norms.key))
        )
    elif norms is not None:
        q = norm_and_rotate(q, norms.query, norms.epsilon, rotary)
        k = norm_and_rotate(k, norms.key, norms.epsilon, rotary)
    attended = context.attend(q, k, v, mask)
    # Detached: the gradients of inputs and bias come from _Open alone; _Close has no edge to them.
    constant = None if value is None else value.detach()
    filled: torch.Tensor = apply(
        _Close,
        joined,
        attended,
        inputs.detach(),
        constant,
        heads,
        activation,
        mask.by_position,
        slot,
    )
    if slot is not None:
        note_amax(filled, slot)
    return filled


class _Open(torch.autograd.Function):
    """(inputs) to (q, k, v, the empty output matrix); their gradients to that of ``inputs``."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        bias: torch.Tensor | None,
        bias_grad: torch.Tensor | None,
        heads: Heads,
        activation: Activation | None,
        rotary: RotaryTable | None,
        by_position: bool,
        find_amax: bool,
    ) -> tuple[torch.Tensor, ...]:
        ffn = (inputs.shape[-1] - heads.width) // (2 if activation == "swiglu" else 1)
        joined = inputs.new_empty((*inputs.shape[:-1], heads.query * heads.size + ffn))
        # Without an activation the gradient of the inputs is linear in the heads' gradients, and
        # does not need the inputs.
        ctx.save_for_backward(*((inputs, bias) if activation is not None else (None, None)))
        ctx.shape = inputs.shape
        ctx.bias_grad = bias_grad
        ctx.heads = heads
        ctx.activation = activation
        ctx.rotary = rotary
        ctx.find_amax = find_amax
        return *read_heads(inputs, bias, heads, rotary, by_position=by_position), joined

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_q, d_k, d_v, d_joined = gradients
        inputs, bias = ctx.saved_tensors
        heads, bias_grad = ctx.heads, ctx.bias_grad
        d_inputs = d_joined.new_empty(ctx.shape)
        slot = amax_slot(d_joined.device) if ctx.find_amax else None
        write_head_gradients(d_inputs, bias_grad, (d_q, d_k, d_v), heads, ctx.rotary, slot)
        if ctx.activation is not None:
            write_gradients(
                d_inputs[..., heads.width :],
                None if bias_grad is None else bias_grad[heads.width :],
                d_joined[..., heads.query * heads.size :],
                inputs[..., heads.width :],
                None if bias is None else bias[heads.width :],
                ctx.activation,
                slot,
            )
        if slot is not None:
            note_amax(d_inputs, slot)
        return d_inputs, *(None for _ in range(7))


class _Close(torch.autograd.Function):
    """(matrix, attention's result) to the same matrix, filled in place."""

    @staticmethod
    def forward(
        ctx: Any,
        joined: torch.Tensor,
        attended: torch.Tensor,
        inputs: torch.Tensor,
        bias: torch.Tensor | None,
        heads: Heads,
        activation: Activation | None,
        by_position: bool,
        slot: torch.Tensor | None,
    ) -> torch.Tensor:
        write_plain(joined, attended, slot)
        if activation is not None:
            own = None if bias is None else bias[heads.width :]
            write_activation(
                joined[..., heads.query * heads.size :],
                inputs[..., heads.width :],
                own,
                activation,
                slot,
            )
        # The matrix is still the output of _Open: its gradient reaches _Open as that of ``joined``.
        ctx.mark_dirty(joined)
        ctx.heads = heads
        ctx.by_position = by_position
        return joined

    @staticmethod
    def backward(ctx: Any, d_joined: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        heads = ctx.heads
        # The attention's columns are copied into the layout that its backend reads. Those of the
        # activation stay in place, and _Open's backward reads them there.
        d_joined = d_joined.contiguous()
        d_attended = read_plain(d_joined, heads.query, heads.size, by_position=ctx.by_position)
        return d_joined, d_attended, *(None for _ in range(6))

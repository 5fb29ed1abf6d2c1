"""RMSNorm of q or k, then rotary embedding, in Triton.

The norm of every head takes one pass in each direction: both operators read a head of one position
as two halves, which the rotation pairs. Backward rotates the gradient back, and sums the weight's
gradient over fixed runs of positions, added up in order: no atomics, so it repeats bit for bit.
The norm of all heads of a token together is that of rows (:mod:`megascale_kernels.fused.norm`), and
the rotation a pass of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megascale_kernels.fused.norm import norm
from megascale_kernels.fused.partial_sums import add_partial_sums
from megascale_kernels.fused.rotary import read_plain, write_plain
from megascale_kernels.parameter import Parameter
from megascale_kernels.rotary import RotaryTable
from megascale_kernels.torch_calls import apply

_POSITIONS = 32  # of a program


def norm_and_rotate(
    x: torch.Tensor, weight: Parameter, epsilon: float, table: RotaryTable | None
) -> torch.Tensor:
    """Fused ``apply_rotary(norm_heads(x))`` of :mod:`megascale_kernels.rotary`.

    Nothing is rounded between the two.

    Args:
        x: [B, heads, S, d], the last stride 1; the result has the same strides.
        weight: [d].
        table: None: no rotation.
    """
    rotated: torch.Tensor = apply(_NormAndRotate, x, weight.value, weight.main_grad, epsilon, table)
    return rotated


def norm_projection_and_rotate(
    x: torch.Tensor,
    weight: Parameter,
    epsilon: float,
    table: RotaryTable | None,
    *,
    by_position: bool,
) -> torch.Tensor:
    """Fused ``apply_rotary(norm_projection(x))`` of :mod:`megascale_kernels.rotary`.

    Args:
        x: [B, heads, S, d]; a layout other than [B, S, heads, d] costs a copy.
        weight: [heads * d].
        table: None: no rotation.
        by_position: the layout of the result, as in
            :func:`megascale_kernels.fused.rotary.read_heads`.
    """
    _, normed = norm(x.transpose(1, 2).flatten(2), None, weight, None, "rmsnorm", epsilon)
    rotated: torch.Tensor = apply(_Rotate, normed, x.shape[1], table, by_position)
    return rotated


class _Rotate(torch.autograd.Function):
    """Rows [B, S, heads * d] to rotated heads [B, heads, S, d]."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, number: int, table: RotaryTable | None, by_position: bool
    ) -> torch.Tensor:
        ctx.table = table
        columns, size = rows.transpose(0, 1), rows.shape[2] // number
        return read_plain(columns, number, size, by_position=by_position, table=table)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        batch, number, sequence, size = gradient.shape
        d_rows = gradient.new_empty(batch, sequence, number * size)
        write_plain(d_rows.transpose(0, 1), gradient, table=ctx.table)
        return d_rows, None, None, None


class _NormAndRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        main_grad: torch.Tensor,
        epsilon: float,
        table: RotaryTable | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main_grad = main_grad
        ctx.epsilon = epsilon
        ctx.table = table
        out = torch.empty_like(x)
        _head_norm_kernel[_grid(x)](
            x,
            weight,
            *_angles(table),
            out,
            *x.stride()[:3],
            *out.stride()[:3],
            x.shape[1],
            x.shape[2],
            x.shape[0],
            epsilon,
            *_constants(x),
        )
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if gradient.stride(-1) != 1:
            gradient = gradient.contiguous()
        d_x = torch.empty_like(x)
        grid = _grid(x)
        parts = grid[0] * grid[1]
        partial = torch.empty(parts, x.shape[3], dtype=torch.float32, device=x.device)
        _head_norm_backward_kernel[grid](
            x,
            weight,
            *_angles(ctx.table),
            gradient,
            d_x,
            partial,
            *x.stride()[:3],
            *gradient.stride()[:3],
            *d_x.stride()[:3],
            x.shape[1],
            x.shape[2],
            x.shape[0],
            ctx.epsilon,
            *_constants(x),
        )
        add_partial_sums(ctx.main_grad, partial)
        return d_x, None, None, None, None


def _grid(x: torch.Tensor) -> tuple[int, int]:
    """Programs over positions, and over heads of all sequences."""
    return triton.cdiv(x.shape[2], _POSITIONS), x.shape[0] * x.shape[1]


def _angles(table: RotaryTable | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if table is None else (table.cos, table.sin)


def _constants(x: torch.Tensor) -> tuple[int, int, int, int]:
    """SIZE, HALF, BLOCK and POSITIONS; the upper half of an odd head has one column less."""
    size = x.shape[3]
    half = (size + 1) // 2
    return size, half, triton.next_power_of_2(half), _POSITIONS


@triton.jit
def _halves(
    x: tl.tensor, at: tl.tensor, lower: tl.tensor, upper: tl.tensor, HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The two halves of some heads at ``x`` + ``at``, float32; 0 outside."""
    first = tl.load(x + at, mask=lower, other=0.0).to(tl.float32)
    return first, tl.load(x + at + HALF, mask=upper, other=0.0).to(tl.float32)


@triton.jit
def _turns(
    cos: tl.tensor,
    sin: tl.tensor,
    row: tl.tensor,
    pair: tl.tensor,
    lower: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """cos and sin of every pair; 1 and 0 outside."""
    at = row[:, None] * HALF + pair[None, :]
    return tl.load(cos + at, mask=lower, other=1.0), tl.load(sin + at, mask=lower, other=0.0)


@triton.jit
def _head_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    position_stride: tl.tensor,
    out_batch_stride: tl.tensor,
    out_head_stride: tl.tensor,
    out_position_stride: tl.tensor,
    heads: tl.tensor,
    sequence: tl.tensor,
    batch: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> None:
    """POSITIONS of one head of one sequence."""
    b = (tl.program_id(1) // heads).to(tl.int64)  # from here on offsets are int64
    head = (tl.program_id(1) % heads).to(tl.int64)
    position = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    pair = tl.arange(0, BLOCK)
    here = position[:, None] < sequence
    lower, upper = here & (pair[None, :] < HALF), here & (pair[None, :] < SIZE - HALF)
    at = b * batch_stride + head * head_stride + position[:, None] * position_stride + pair[None, :]
    first, second = _halves(x, at, lower, upper, HALF)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(squares / SIZE + epsilon)[:, None]
    w_first, w_second = _halves(weight, pair, pair < HALF, pair < SIZE - HALF, HALF)
    first, second = first * scale * w_first[None, :], second * scale * w_second[None, :]
    if cos is not None:
        c, s = _turns(cos, sin, position * batch + b, pair, lower, HALF)
        first, second = first * c - second * s, second * c + first * s
    to = b * out_batch_stride + head * out_head_stride
    target = out + to + position[:, None] * out_position_stride + pair[None, :]
    tl.store(target, first.to(out.dtype.element_ty), mask=lower)
    tl.store(target + HALF, second.to(out.dtype.element_ty), mask=upper)


@triton.jit
def _head_norm_backward_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    gradient: tl.tensor,
    d_x: tl.tensor,
    partial: tl.tensor,
    batch_stride: tl.tensor,
    head_stride: tl.tensor,
    position_stride: tl.tensor,
    gradient_batch_stride: tl.tensor,
    gradient_head_stride: tl.tensor,
    gradient_position_stride: tl.tensor,
    d_batch_stride: tl.tensor,
    d_head_stride: tl.tensor,
    d_position_stride: tl.tensor,
    heads: tl.tensor,
    sequence: tl.tensor,
    batch: tl.tensor,
    epsilon: tl.tensor,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
) -> None:
    """The gradient of the same part of x; a row of ``partial`` gets that of the weight."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    position = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    pair = tl.arange(0, BLOCK)
    here = position[:, None] < sequence
    lower, upper = here & (pair[None, :] < HALF), here & (pair[None, :] < SIZE - HALF)
    at = b * batch_stride + head * head_stride + position[:, None] * position_stride + pair[None, :]
    first, second = _halves(x, at, lower, upper, HALF)
    squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
    scale = tl.rsqrt(squares / SIZE + epsilon)[:, None]
    first, second = first * scale, second * scale  # normed, without the weight
    at = b * gradient_batch_stride + head * gradient_head_stride
    at = at + position[:, None] * gradient_position_stride + pair[None, :]
    d_first, d_second = _halves(gradient, at, lower, upper, HALF)
    if cos is not None:  # by the opposite angle: the gradient is the transpose
        c, s = _turns(cos, sin, position * batch + b, pair, lower, HALF)
        d_first, d_second = d_first * c + d_second * s, d_second * c - d_first * s
    row = partial + (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * SIZE + pair
    tl.store(row, tl.sum(d_first * first, axis=0), mask=pair < HALF)
    tl.store(row + HALF, tl.sum(d_second * second, axis=0), mask=pair < SIZE - HALF)
    w_first, w_second = _halves(weight, pair, pair < HALF, pair < SIZE - HALF, HALF)
    d_first, d_second = d_first * w_first[None, :], d_second * w_second[None, :]
    # With n the normed x and g its gradient, the input's gradient is (g - n mean(g n)) * scale.
    along = tl.sum(d_first * first, axis=1) + tl.sum(d_second * second, axis=1)
    along = (along / SIZE)[:, None]
    to = b * d_batch_stride + head * d_head_stride
    target = d_x + to + position[:, None] * d_position_stride + pair[None, :]
    d_first, d_second = (d_first - first * along) * scale, (d_second - second * along) * scale
    tl.store(target, d_first.to(d_x.dtype.element_ty), mask=lower)
    tl.store(target + HALF, d_second.to(d_x.dtype.element_ty), mask=upper)

"""Rotary embedding with the split of q, k and v in Triton: GEMM columns to contiguous heads, and gradients back.

A program handles some positions of one sequence and a few heads, so that it reads the angles once. Bias gradients are
partial sums over fixed runs of positions, added up in order: no atomics, so they repeat bit for bit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from megascale_kernels.rotary import Heads, RotaryTable

_POSITIONS = 32
_GROUP = 8


def read_heads(
    inputs: torch.Tensor, bias: torch.Tensor | None, heads: Heads, table: RotaryTable | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v from ``inputs`` + ``bias``, [B, heads, S, d] each and contiguous; q and k rotated by ``table``.

    Args:
        inputs: [S, B, at least heads.width]: the columns of q, k, v, then others; the last stride is 1.
        bias: as wide as ``inputs``, or None.
    """
    sequence, batch = inputs.shape[:2]
    size, first, found = heads.size, 0, []
    for number, turned in ((heads.query, table), (heads.key_value, table), (heads.key_value, None)):
        out = inputs.new_empty((batch, number, sequence, size))
        _read_kernel[_grid(out)](
            inputs[..., first:],
            None if bias is None else bias[first:],
            None if turned is None else turned.cos,
            None if turned is None else turned.sin,
            out,
            sequence,
            batch,
            number,
            inputs.stride(0),
            inputs.stride(1),
            *_sizes(number, size),
        )
        found.append(out)
        first += number * size
    q, k, v = found
    return q, k, v


def write_head_gradients(
    d_inputs: torch.Tensor,
    bias_grad: torch.Tensor | None,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    heads: Heads,
    table: RotaryTable | None,
) -> None:
    """Write the gradients of :func:`read_heads`' results into the first columns of ``d_inputs``.

    Args:
        d_inputs: like ``inputs`` there.
        bias_grad: float32 [at least heads.width]: the sum over tokens is added to its front; None without a bias.
        gradients: of q, k and v, [B, heads, S, d] each, in any layout; it is best if the last stride is 1.
    """
    sequence, batch = d_inputs.shape[:2]
    size, first = heads.size, 0
    partial = None
    if bias_grad is not None:
        parts = batch * triton.cdiv(sequence, _POSITIONS)
        partial = torch.empty(parts, heads.width, dtype=torch.float32, device=d_inputs.device)
    for given, turned in zip(gradients, (table, table, None), strict=True):
        gradient = given if given.stride(-1) == 1 else given.contiguous()
        number = gradient.shape[1]
        _write_kernel[_grid(gradient)](
            gradient,
            None if turned is None else turned.cos,
            None if turned is None else turned.sin,
            d_inputs[..., first:],
            None if partial is None else partial[:, first:],
            sequence,
            batch,
            *gradient.stride()[:3],
            d_inputs.stride(0),
            d_inputs.stride(1),
            heads.width,
            *_sizes(number, size),
        )
        first += number * size
    if bias_grad is not None and partial is not None:
        bias_grad[: heads.width].add_(partial.sum(0))


def _grid(heads: torch.Tensor) -> tuple[int, int, int]:
    batch, number, sequence, _ = heads.shape
    return triton.cdiv(sequence, _POSITIONS), number // math.gcd(number, _GROUP), batch


def _sizes(number: int, size: int) -> tuple[int, int, int, int, int]:
    """SIZE, HALF, BLOCK, POSITIONS and GROUP of a kernel; a head of odd size has one column less in its upper half."""
    half = (size + 1) // 2
    return size, half, triton.next_power_of_2(half), _POSITIONS, math.gcd(number, _GROUP)


@triton.jit
def _read_kernel(
    columns: tl.tensor,
    bias: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    out: tl.tensor,
    sequence: tl.tensor,
    batch: tl.tensor,
    heads: tl.tensor,
    position_stride: tl.tensor,
    batch_stride: tl.tensor,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """POSITIONS of GROUP heads of one sequence: [S, B, heads * SIZE] to [B, heads, S, SIZE]; ``cos`` None: unturned."""
    b = tl.program_id(2).to(tl.int64)
    position = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    pair = tl.arange(0, BLOCK)
    here = position[:, None] < sequence
    lower = here & (pair[None, :] < HALF)
    upper = here & (pair[None, :] < SIZE - HALF)
    if cos is not None:
        angle = (position[:, None] * batch + b) * HALF + pair[None, :]
        c = tl.load(cos + angle, mask=lower, other=0.0)
        s = tl.load(sin + angle, mask=lower, other=0.0)
    for step in range(GROUP):
        head = tl.program_id(1) * GROUP + step
        source = columns + position[:, None] * position_stride + b * batch_stride + head * SIZE + pair[None, :]
        first = tl.load(source, mask=lower, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=upper, other=0.0).to(tl.float32)
        if bias is not None:
            own = bias + head * SIZE + pair
            first += tl.load(own, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
            second += tl.load(own + HALF, mask=pair < SIZE - HALF, other=0.0).to(tl.float32)[None, :]
        if cos is not None:
            turned = first * c - second * s
            second = second * c + first * s
            first = turned
        target = out + ((b * heads + head) * sequence + position[:, None]) * SIZE + pair[None, :]
        tl.store(target, first.to(out.dtype.element_ty), mask=lower)
        tl.store(target + HALF, second.to(out.dtype.element_ty), mask=upper)


@triton.jit
def _write_kernel(
    gradient: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    d_columns: tl.tensor,
    partial: tl.tensor,
    sequence: tl.tensor,
    batch: tl.tensor,
    gradient_batch_stride: tl.tensor,
    gradient_head_stride: tl.tensor,
    gradient_position_stride: tl.tensor,
    position_stride: tl.tensor,
    batch_stride: tl.tensor,
    partial_stride: tl.tensor,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """The way back of :func:`_read_kernel`, turned the other way; ``partial`` (None: no bias) gets the sum of rows."""
    b = tl.program_id(2).to(tl.int64)
    position = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    pair = tl.arange(0, BLOCK)
    here = position[:, None] < sequence
    lower = here & (pair[None, :] < HALF)
    upper = here & (pair[None, :] < SIZE - HALF)
    if cos is not None:
        angle = (position[:, None] * batch + b) * HALF + pair[None, :]
        c = tl.load(cos + angle, mask=lower, other=0.0)
        s = tl.load(sin + angle, mask=lower, other=0.0)
    for step in range(GROUP):
        head = tl.program_id(1).to(tl.int64) * GROUP + step
        source = gradient + b * gradient_batch_stride + head * gradient_head_stride
        source += position[:, None] * gradient_position_stride + pair[None, :]
        first = tl.load(source, mask=lower, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=upper, other=0.0).to(tl.float32)
        if cos is not None:
            turned = first * c + second * s
            second = second * c - first * s
            first = turned
        target = d_columns + position[:, None] * position_stride + b * batch_stride + head * SIZE + pair[None, :]
        tl.store(target, first.to(d_columns.dtype.element_ty), mask=lower)
        tl.store(target + HALF, second.to(d_columns.dtype.element_ty), mask=upper)
        if partial is not None:
            row = b * tl.num_programs(0) + tl.program_id(0)
            sums = partial + row * partial_stride + head * SIZE + pair
            tl.store(sums, tl.sum(first, axis=0), mask=pair < HALF)
            tl.store(sums + HALF, tl.sum(second, axis=0), mask=pair < SIZE - HALF)

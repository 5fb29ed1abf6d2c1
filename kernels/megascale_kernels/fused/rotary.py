"""Rotary embedding with the split of q, k and v in Triton: GEMM columns to contiguous heads, and
gradients back.

A program handles some positions of one sequence and a few heads, all of q, of k or of v, so that it
reads the angles once. One launch does all three; the attention's result and its gradient pass
through the same kernels, unturned. Bias gradients are partial sums over fixed runs of positions,
added up in order: no atomics, so they repeat bit for bit.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from megascale_kernels.fused.partial_sums import add_partial_sums
from megascale_kernels.rotary import Heads, RotaryTable

_POSITIONS = 32
_GROUP = 8  # heads of one program at most where it turns them, and so reads the angles once for all
_UNTURNED_GROUP = 2
_SUMMING_WARPS = 2  # of a program that sums over positions, for which its warps meet at every head


def read_heads(
    inputs: torch.Tensor,
    bias: torch.Tensor | None,
    heads: Heads,
    table: RotaryTable | None,
    *,
    by_position: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v from ``inputs`` + ``bias``, [B, heads, S, d] each and contiguous; q and k rotated
    by ``table``.

    Args:
        inputs: [S, B, at least heads.width]: the columns of q, k, v, then others; the last stride
            is 1.
        bias: as wide as ``inputs``, or None.
        by_position: they lie as contiguous [B, S, heads, d] in memory instead.
    """
    q = _empty_heads(inputs, heads.query, heads.size, by_position=by_position)
    k, v = (
        _empty_heads(inputs, heads.key_value, heads.size, by_position=by_position) for _ in range(2)
    )
    _read(inputs, bias, (q, k, v), heads, table, by_position=by_position)
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
        bias_grad: float32 [at least heads.width]: the sum over tokens is added to its front; None
            without a bias.
        gradients: of q, k and v, [B, heads, S, d] each, in any layout; it is best if the last
            stride is 1.
    """
    partial = None
    if bias_grad is not None:
        parts = d_inputs.shape[1] * triton.cdiv(d_inputs.shape[0], _POSITIONS)
        partial = torch.empty(parts, heads.width, dtype=torch.float32, device=d_inputs.device)
    _write(d_inputs, partial, gradients, heads, table)
    if bias_grad is not None and partial is not None:
        add_partial_sums(bias_grad[: heads.width], partial)


def read_plain(
    columns: torch.Tensor, number: int, size: int, *, by_position: bool = False
) -> torch.Tensor:
    """[S, B, at least number * size] to heads [B, number, S, size]: a copy of the first columns,
    laid out as above.
    """
    out = _empty_heads(columns, number, size, by_position=by_position)
    _read(columns, None, (out, out, out), Heads(number, 0, size), None, by_position=by_position)
    return out


def write_plain(columns: torch.Tensor, heads: torch.Tensor) -> None:
    """The way back of :func:`read_plain`: heads [B, number, S, size], in any layout, into the first
    columns.
    """
    _write(columns, None, (heads, heads, heads), Heads(heads.shape[1], 0, heads.shape[3]), None)


_Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _empty_heads(
    columns: torch.Tensor, number: int, size: int, *, by_position: bool
) -> torch.Tensor:
    """[B, number, S, size] for columns [S, B, ...]; not a view even by position: autograd treats
    views apart.
    """
    sequence, batch = columns.shape[:2]
    head, position = (size, number * size) if by_position else (sequence * size, size)
    return columns.new_empty_strided(
        (batch, number, sequence, size), (number * sequence * size, head, position, 1)
    )


def _read(
    columns: torch.Tensor,
    bias: torch.Tensor | None,
    found: _Three,
    heads: Heads,
    table: RotaryTable | None,
    *,
    by_position: bool,
) -> None:
    sizes = _sizes(heads, table)
    _read_kernel[_grid(columns, heads, sizes)](
        columns,
        bias,
        None if table is None else table.cos,
        None if table is None else table.sin,
        *found,
        *columns.shape[:2],
        heads.query,
        heads.key_value,
        *columns.stride()[:2],
        *sizes,
        by_position,
    )


def _write(
    columns: torch.Tensor,
    partial: torch.Tensor | None,
    given: _Three,
    heads: Heads,
    table: RotaryTable | None,
) -> None:
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in given)
    sizes = _sizes(heads, table)
    _write_kernel[_grid(columns, heads, sizes)](
        *(q, k, v),
        None if table is None else table.cos,
        None if table is None else table.sin,
        columns,
        partial,
        *columns.shape[:2],
        heads.query,
        heads.key_value,
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *columns.stride()[:2],
        *sizes,
        num_warps=4 if partial is None else _SUMMING_WARPS,
    )


def _grid(
    columns: torch.Tensor, heads: Heads, sizes: tuple[int, int, int, int, int]
) -> tuple[int, int, int]:
    sequence, batch = columns.shape[:2]
    *_, positions, group = sizes
    return triton.cdiv(sequence, positions), (heads.query + 2 * heads.key_value) // group, batch


def _sizes(heads: Heads, table: RotaryTable | None) -> tuple[int, int, int, int, int]:
    """SIZE, HALF, BLOCK, POSITIONS and GROUP of a kernel; a head of odd size has one column less in
    its upper half.

    The heads of one program are as many as divide those of q and those of k and v.
    """
    half, both = (heads.size + 1) // 2, math.gcd(heads.query, heads.key_value)
    most = min(both, _UNTURNED_GROUP if table is None else _GROUP)
    group = next(number for number in range(most, 0, -1) if both % number == 0)
    return heads.size, half, triton.next_power_of_2(half), _POSITIONS, group


@triton.jit
def _heads_before(head: tl.tensor, query: tl.tensor, key_value: tl.tensor) -> tl.tensor:
    """Of the heads of q, k and v in a row, those before the kind that ``head`` is of."""
    return tl.where(head < query, 0, tl.where(head < query + key_value, query, query + key_value))


@triton.jit
def _read_kernel(
    columns: tl.tensor,
    bias: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    sequence: tl.tensor,
    batch: tl.tensor,
    query: tl.tensor,
    key_value: tl.tensor,
    position_stride: tl.tensor,
    batch_stride: tl.tensor,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
    BY_POSITION: tl.constexpr,
) -> None:
    """POSITIONS of GROUP heads of one sequence: [S, B, heads * SIZE] to [B, heads, S, SIZE];
    ``cos`` None: unturned.

    BY_POSITION: to [B, S, heads, SIZE].
    """
    b = tl.program_id(2).to(tl.int64)
    of_all = tl.program_id(1) * GROUP
    out = q
    if of_all >= query + key_value:
        out = v
    elif of_all >= query:
        out = k
    number = tl.where(of_all < query, query, key_value)
    own = of_all - _heads_before(of_all, query, key_value)
    position = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    pair = tl.arange(0, BLOCK)
    here = position[:, None] < sequence
    lower = here & (pair[None, :] < HALF)
    upper = here & (pair[None, :] < SIZE - HALF)
    if cos is not None:
        angle = (position[:, None] * batch + b) * HALF + pair[None, :]
        turned = here & (
            pair[None, :] < tl.where(of_all < query + key_value, HALF, 0)
        )  # v: by no angle
        c = tl.load(cos + angle, mask=turned, other=1.0)
        s = tl.load(sin + angle, mask=turned, other=0.0)
    for step in range(GROUP):
        column = (of_all + step) * SIZE + pair
        source = columns + position[:, None] * position_stride + b * batch_stride + column[None, :]
        first = tl.load(source, mask=lower, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=upper, other=0.0).to(tl.float32)
        if bias is not None:
            first += tl.load(bias + column, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
            second += tl.load(bias + column + HALF, mask=pair < SIZE - HALF, other=0.0).to(
                tl.float32
            )[None, :]
        if cos is not None:
            rotated = first * c - second * s
            second = second * c + first * s
            first = rotated
        row = (b * number + own + step) * sequence + position
        if BY_POSITION:
            row = (b * sequence + position) * number + own + step
        target = out + row[:, None] * SIZE + pair[None, :]
        tl.store(target, first.to(out.dtype.element_ty), mask=lower)
        tl.store(target + HALF, second.to(out.dtype.element_ty), mask=upper)


@triton.jit
def _write_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    columns: tl.tensor,
    partial: tl.tensor,
    sequence: tl.tensor,
    batch: tl.tensor,
    query: tl.tensor,
    key_value: tl.tensor,
    q_batch_stride: tl.tensor,
    q_head_stride: tl.tensor,
    q_position_stride: tl.tensor,
    k_batch_stride: tl.tensor,
    k_head_stride: tl.tensor,
    k_position_stride: tl.tensor,
    v_batch_stride: tl.tensor,
    v_head_stride: tl.tensor,
    v_position_stride: tl.tensor,
    position_stride: tl.tensor,
    batch_stride: tl.tensor,
    SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    POSITIONS: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    """The way back of :func:`_read_kernel`, turned the other way; ``partial`` (None: no bias) gets
    the sum of rows.
    """
    b = tl.program_id(2).to(tl.int64)
    of_all = tl.program_id(1) * GROUP
    position = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    own = (of_all - _heads_before(of_all, query, key_value)).to(tl.int64)
    given = q + b * q_batch_stride + own * q_head_stride + position[:, None] * q_position_stride
    if of_all >= query + key_value:
        given = v + b * v_batch_stride + own * v_head_stride + position[:, None] * v_position_stride
    elif of_all >= query:
        given = k + b * k_batch_stride + own * k_head_stride + position[:, None] * k_position_stride
    head_stride = tl.where(of_all < query + key_value, k_head_stride, v_head_stride)
    head_stride = tl.where(of_all < query, q_head_stride, head_stride)
    pair = tl.arange(0, BLOCK)
    here = position[:, None] < sequence
    lower = here & (pair[None, :] < HALF)
    upper = here & (pair[None, :] < SIZE - HALF)
    if cos is not None:
        angle = (position[:, None] * batch + b) * HALF + pair[None, :]
        turned = here & (
            pair[None, :] < tl.where(of_all < query + key_value, HALF, 0)
        )  # v: by no angle
        c = tl.load(cos + angle, mask=turned, other=1.0)
        s = tl.load(sin + angle, mask=turned, other=0.0)
    for step in range(GROUP):
        source = given + step * head_stride + pair[None, :]
        first = tl.load(source, mask=lower, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=upper, other=0.0).to(tl.float32)
        if cos is not None:
            rotated = first * c + second * s
            second = second * c - first * s
            first = rotated
        column = (of_all + step) * SIZE + pair
        target = columns + position[:, None] * position_stride + b * batch_stride + column[None, :]
        tl.store(target, first.to(columns.dtype.element_ty), mask=lower)
        tl.store(target + HALF, second.to(columns.dtype.element_ty), mask=upper)
        if partial is not None:
            row = b * tl.num_programs(0) + tl.program_id(0)
            sums = partial + row * ((query + 2 * key_value) * SIZE) + column
            tl.store(sums, tl.sum(first, axis=0), mask=pair < HALF)
            tl.store(sums + HALF, tl.sum(second, axis=0), mask=pair < SIZE - HALF)

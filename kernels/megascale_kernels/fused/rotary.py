"""Rotary embedding and the split of q, k and v in Triton: GEMM columns to heads, and back.

A program handles some positions of one sequence and a few heads, all of q, of k or of v. So it
reads the angles once for all of its heads. One launch serves q, k and v. The attention's result and
its gradient pass through the same kernels, without rotation, and so does q or k alone, if a norm of
all heads is before the rotation. Bias gradients are partial sums over fixed runs of positions,
added up in order: no atomics, so they repeat bit for bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megascale_kernels.fused.amax import higher, raise_amax
from megascale_kernels.fused.partial_sums import add_partial_sums
from megascale_kernels.rotary import Heads, RotaryTable

_POSITIONS = 32  # per program
# At most so many heads per program. With rotation they share one read of the angles; without, there
# is nothing to share.
_GROUP = 8
_PLAIN_GROUP = 2
# Warps of a program that sums bias gradients over its positions: few, since they synchronise at
# each head. A program that also finds the amax needs the registers of more.
_SUMMING_WARPS = 2

_HeadTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of q, k and v


@dataclass(frozen=True)
class _HeadLayout:
    """The division of columns [S, B, ...] into programs of some heads each, for both kernels.

    Args:
        heads: the heads of q, k and v in the columns.
        table: angles; None: no rotation.
        sequence, batch: S and B.
        strides: elements from one position to the next, and from one sequence to the next.
        half: the number of pairs of a head; the upper half of an odd head has one column less.
        group: the number of heads of one program.
    """

    heads: Heads
    table: RotaryTable | None
    sequence: int
    batch: int
    strides: tuple[int, int]
    half: int
    group: int

    @classmethod
    def of(cls, columns: torch.Tensor, heads: Heads, table: RotaryTable | None) -> _HeadLayout:
        """The layout of ``columns``; a program's heads divide those of q and those of k and v."""
        both = math.gcd(heads.query, heads.key_value)
        most = min(both, _PLAIN_GROUP if table is None else _GROUP)
        group = next(number for number in range(most, 0, -1) if both % number == 0)
        (sequence, batch), strides = columns.shape[:2], columns.stride()
        half = (heads.size + 1) // 2
        return cls(heads, table, sequence, batch, (strides[0], strides[1]), half, group)

    @property
    def angles(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """cos and sin, the arguments of a kernel."""
        return (None, None) if self.table is None else (self.table.cos, self.table.sin)

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """S, B, heads of q, heads of k and of v."""
        return self.sequence, self.batch, self.heads.query, self.heads.key_value

    @property
    def grid(self) -> tuple[int, int, int]:
        """Programs over positions, over heads and over sequences."""
        groups = (self.heads.query + 2 * self.heads.key_value) // self.group
        return triton.cdiv(self.sequence, _POSITIONS), groups, self.batch

    @property
    def constants(self) -> tuple[int, int, int, int, int]:
        """SIZE, HALF, BLOCK, POSITIONS and GROUP; a tile of Triton has powers of two as sides."""
        return self.heads.size, self.half, triton.next_power_of_2(self.half), _POSITIONS, self.group


def read_heads(
    inputs: torch.Tensor,
    bias: torch.Tensor | None,
    heads: Heads,
    table: RotaryTable | None,
    *,
    by_position: bool = False,
) -> _HeadTensors:
    """q, k and v from ``inputs`` + ``bias``; q and k rotated by ``table``.

    Args:
        inputs: [S, B, at least heads.width]: the columns of q, k, v, then others; the last stride
            is 1.
        bias: as wide as ``inputs``, or None.
        by_position: the layout of the results, see "Returns".

    Returns:
        [B, heads, S, d] each, contiguous; with ``by_position`` a view of contiguous
        [B, S, heads, d].
    """
    q = _empty_heads(inputs, heads.query, heads.size, by_position=by_position)
    k, v = (
        _empty_heads(inputs, heads.key_value, heads.size, by_position=by_position) for _ in range(2)
    )
    layout = _HeadLayout.of(inputs, heads, table)
    _read(inputs, bias, (q, k, v), layout, by_position=by_position)
    return q, k, v


def write_head_gradients(
    d_inputs: torch.Tensor,
    bias_grad: torch.Tensor | None,
    gradients: _HeadTensors,
    heads: Heads,
    table: RotaryTable | None,
    slot: torch.Tensor | None = None,
) -> None:
    """Write the gradients of :func:`read_heads`' results into the first columns of ``d_inputs``.

    Args:
        d_inputs: like ``inputs`` there.
        bias_grad: float32 [at least heads.width]: the sum over tokens is added to its first
            columns; None without a bias.
        gradients: of q, k and v, [B, heads, S, d] each, in any layout; a last stride other than 1
            costs a copy.
        slot: raised to the largest magnitude of what is written
            (:mod:`megascale_kernels.fused.amax`).
    """
    partial = None
    if bias_grad is not None:
        parts = d_inputs.shape[1] * triton.cdiv(d_inputs.shape[0], _POSITIONS)
        partial = torch.empty(parts, heads.width, dtype=torch.float32, device=d_inputs.device)
    _write(d_inputs, partial, gradients, _HeadLayout.of(d_inputs, heads, table), slot)
    if bias_grad is not None and partial is not None:
        add_partial_sums(bias_grad[: heads.width], partial)


def read_plain(
    columns: torch.Tensor,
    number: int,
    size: int,
    *,
    by_position: bool = False,
    table: RotaryTable | None = None,
) -> torch.Tensor:
    """A copy of the first columns as heads of one kind, rotated by ``table`` or as they are.

    Args:
        columns: [S, B, at least number * size]; the last stride is 1.

    Returns:
        [B, number, S, size], laid out as by :func:`read_heads`.
    """
    out = _empty_heads(columns, number, size, by_position=by_position)
    layout = _HeadLayout.of(columns, Heads(number, 0, size), table)
    _read(columns, None, (out, out, out), layout, by_position=by_position)
    return out


def write_plain(
    columns: torch.Tensor,
    heads: torch.Tensor,
    slot: torch.Tensor | None = None,
    table: RotaryTable | None = None,
) -> None:
    """The inverse of :func:`read_plain`: ``heads`` [B, number, S, size], any layout, to columns.

    ``slot``: as in :func:`write_head_gradients`.
    """
    layout = _HeadLayout.of(columns, Heads(heads.shape[1], 0, heads.shape[3]), table)
    _write(columns, None, (heads, heads, heads), layout, slot)


def _empty_heads(
    columns: torch.Tensor, number: int, size: int, *, by_position: bool
) -> torch.Tensor:
    """[B, number, S, size] for columns [S, B, ...]."""
    sequence, batch = columns.shape[:2]
    head, position = (size, number * size) if by_position else (sequence * size, size)
    # Strided from the start, not a transposed view: autograd treats views in another way.
    return columns.new_empty_strided(
        (batch, number, sequence, size), (number * sequence * size, head, position, 1)
    )


def _read(
    columns: torch.Tensor,
    bias: torch.Tensor | None,
    found: _HeadTensors,
    layout: _HeadLayout,
    *,
    by_position: bool,
) -> None:
    _rotary_read_kernel[layout.grid](
        columns,
        bias,
        *layout.angles,
        *found,
        *layout.extents,
        *layout.strides,
        *layout.constants,
        BY_POSITION=by_position,
    )


def _write(
    columns: torch.Tensor,
    partial: torch.Tensor | None,
    given: _HeadTensors,
    layout: _HeadLayout,
    slot: torch.Tensor | None,
) -> None:
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in given)
    _rotary_write_kernel[layout.grid](
        q,
        k,
        v,
        *layout.angles,
        columns,
        partial,
        slot,
        *layout.extents,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *layout.strides,
        *layout.constants,
        num_warps=4 if partial is None or slot is not None else _SUMMING_WARPS,
    )


@triton.jit
def _heads_before(head: tl.tensor, query: tl.tensor, key_value: tl.tensor) -> tl.tensor:
    """The number of heads before the first of the kind (q, k or v) of ``head``."""
    return tl.where(head < query, 0, tl.where(head < query + key_value, query, query + key_value))


@triton.jit
def _angles(
    cos: tl.tensor,
    sin: tl.tensor,
    row: tl.tensor,
    pair: tl.tensor,
    here: tl.tensor,
    turned: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """cos and sin of the first ``turned`` pairs; 1 and 0 for the others, without a read."""
    at = row[:, None] * HALF + pair[None, :]
    read = here & (pair[None, :] < turned)
    return tl.load(cos + at, mask=read, other=1.0), tl.load(sin + at, mask=read, other=0.0)


@triton.jit
def _rotary_read_kernel(
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
    """POSITIONS of GROUP heads of one sequence: [S, B, heads * SIZE] to [B, heads, S, SIZE].

    BY_POSITION: to [B, S, heads, SIZE]. ``cos`` None: no rotation.
    """
    b = tl.program_id(2).to(tl.int64)  # from here on offsets are int64: they may pass 2^31
    of_all = tl.program_id(1) * GROUP  # the first head, counted over q, k and v
    # GROUP divides the heads of q and those of k and v: all heads of a program are of one kind.
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
    # Half-split form: pair i is (x[i], x[i + HALF]), so a program holds both halves as two tiles.
    lower = here & (pair[None, :] < HALF)
    upper = here & (pair[None, :] < SIZE - HALF)
    if cos is not None:
        turned = tl.where(of_all < query + key_value, HALF, 0)  # v passes without rotation
        c, s = _angles(cos, sin, position * batch + b, pair, here, turned, HALF)
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
        if cos is not None:  # in float32, as the plain operator: bf16 would round in between
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
def _rotary_write_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    columns: tl.tensor,
    partial: tl.tensor,
    slot: tl.tensor,
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
    """The inverse of :func:`_rotary_read_kernel`.

    ``partial`` (None: no bias) gets sums over positions.
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
        turned = tl.where(of_all < query + key_value, HALF, 0)  # v passes without rotation
        c, s = _angles(cos, sin, position * batch + b, pair, here, turned, HALF)
    for step in range(GROUP):
        source = given + step * head_stride + pair[None, :]
        first = tl.load(source, mask=lower, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=upper, other=0.0).to(tl.float32)
        if cos is not None:  # by the opposite angle: the gradient is the transpose
            first, second = first * c + second * s, second * c - first * s
        column = (of_all + step) * SIZE + pair
        target = columns + position[:, None] * position_stride + b * batch_stride + column[None, :]
        lower_half = first.to(columns.dtype.element_ty)
        upper_half = second.to(columns.dtype.element_ty)
        tl.store(target, lower_half, mask=lower)
        tl.store(target + HALF, upper_half, mask=upper)
        if slot is not None:
            none = tl.zeros([POSITIONS, BLOCK], dtype=tl.int32)
            raise_amax(slot, higher(higher(none, lower_half, lower), upper_half, upper))
        if partial is not None:  # sums of the float32 gradient, before it is rounded
            row = b * tl.num_programs(0) + tl.program_id(0)
            sums = partial + row * ((query + 2 * key_value) * SIZE) + column
            tl.store(sums, tl.sum(first, axis=0), mask=pair < HALF)
            tl.store(sums + HALF, tl.sum(second, axis=0), mask=pair < SIZE - HALF)

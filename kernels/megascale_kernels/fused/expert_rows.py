"""Rows of tokens to their experts and back in Triton: :mod:`megascale_kernels.expert_rows`.

In both directions a program owns a token. A program that copies a token to its experts reads it
once and writes it ``top_k`` times; one that joins a token reads its ``top_k`` rows at once and
writes their sum. So memory traffic is that of a copy, although the rows of an expert come from
everywhere. Sums have the order of the choices, without atomics: bits are equal in every run and for
every number of devices. If rows travel in FP8, a token is cast once and not once per expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megascale_kernels.expert_rows import RowPlan
from megascale_kernels.fused.activation import _sigmoid
from megascale_kernels.fused.amax import magnitude
from megascale_kernels.fused.quantize import scale_from, to_fp8
from megascale_kernels.grouped_gemm import GROUP_ROWS, ExpertGroups, FlippedRows
from megascale_kernels.quantize import E4M3, LARGEST, SMALLEST_AMAX, Operand

_FLIP_COLUMNS = 64


def spread(x: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    """Fused :func:`megascale_kernels.expert_rows.spread`."""
    rows = x.new_empty((plan.source.numel(), x.shape[1]))
    _spread(x, plan, rows, None)
    return rows


def spread_in_fp8(x: torch.Tensor, plan: RowPlan, dtype: torch.dtype = E4M3) -> Operand:
    """Fused :func:`megascale_kernels.expert_rows.spread_in_fp8`."""
    rows = x.new_empty((plan.source.numel(), x.shape[1]), dtype=dtype)
    scale = torch.empty(plan.source.numel(), dtype=torch.float32, device=x.device)
    _spread(x, plan, rows, scale)
    return Operand(rows, scale)


def _spread(x: torch.Tensor, plan: RowPlan, rows: torch.Tensor, scale: torch.Tensor | None) -> None:
    tokens, columns = x.shape
    block = triton.next_power_of_2(columns)
    _rows_spread_kernel[(tokens,)](
        x=x,
        place=plan.place,
        end=plan.end,
        rows=rows,
        scale=scale,
        columns=columns,
        x_stride=x.stride(0),
        LARGEST=LARGEST.get(rows.dtype, 1.0),
        SMALLEST=SMALLEST_AMAX,
        TOP_K=plan.place.shape[1],
        BLOCK=block,
        num_warps=_warps(block),
    )


def join(rows: torch.Tensor, plan: RowPlan, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Fused :func:`megascale_kernels.expert_rows.join`."""
    tokens, top_k = plan.place.shape
    columns = rows.shape[1]
    x = rows.new_empty((tokens, columns))
    block = triton.next_power_of_2(columns)
    _rows_join_kernel[(tokens,)](
        rows=rows,
        place=plan.place,
        end=plan.end,
        weights=weights,
        x=x,
        columns=columns,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return x


def flip(rows: Operand, groups: ExpertGroups) -> FlippedRows:
    """Fused :func:`megascale_kernels.expert_rows.flip`."""
    experts, columns, most = groups.experts, rows.data.shape[1], groups.expert.numel()
    scale = torch.empty(experts, dtype=torch.float32, device=rows.scale.device)
    _quantize_scale_kernel[(experts,)](rows.scale, groups.offsets, scale, 1024, num_warps=4)
    data = rows.data.new_empty((columns, most * GROUP_ROWS))
    across = triton.cdiv(columns, _FLIP_COLUMNS)
    _quantize_flip_kernel[(most * across,)](
        rows=rows.data,
        row_scale=rows.scale,
        offsets=groups.offsets,
        group_starts=groups.starts,
        group_expert=groups.expert,
        scale=scale,
        flipped=data,
        experts=experts,
        columns=columns,
        flipped_columns=data.shape[1],
        across=across,
        LARGEST=LARGEST[data.dtype],
        ROWS=GROUP_ROWS,
        COLUMNS=_FLIP_COLUMNS,
        num_warps=4,
    )
    return FlippedRows(data, scale)


def activate(h: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Fused :func:`megascale_kernels.expert_rows.activate`."""
    result = h.new_empty((h.shape[0], h.shape[1] // 2))
    _activate(h, weights, result, None)
    return result


def activate_in_fp8(
    h: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype = E4M3
) -> Operand:
    """Fused :func:`megascale_kernels.expert_rows.activate_in_fp8`."""
    result = h.new_empty((h.shape[0], h.shape[1] // 2), dtype=dtype)
    scale = torch.empty(h.shape[0], dtype=torch.float32, device=h.device)
    _activate(h, weights, result, scale)
    return Operand(result, scale)


def _activate(
    h: torch.Tensor,
    weights: torch.Tensor | None,
    result: torch.Tensor,
    scale: torch.Tensor | None,
) -> None:
    rows, width = result.shape
    block = triton.next_power_of_2(width)
    _rows_activation_kernel[(rows,)](
        h=h,
        weights=weights,
        result=result,
        scale=scale,
        width=width,
        LARGEST=LARGEST.get(result.dtype, 1.0),
        SMALLEST=SMALLEST_AMAX,
        BLOCK=block,
        num_warps=_warps(block),
    )


def activation_gradient(
    d_result: torch.Tensor, h: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Fused :func:`megascale_kernels.expert_rows.activation_gradient`."""
    d_h = torch.empty_like(h)
    return d_h, _activation_gradient(d_result, h, weights, d_h, None)


def activation_gradient_in_fp8(
    d_result: torch.Tensor,
    h: torch.Tensor,
    weights: torch.Tensor | None,
    dtype: torch.dtype = E4M3,
) -> tuple[Operand, torch.Tensor | None]:
    """Fused :func:`megascale_kernels.expert_rows.activation_gradient_in_fp8`."""
    d_h = torch.empty_like(h, dtype=dtype)
    scale = torch.empty(h.shape[0], dtype=torch.float32, device=h.device)
    d_weights = _activation_gradient(d_result, h, weights, d_h, scale)
    return Operand(d_h, scale), d_weights


def _activation_gradient(
    d_result: torch.Tensor,
    h: torch.Tensor,
    weights: torch.Tensor | None,
    d_h: torch.Tensor,
    scale: torch.Tensor | None,
) -> torch.Tensor | None:
    rows, width = d_result.shape
    d_weights = None if weights is None else torch.empty_like(weights)
    block = triton.next_power_of_2(width)
    _rows_activation_backward_kernel[(rows,)](
        d_result=d_result,
        h=h,
        weights=weights,
        d_h=d_h,
        scale=scale,
        d_weights=d_weights,
        width=width,
        LARGEST=LARGEST.get(d_h.dtype, 1.0),
        SMALLEST=SMALLEST_AMAX,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return d_weights


def _warps(block: int) -> int:
    # A thread holds 16 bytes of bf16, and a multiprocessor has several rows at once.
    return min(16, max(1, block // 512))


@triton.jit
def _rows_spread_kernel(
    x: tl.tensor,
    place: tl.tensor,
    end: tl.tensor,
    rows: tl.tensor,
    scale: tl.tensor,
    columns: tl.tensor,
    x_stride: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One token, to its rows before ``end``; with ``scale`` in FP8 under a power of two."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + token * x_stride + column, mask=inside, other=0.0)
    if scale is not None:
        # Cast once: the rows of a token have the same numbers and the same scale.
        wide = value.to(tl.float32)
        amax = tl.max(magnitude(wide), axis=0).to(tl.float32, bitcast=True)
        factor = scale_from(amax, LARGEST, SMALLEST, True)
        value = to_fp8(wide, tl.div_rn(1.0, factor), LARGEST, rows.dtype.element_ty)
    last = tl.load(end)
    for choice in tl.static_range(TOP_K):
        row = tl.load(place + token * TOP_K + choice).to(tl.int64)
        if row < last:
            tl.store(rows + row * columns + column, value, mask=inside)
            if scale is not None:
                tl.store(scale + row, factor)


@triton.jit
def _rows_join_kernel(
    rows: tl.tensor,
    place: tl.tensor,
    end: tl.tensor,
    weights: tl.tensor,
    x: tl.tensor,
    columns: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One token: the sum of its rows before ``end``, in the order of the choices."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    # In the order of the choices, wherever the rows are: sums repeat bit for bit.
    total = tl.zeros([BLOCK], dtype=tl.float32)
    last = tl.load(end)
    for choice in tl.static_range(TOP_K):
        row = tl.load(place + token * TOP_K + choice).to(tl.int64)
        width = tl.where(row < last, columns, 0)
        value = tl.load(rows + row * columns + column, mask=column < width, other=0.0)
        value = value.to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + token * TOP_K + choice)
        total += value
    tl.store(x + token * columns + column, total.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _quantize_scale_kernel(
    scale: tl.tensor, offsets: tl.tensor, largest: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """The largest scale of one expert's rows; 1 where it has none."""
    expert = tl.program_id(0)
    begin, end = tl.load(offsets + expert), tl.load(offsets + expert + 1)
    # Scales are compared as integers, in which NaN is the largest: a broken row breaks its expert.
    found = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(begin, end, BLOCK):
        row = first + tl.arange(0, BLOCK)
        found = tl.maximum(found, magnitude(tl.load(scale + row, mask=row < end, other=0.0)))
    joined = tl.max(found, axis=0).to(tl.float32, bitcast=True)
    tl.store(largest + expert, tl.where(end > begin, joined, 1.0))


@triton.jit(do_not_specialize=["experts"])
def _quantize_flip_kernel(
    rows: tl.tensor,
    row_scale: tl.tensor,
    offsets: tl.tensor,
    group_starts: tl.tensor,
    group_expert: tl.tensor,
    scale: tl.tensor,
    flipped: tl.tensor,
    experts: tl.tensor,
    columns: tl.tensor,
    flipped_columns: tl.tensor,
    across: tl.tensor,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """COLUMNS of one group of ROWS rows of an expert, transposed; zeros after its last row."""
    # The host does not know the number of groups, so it launches programs for the largest possible
    # number. Those after the last group do nothing.
    group = tl.program_id(0) // across
    if group < tl.load(group_starts + experts):
        expert = tl.load(group_expert + group)
        within = (group - tl.load(group_starts + expert)) * ROWS + tl.arange(0, ROWS)
        begin = tl.load(offsets + expert)
        real = within < tl.load(offsets + expert + 1) - begin
        row = (begin + within).to(tl.int64)
        column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
        inside = real[:, None] & (column[None, :] < columns)
        value = tl.load(rows + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
        inverse = tl.div_rn(tl.load(row_scale + row, mask=real, other=0.0), tl.load(scale + expert))
        result = to_fp8(value.to(tl.float32), inverse[:, None], LARGEST, flipped.dtype.element_ty)
        at = group.to(tl.int64) * ROWS + tl.arange(0, ROWS)
        tl.store(
            flipped + column.to(tl.int64)[:, None] * flipped_columns + at[None, :],
            tl.trans(result),
            mask=column[:, None] < columns,
        )


@triton.jit
def _rows_activation_kernel(
    h: tl.tensor,
    weights: tl.tensor,
    result: tl.tensor,
    scale: tl.tensor,
    width: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row: silu(gate) up, times the row's weight; with ``scale`` in FP8."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    source = h + row * 2 * width + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    value = gate * _sigmoid(gate) * up
    if weights is not None:
        value *= tl.load(weights + row)
    if scale is not None:
        amax = tl.max(magnitude(value), axis=0).to(tl.float32, bitcast=True)
        factor = scale_from(amax, LARGEST, SMALLEST, True)
        tl.store(scale + row, factor)
        made = to_fp8(value, tl.div_rn(1.0, factor), LARGEST, result.dtype.element_ty)
    else:
        made = value.to(result.dtype.element_ty)
    tl.store(result + row * width + column, made, mask=inside)


@triton.jit
def _rows_activation_backward_kernel(
    d_result: tl.tensor,
    h: tl.tensor,
    weights: tl.tensor,
    d_h: tl.tensor,
    scale: tl.tensor,
    d_weights: tl.tensor,
    width: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row of the gradients of ``h`` and of the row's weight; with ``scale`` in FP8."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    source = h + row * 2 * width + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(d_result + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = _sigmoid(gate)
    # The gradient of the weight is taken before the weight itself is applied.
    if weights is not None:
        tl.store(d_weights + row, tl.sum(gradient * (gate * share * up), axis=0))
        gradient *= tl.load(weights + row)
    d_gate = gradient * up * share * (1.0 + gate * (1.0 - share))
    d_up = gradient * gate * share
    target = d_h + row * 2 * width + column
    if scale is not None:
        largest = tl.maximum(tl.max(magnitude(d_gate), axis=0), tl.max(magnitude(d_up), axis=0))
        factor = scale_from(largest.to(tl.float32, bitcast=True), LARGEST, SMALLEST, True)
        tl.store(scale + row, factor)
        inverse = tl.div_rn(1.0, factor)
        tl.store(target, to_fp8(d_gate, inverse, LARGEST, d_h.dtype.element_ty), mask=inside)
        tl.store(target + width, to_fp8(d_up, inverse, LARGEST, d_h.dtype.element_ty), mask=inside)
    else:
        tl.store(target, d_gate.to(d_h.dtype.element_ty), mask=inside)
        tl.store(target + width, d_up.to(d_h.dtype.element_ty), mask=inside)

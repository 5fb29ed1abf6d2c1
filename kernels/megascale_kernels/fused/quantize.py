"""Casts to FP8 in Triton: :mod:`megascale_kernels.quantize` in as few passes as possible.

- :func:`amax` reads a tensor (the largest magnitude per program, then over programs), unless the
  kernels that made the tensor have found it already (:mod:`megascale_kernels.fused.amax`).
- :func:`quantize` reads bf16 and writes FP8 and its transposed copy in one pass.
- :func:`quantize_rows` needs no pass for the amax: a program owns a whole row.
- :func:`transpose` makes the copy from FP8 alone: two bytes per value instead of three.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from megascale_kernels.fused.amax import magnitude, noted_amax
from megascale_kernels.quantize import E4M3, LARGEST, SMALLEST_AMAX, Operand

_ELEMENTS, _STEPS = 4096, 8  # for the amax: a block, and how many a program reads
_PARTIALS = 4096  # block of the one program that joins them
# Tiles of a cast, and of a transposed copy alone. They are small, since a tile passes through
# shared memory once and many fit.
_TILE, _TILE_FLIPPED = (64, 128), (128, 64)
_TILE_WARPS = 4


def amax(x: torch.Tensor) -> torch.Tensor:
    """float32 [1]: the largest magnitude of ``x`` (float32 or bf16, contiguous); NaN spreads.

    No pass is needed if the kernels that made ``x`` have found it: see Note [Noted amax] in
    :mod:`megascale_kernels.fused.amax`.
    """
    noted = noted_amax(x)
    if noted is not None:
        return noted
    count = x.numel()
    programs = triton.cdiv(count, _ELEMENTS * _STEPS)
    partial = torch.empty(programs, dtype=torch.float32, device=x.device)
    _quantize_amax_kernel[(programs,)](x, partial, count, _ELEMENTS, _STEPS, num_warps=8)
    return largest_of(partial)


def largest_of(partial: torch.Tensor) -> torch.Tensor:
    """float32 [1]: the largest of ``partial`` (float32 magnitudes, contiguous); NaN spreads."""
    found = torch.empty(1, dtype=torch.float32, device=partial.device)
    block = min(_PARTIALS, triton.next_power_of_2(partial.numel()))
    _quantize_largest_kernel[(1,)](partial, found, partial.numel(), block, num_warps=8)
    return found


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = E4M3,
    *,
    amax: torch.Tensor,
    power_of_two: bool = False,
    straight: bool = True,
    transposed: bool = True,
    out: torch.Tensor | None = None,
) -> Operand:
    """``x`` as an operand under one scale.

    Args:
        x: [rows, columns], float32 or bf16, rows of a matrix.
        amax: float32 [1], from which the scale is computed.
        straight: with the data itself; if False, the operand's ``data`` is empty, for GEMMs over
            the rows alone.
        transposed: with a transposed copy, from the same pass.
        out: [rows, columns] in ``dtype``: memory for the data; None: new.
    """
    rows, columns = x.shape
    data = out
    if data is None:
        data = x.new_empty((rows, columns) if straight else (0, columns), dtype=dtype)
    flipped = x.new_empty((columns, rows), dtype=dtype) if transposed else None
    scale = torch.empty(1, dtype=torch.float32, device=x.device)
    _cast(x, None, amax, scale, data if straight else None, flipped, power_of_two)
    return Operand(data, scale, flipped, scale if transposed else None)


def quantize_rows(
    x: torch.Tensor,
    dtype: torch.dtype = E4M3,
    *,
    power_of_two: bool = True,
    transposed: bool = False,
) -> Operand:
    """``x`` [rows, columns] (float32 or bf16, rows of a matrix) with one scale for each row."""
    rows, columns = x.shape
    data = x.new_empty((rows, columns), dtype=dtype)
    scale = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    _quantize_rows_kernel[(rows,)](
        x=x,
        data=data,
        scale=scale,
        columns=columns,
        x_stride=x.stride(0),
        LARGEST=LARGEST[dtype],
        SMALLEST=SMALLEST_AMAX,
        POWER_OF_TWO=power_of_two,
        BLOCK=block,
        num_warps=16 if block > 16384 else 8,
    )
    operand = Operand(data, scale)
    return transpose(operand) if transposed else operand


def transpose(operand: Operand) -> Operand:
    """Fused :func:`megascale_kernels.quantize.transpose`."""
    data, scale = operand.data, operand.scale
    flipped = data.new_empty((data.shape[1], data.shape[0]))
    if scale.numel() == 1:
        _cast(data, None, None, scale, None, flipped, False)
        return replace(operand, transposed=flipped, transposed_scale=scale)
    common = largest_of(scale)
    _cast(data, scale, None, common, None, flipped, False)
    return replace(operand, transposed=flipped, transposed_scale=common)


def _cast(
    x: torch.Tensor,
    row_scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    scale: torch.Tensor,
    data: torch.Tensor | None,
    flipped: torch.Tensor | None,
    power_of_two: bool,
) -> None:
    """Launch :func:`_quantize_cast_kernel` on ``x`` [rows, columns]."""
    rows, columns = x.shape
    tile = _TILE_FLIPPED if data is None else _TILE
    across, down = triton.cdiv(columns, tile[1]), triton.cdiv(rows, tile[0])
    target = flipped if data is None else data
    assert target is not None
    _quantize_cast_kernel[(across * down,)](
        x,
        row_scale,
        amax,
        scale,
        data,
        flipped,
        rows,
        columns,
        across,
        x.stride(0),
        LARGEST[target.dtype],
        SMALLEST_AMAX,
        power_of_two,
        *tile,
        num_warps=_TILE_WARPS,
    )


@triton.jit
def scale_from(
    amax: tl.tensor, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, POWER_OF_TWO: tl.constexpr
) -> tl.tensor:
    """:func:`megascale_kernels.quantize.scale_of`."""
    scale = tl.maximum(amax, SMALLEST) * (1.0 / LARGEST)
    if POWER_OF_TWO:
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    return scale + (amax - amax)  # NaN where amax is infinite or NaN


@triton.jit
def to_fp8(
    x: tl.tensor, inverse: tl.tensor, LARGEST: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tensor:
    """``x`` * ``inverse``, limited to the range of DTYPE; NaN stays NaN.

    Triton's interpreter drops the carry of a mantissa that rounds up (31.5 becomes 16), so tests in
    the interpreter let torch convert.
    """
    return tl.clamp(x * inverse, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL).to(DTYPE)


@triton.jit
def _quantize_amax_kernel(
    x: tl.tensor, partial: tl.tensor, count: tl.tensor, ELEMENTS: tl.constexpr, STEPS: tl.constexpr
) -> None:
    """The largest magnitude of STEPS blocks, to ``partial``."""
    program = tl.program_id(0).to(tl.int64)
    found = tl.zeros([ELEMENTS], dtype=tl.int32)
    for step in range(STEPS):
        at = (program * STEPS + step) * ELEMENTS + tl.arange(0, ELEMENTS)
        value = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
        found = tl.maximum(found, magnitude(value))
    tl.store(partial + program, tl.max(found, axis=0).to(tl.float32, bitcast=True))


@triton.jit
def _quantize_largest_kernel(
    partial: tl.tensor, largest: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """The largest of all ``partial``, by one program."""
    found = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = tl.maximum(found, magnitude(tl.load(partial + at, mask=at < count, other=0.0)))
    tl.store(largest, tl.max(found, axis=0).to(tl.float32, bitcast=True))


@triton.jit
def _quantize_cast_kernel(
    x: tl.tensor,
    row_scale: tl.tensor,
    amax: tl.tensor,
    scale: tl.tensor,
    data: tl.tensor,
    flipped: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    across: tl.tensor,
    x_stride: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One tile of ``x``, in FP8 to ``data`` and to ``flipped`` (None: not made).

    With ``amax`` the scale is computed from it and written. Without, ``scale`` is given, and ``x``
    is FP8: with ``row_scale`` under scales of rows, else under ``scale`` already.
    """
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % across).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
    if amax is not None:
        # Each program computes the scale from amax on its own, which spares a launch.
        factor = scale_from(tl.load(amax), LARGEST, SMALLEST, POWER_OF_TWO)
        if program == 0:
            tl.store(scale, factor)
        # A product with the rounded reciprocal, as in the plain cast, gives the same bits.
        result = to_fp8(
            value.to(tl.float32),
            tl.div_rn(1.0, factor),
            LARGEST,
            (flipped if data is None else data).dtype.element_ty,
        )
    elif row_scale is not None:
        inverse = tl.div_rn(tl.load(row_scale + row, mask=row < rows, other=1.0), tl.load(scale))
        result = to_fp8(value.to(tl.float32), inverse[:, None], LARGEST, flipped.dtype.element_ty)
    else:
        result = value
    if data is not None:
        tl.store(data + row[:, None] * columns + column[None, :], result, mask=inside)
    if flipped is not None:
        # Transposed after the cast, so that a tile passes through shared memory as bytes.
        tl.store(
            flipped + column[:, None] * rows + row[None, :], tl.trans(result), mask=tl.trans(inside)
        )


@triton.jit
def _quantize_rows_kernel(
    x: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    columns: tl.tensor,
    x_stride: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row of ``x``, in FP8 under its own scale."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(magnitude(value), axis=0).to(tl.float32, bitcast=True)
    factor = scale_from(amax, LARGEST, SMALLEST, POWER_OF_TWO)
    tl.store(scale + row, factor)
    result = to_fp8(value, tl.div_rn(1.0, factor), LARGEST, data.dtype.element_ty)
    tl.store(data + row * columns + column, result, mask=inside)

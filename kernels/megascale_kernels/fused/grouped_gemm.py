"""GEMMs of experts in one launch: :mod:`megascale_kernels.grouped_gemm` in Triton, for Hopper.

As many programs as fit the device take tiles in turn. They read on the device, from
:class:`megascale_kernels.grouped_gemm.ExpertGroups`, which expert a tile belongs to. All operands
travel through the bulk copy engine: see Note [Ragged descriptors] and Note [Adding into float32].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from megascale_kernels.grouped_gemm import GROUP_ROWS, ExpertGroups, FlippedRows
from megascale_kernels.quantize import Factor

# Note [Ragged descriptors]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# A tile at the end of an expert's rows must not write into the rows of the next expert, and a sum
# over rows must not read them. Registers could be masked, but operands go from memory to the tensor
# cores without passing registers. So a descriptor of rows has two more dimensions, whose strides
# cancel. The copy engine computes
#
#     base + (2^30) * (2^34 - s) + (begin + count) * s + (2^30 - count + row) * s,
#
# which is base + (begin + row) * s modulo 2^64, and its own check of the last index,
# 2^30 - count + row < 2^30, ends the expert's rows: after them it reads zeros and writes nothing.
# (triton.tools.ragged_tma does the same, but not every version has it.)
#
# Note [Adding into float32]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~
# A weight's gradient is added in memory: in bf16 by the copy engine (a reduction of bulk copies),
# in FP8 by the threads (which is faster if a tile takes little time). So a program neither reads
# the old sum nor waits for it. The instructions are atomic, and yet the sum repeats bit for bit:
# each element gets one addend per launch, and launches are ordered.

_FAR = 1 << 30  # more rows than a tensor can have


@dataclass(frozen=True)
class Tile:
    """A tile of the result, the depth of a step of its sum, and how programs hold them."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int = 8
    parts: int = 2  # the result leaves in so many parts: each takes shared memory
    programs: int = 1  # for each multiprocessor


_ROWS_TILE = Tile(GROUP_ROWS, 256, 64, stages=3)
_OVER_ROWS_TILE = Tile(GROUP_ROWS, 256, 64, stages=3, parts=1)
_ROWS_TILE_FP8 = Tile(GROUP_ROWS, 256, 128, stages=3)
# Partial sums over SUMMED products, added in float32, take registers for both: a narrower tile.
_ROWS_TILE_EXACT = Tile(GROUP_ROWS, 128, 128, stages=4)
_WEIGHTS_TILE = Tile(128, 256, 64, stages=3, parts=4)
_WEIGHTS_TILE_FP8 = Tile(128, 256, GROUP_ROWS, stages=4, parts=4)
_SUMMED = 128  # products that a tensor core adds by itself if sums are not fast
_TILES_DOWN = 8  # tiles one below the other that programs take first: they share a weight in L2


def multiply(
    rows: Factor,
    weights: Factor,
    groups: ExpertGroups,
    out: torch.Tensor,
    *,
    over_rows: bool = False,
    fast: bool = True,
) -> None:
    """Fused :func:`megascale_kernels.grouped_gemm.multiply`.

    Args:
        rows: bf16, or FP8 with one scale for each row; rows of 16 bytes or a multiple.
        weights: contiguous, in the dtype of ``rows``; FP8 not ``over_rows``, since tensor cores
            read both factors of FP8 along the sum.
        out: bf16, contiguous.
        fast: tensor cores sum FP8 with fewer bits than float32 has.

    Raises:
        ValueError: weights in FP8 ``over_rows``, or memory that bulk copies cannot address.
    """
    in_fp8 = rows.scale is not None
    if in_fp8 and over_rows:
        raise ValueError("weights in FP8 must be transposed: a sum over their rows has no kernel")
    _check(rows=rows.data, weights=weights.data, out=out)
    if not out.shape[0]:
        return
    tile = _OVER_ROWS_TILE if over_rows else _ROWS_TILE
    if in_fp8:
        tile = _ROWS_TILE_FP8 if fast else _ROWS_TILE_EXACT
    width, depth = out.shape[1], rows.data.shape[1]
    block = [1, tile.depth, tile.columns] if over_rows else [1, tile.columns, tile.depth]
    programs = tile.programs * _multiprocessors(out.device)
    _grouped_gemm_kernel[(programs,)](
        rows=TensorDescriptor.from_tensor(rows.data, [tile.rows, tile.depth]),
        weights=TensorDescriptor.from_tensor(weights.data, block),
        out=_ragged(out, [tile.rows, tile.columns // tile.parts]),
        row_scale=rows.scale,
        column_scale=weights.scale,
        offsets=groups.offsets,
        starts=groups.starts,
        group_expert=groups.expert,
        experts=groups.experts,
        width=width,
        depth=depth,
        PROGRAMS=programs,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        TILES_DOWN=_TILES_DOWN,
        PARTS=tile.parts,
        OVER_ROWS=over_rows,
        SUMMED=_SUMMED if in_fp8 and not fast else 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def add_weight_gradients(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    groups: ExpertGroups,
    out: torch.Tensor,
    *,
    accumulate: bool = True,
) -> None:
    """Fused :func:`megascale_kernels.grouped_gemm.add_weight_gradients`, of bf16.

    Raises:
        ValueError: memory that bulk copies cannot address.
    """
    _check(gradient=gradient, rows=rows, out=out)
    if not rows.shape[0]:  # a tensor without rows has no address
        if not accumulate:
            out.zero_()
        return
    tile = _WEIGHTS_TILE
    left = _Side(_ragged(gradient, [tile.depth, tile.rows]))
    right = _Side(_ragged(rows, [tile.depth, tile.columns]))
    _add(left, right, groups, out, tile, accumulate=accumulate)


def add_weight_gradients_in_fp8(
    gradient: FlippedRows,
    rows: FlippedRows,
    groups: ExpertGroups,
    out: torch.Tensor,
    *,
    accumulate: bool = True,
) -> None:
    """Fused :func:`megascale_kernels.grouped_gemm.add_weight_gradients_in_fp8`."""
    tile = _WEIGHTS_TILE_FP8
    left = TensorDescriptor.from_tensor(gradient.data, [tile.rows, tile.depth])
    right = TensorDescriptor.from_tensor(rows.data, [tile.columns, tile.depth])
    left_side, right_side = _Side(left, gradient.scale), _Side(right, rows.scale)
    _add(left_side, right_side, groups, out, tile, accumulate=accumulate)


@dataclass(frozen=True)
class _Side:
    """One factor of a weight gradient as bulk copies take it; in FP8 with a scale per expert."""

    data: TensorDescriptor
    scale: torch.Tensor | None = None


def _add(
    gradient: _Side,
    rows: _Side,
    groups: ExpertGroups,
    out: torch.Tensor,
    tile: Tile,
    *,
    accumulate: bool,
) -> None:
    experts, width, depth = out.shape
    programs = tile.programs * _multiprocessors(out.device)
    _grouped_gemm_weights_kernel[(programs,)](
        gradient=gradient.data,
        rows=rows.data,
        out=TensorDescriptor.from_tensor(out, [1, tile.rows, tile.columns // tile.parts]),
        values=out,
        gradient_scale=gradient.scale,
        rows_scale=rows.scale,
        bounds=groups.offsets if gradient.scale is None else groups.starts,
        experts=experts,
        width=width,
        depth=depth,
        PROGRAMS=programs,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        TILES_DOWN=_TILES_DOWN,
        ACCUMULATE=accumulate,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _check(**tensors: torch.Tensor) -> None:
    """Raise unless rows begin at multiples of 16 bytes and values are contiguous (bulk copies)."""
    for name, tensor in tensors.items():
        size = tensor.element_size()
        outer = [stride * size % 16 for stride in tensor.stride()[:-1]]
        if tensor.stride(-1) != 1 or any(outer) or tensor.data_ptr() % 16:
            raise ValueError(
                f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} does not "
                "begin each row at a multiple of 16 bytes: widths must be multiples of "
                f"{16 // size}"
            )


def _ragged(rows: torch.Tensor, block: Sequence[int]) -> TensorDescriptor:
    """A descriptor that ends at the last row of an expert: see Note [Ragged descriptors]."""
    stride = rows.stride(0)
    return TensorDescriptor(
        rows,
        [0x7FFF0000, 0x7FFF0000, _FAR, rows.shape[1]],
        [2**34 - stride, stride, stride, 1],
        [1, 1, *block],
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _tile_of(
    tile: tl.tensor, down: tl.tensor, across: tl.tensor, TILES_DOWN: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Row and column of a tile among ``down`` by ``across``: TILES_DOWN rows, column by column."""
    each = TILES_DOWN * across
    first = (tile // each) * TILES_DOWN
    high = tl.minimum(down - first, TILES_DOWN)
    return first + (tile % each) % high, (tile % each) // high


@triton.jit(do_not_specialize=["experts"])
def _grouped_gemm_kernel(
    rows: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    row_scale: tl.tensor,
    column_scale: tl.tensor,
    offsets: tl.tensor,
    starts: tl.tensor,
    group_expert: tl.tensor,
    experts: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILES_DOWN: tl.constexpr,
    PARTS: tl.constexpr,
    OVER_ROWS: tl.constexpr,
    SUMMED: tl.constexpr,
) -> None:
    """Tiles of ``out``, by programs in turn; SUMMED: products between sums in float32, 0: all."""
    across = tl.cdiv(width, COLUMNS)
    steps = tl.cdiv(depth, DEPTH)
    # One flat loop over tiles and steps: the next tile's operands arrive while this one's result is
    # written.
    for tile in tl.range(
        tl.program_id(0), tl.load(starts + experts) * across, PROGRAMS, flatten=True
    ):
        expert = tl.load(group_expert + tile // across)
        start = tl.load(starts + expert)
        below, beside = _tile_of(
            tile - start * across, tl.load(starts + expert + 1) - start, across, TILES_DOWN
        )
        begin = tl.load(offsets + expert)
        count = tl.load(offsets + expert + 1) - begin
        column = beside * COLUMNS
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for step in range(steps):
            # The tile may contain rows of the next expert: their results are not written.
            left = rows.load([begin + below * ROWS, step * DEPTH])
            if OVER_ROWS:
                right = weights.load([expert, step * DEPTH, column]).reshape(DEPTH, COLUMNS)
            else:
                right = weights.load([expert, column, step * DEPTH]).reshape(COLUMNS, DEPTH).T
            if SUMMED > 0:
                total = tl.dot(left, right, total, max_num_imprecise_acc=SUMMED)
            else:
                total = tl.dot(left, right, total)
        if row_scale is not None:
            row = below * ROWS + tl.arange(0, ROWS)
            of_row = tl.load(row_scale + begin + row, mask=row < count, other=0.0)
            at = column + tl.arange(0, COLUMNS)
            of_column = tl.load(column_scale + expert * width + at, mask=at < width, other=0.0)
            total *= of_row[:, None] * of_column[None, :]
        if PARTS == 1:
            _write(out, begin, count, below * ROWS, column, total)
        else:
            first, second = _halves(total)
            _write(out, begin, count, below * ROWS, column, first)
            _write(out, begin, count, below * ROWS, column + COLUMNS // 2, second)


@triton.jit
def _halves(value: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The left and the right half of a tile: each leaves through shared memory of its size."""
    return tl.split(  # type: ignore[no-any-return]
        tl.permute(tl.reshape(value, (value.shape[0], 2, value.shape[1] // 2)), (0, 2, 1))
    )


@triton.jit
def _write(
    out: tl.tensor,
    begin: tl.tensor,
    count: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    value: tl.tensor,
) -> None:
    """Store rows of one expert: see Note [Ragged descriptors]."""
    out.store(
        [0x40000000, begin + count, 0x40000000 - count + row, column],
        value.to(out.dtype).reshape(1, 1, value.shape[0], value.shape[1]),
    )


@triton.jit
def _read(
    rows: tl.tensor, begin: tl.tensor, count: tl.tensor, row: tl.tensor, column: tl.tensor
) -> tl.tensor:
    """Load rows of one expert: see Note [Ragged descriptors]."""
    return rows.load([0x40000000, begin + count, 0x40000000 - count + row, column])


@triton.jit(do_not_specialize=["experts"])
def _grouped_gemm_weights_kernel(
    gradient: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    values: tl.tensor,
    gradient_scale: tl.tensor,
    rows_scale: tl.tensor,
    bounds: tl.tensor,
    experts: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILES_DOWN: tl.constexpr,
    ACCUMULATE: tl.constexpr,
) -> None:
    """Tiles of each expert's gradient, by programs in turn: see Note [Adding into float32].

    In bf16 (``gradient_scale`` is None) ``bounds`` are rows; in FP8 groups of DEPTH columns of the
    transposed copies, and ``values`` is the memory of ``out``.
    """
    down, across = tl.cdiv(width, ROWS), tl.cdiv(depth, COLUMNS)
    each = down * across
    for tile in tl.range(tl.program_id(0), experts * each, PROGRAMS):
        expert = tile // each
        below, beside = _tile_of(tile % each, down, across, TILES_DOWN)
        begin = tl.load(bounds + expert)
        count = tl.load(bounds + expert + 1) - begin
        total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        if gradient_scale is None:
            for step in range(tl.cdiv(count, DEPTH)):
                left = _read(gradient, begin, count, step * DEPTH, below * ROWS)
                right = _read(rows, begin, count, step * DEPTH, beside * COLUMNS)
                total = tl.dot(left.reshape(DEPTH, ROWS).T, right.reshape(DEPTH, COLUMNS), total)
        else:
            for step in range(count):
                left = gradient.load([below * ROWS, (begin + step) * DEPTH])
                right = rows.load([beside * COLUMNS, (begin + step) * DEPTH])
                total = tl.dot(left, right.T, total)
            total *= tl.load(gradient_scale + expert) * tl.load(rows_scale + expert)
        row, column = below * ROWS, beside * COLUMNS
        left_half, right_half = _halves(total)
        first, second = _halves(left_half)
        third, fourth = _halves(right_half)
        PART: tl.constexpr = COLUMNS // 4
        if ACCUMULATE and gradient_scale is not None:
            own = values + expert.to(tl.int64) * width * depth
            _add_to(own, width, depth, row, column, first)
            _add_to(own, width, depth, row, column + PART, second)
            _add_to(own, width, depth, row, column + 2 * PART, third)
            _add_to(own, width, depth, row, column + 3 * PART, fourth)
        else:
            _put(out, expert, row, column, first, ACCUMULATE)
            _put(out, expert, row, column + PART, second, ACCUMULATE)
            _put(out, expert, row, column + 2 * PART, third, ACCUMULATE)
            _put(out, expert, row, column + 3 * PART, fourth, ACCUMULATE)


@triton.jit
def _add_to(
    values: tl.tensor,
    width: tl.tensor,
    depth: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    value: tl.tensor,
) -> None:
    """Add ``value`` into memory by threads: see Note [Adding into float32]."""
    down = row + tl.arange(0, value.shape[0])
    across = column + tl.arange(0, value.shape[1])
    inside = (down[:, None] < width) & (across[None, :] < depth)
    at = values + down.to(tl.int64)[:, None] * depth + across[None, :]
    tl.atomic_add(at, value, mask=inside, sem="relaxed")


@triton.jit
def _put(
    out: tl.tensor,
    expert: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    value: tl.tensor,
    ACCUMULATE: tl.constexpr,
) -> None:
    shaped = value.reshape(1, value.shape[0], value.shape[1])
    if ACCUMULATE:
        out.atomic_add([expert, row, column], shaped)
    else:
        out.store([expert, row, column], shaped)

"""Gradients of biases and norm weights: partial sums over rows, then one addition.

A kernel's programs write the sums of fixed runs of rows, in float32; here they are added into
``main_grad`` in a fixed order. No atomics, so a gradient repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from megascale_kernels import partial_sums

_ROWS, _COLUMNS = 64, 32  # a tile of the last pass: one program per run of columns, row by row
_AHEAD = 4  # tiles of the last pass that are in flight at a time
_TILE_ROWS, _TILE_COLUMNS = 32, 64  # a tile of the first pass
_ELEMENTS = 2048  # per program that adds parts of the same shape: 16 per thread of 4 warps
_STEPS = 4  # tiles that a program of the first pass adds up


def add_partial_sums(main_grad: torch.Tensor, partial: torch.Tensor) -> None:
    """``main_grad`` += ``partial``.sum(0); float32 [width] and [parts, width], both contiguous."""
    add_stacked_sums([main_grad], partial[None])


def add_stacked_sums(main_grads: Sequence[torch.Tensor], partial: torch.Tensor) -> None:
    """Each of ``main_grads`` += its sums in ``partial``, in one launch.

    Args:
        main_grads: at most three, float32 [width].
        partial: float32 [len(main_grads), parts, width], contiguous.
    """
    count, parts, width = partial.shape
    targets = [*main_grads, None, None][:3]
    grid = (triton.cdiv(width, _COLUMNS), count)
    _partial_sums_kernel[grid](*targets, partial, parts, width, _ROWS, _COLUMNS, _AHEAD)


def add_column_sums(main_grads: Sequence[torch.Tensor], x: torch.Tensor) -> None:
    """Add the sum over the rows of ``x`` to each of ``main_grads``.

    Args:
        main_grads: float32 [width], the gradients of biases that were added to the same rows.
        x: [..., width], contiguous, float32 or bf16.
    """
    width = x.shape[-1]
    rows = x.numel() // width
    columns = min(_TILE_COLUMNS, triton.next_power_of_2(width))
    across, down = triton.cdiv(width, columns), triton.cdiv(rows, _TILE_ROWS * _STEPS)
    partial = torch.empty(down, width, dtype=torch.float32, device=x.device)
    _column_kernel[(down * across,)](x, partial, rows, width, across, _TILE_ROWS, columns, _STEPS)
    for main_grad in main_grads:
        add_partial_sums(main_grad, partial)


def sum_of_parts(parts: torch.Tensor) -> torch.Tensor:
    """[size, ...] contiguous to [...]: added in float32 in order, rounded once."""
    if parts.shape[0] == 2:  # torch's addition took 16 us where the kernel took 23 (H200, 100 MB)
        return partial_sums.sum_of_parts(parts)
    total, size = torch.empty_like(parts[0]), parts.shape[0]
    count = total.numel()
    _parts_kernel[(triton.cdiv(count, _ELEMENTS),)](parts, total, count, size, _ELEMENTS)
    return total


@triton.jit
def _parts_kernel(
    parts: tl.tensor,
    total: tl.tensor,
    count: tl.tensor,
    SIZE: tl.constexpr,
    ELEMENTS: tl.constexpr,
) -> None:
    """ELEMENTS of the result."""
    at = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    inside = at < count
    found = tl.load(parts + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, SIZE):
        found += tl.load(parts + part * count + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, found.to(total.dtype.element_ty), mask=inside)


@triton.jit
def _column_kernel(
    x: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    across: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """STEPS tiles, one below the other, to row ``below`` of ``partial``."""
    program = tl.program_id(0)
    below = (program // across).to(tl.int64)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < width
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in tl.static_range(STEPS):  # unrolled, so that the loads of all tiles are in flight
        row = (below * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & real[None, :]
        # Tiles are added without a reduction: in each step threads would synchronise for one.
        total += tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(partial + below * width + column, tl.sum(total, axis=0), mask=real)


@triton.jit
def _partial_sums_kernel(
    main_grad: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    partial: tl.tensor,
    parts: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
) -> None:
    """A run of columns over all parts: the order of additions depends on the shape alone.

    The program's second number chooses ``main_grad``, ``second`` or ``third``.
    """
    which = tl.program_id(1)
    # Two conditions each: the first is known at compile time, the second only at run time.
    if second is not None:  # noqa: SIM102
        if which == 1:
            main_grad = second
    if third is not None:  # noqa: SIM102
        if which == 2:
            main_grad = third
    partial += which.to(tl.int64) * parts * width
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < width
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in tl.range(0, parts, ROWS, num_stages=AHEAD):
        row = first + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * width + column[None, :]
        total += tl.load(partial + at, mask=(row[:, None] < parts) & real[None, :], other=0.0)
    found = tl.load(main_grad + column, mask=real, other=0.0) + tl.sum(total, axis=0)
    tl.store(main_grad + column, found, mask=real)

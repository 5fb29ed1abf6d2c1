"""Gradients of biases and norm weights: partial sums over fixed runs of rows, then one addition
into ``main_grad``.

What the programs of a kernel found is added in a fixed order: no atomics, so a gradient repeats bit
for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_ROWS = 64
_COLUMNS = 64
_TILE_ROWS, _TILE_COLUMNS, _STEPS = (
    32,
    64,
    4,
)  # a tile of the first pass, and how many a program adds up


def add_partial_sums(main_grad: torch.Tensor, partial: torch.Tensor) -> None:
    """``main_grad`` += ``partial``.sum(0); float32 [width] and [parts, width], both contiguous."""
    parts, width = partial.shape
    _kernel[(triton.cdiv(width, _COLUMNS),)](main_grad, partial, parts, width, _ROWS, _COLUMNS)


def add_column_sums(main_grads: Sequence[torch.Tensor], x: torch.Tensor) -> None:
    """Each of ``main_grads`` (float32 [width]) += the sum over the rows of ``x`` (contiguous [...,
    width]).
    """
    width = x.shape[-1]
    rows = x.numel() // width
    columns = min(_TILE_COLUMNS, triton.next_power_of_2(width))
    across, down = triton.cdiv(width, columns), triton.cdiv(rows, _TILE_ROWS * _STEPS)
    partial = torch.empty(down, width, dtype=torch.float32, device=x.device)
    _column_kernel[(down * across,)](x, partial, rows, width, across, _TILE_ROWS, columns, _STEPS)
    for main_grad in main_grads:
        add_partial_sums(main_grad, partial)


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
    program = tl.program_id(0)
    below = (program // across).to(tl.int64)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < width
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for step in range(STEPS):
        row = (below * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & real[None, :]
        total += tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(
            tl.float32
        )
    tl.store(partial + below * width + column, tl.sum(total, axis=0), mask=real)


@triton.jit
def _kernel(
    main_grad: tl.tensor,
    partial: tl.tensor,
    parts: tl.tensor,
    width: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < width
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for first in range(0, parts, ROWS):
        row = first + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * width + column[None, :]
        total += tl.load(partial + at, mask=(row[:, None] < parts) & real[None, :], other=0.0)
    found = tl.load(main_grad + column, mask=real, other=0.0) + tl.sum(total, axis=0)
    tl.store(main_grad + column, found, mask=real)

"""The last step of a bias's or a norm weight's gradient: rows of partial sums, added into ``main_grad`` in one kernel.

The programs of a backward kernel sum a fixed run of rows each, and this adds what they found in a fixed order: no
atomics, so the gradient repeats bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 64
_COLUMNS = 64


def add_partial_sums(main_grad: torch.Tensor, partial: torch.Tensor) -> None:
    """``main_grad`` += ``partial``.sum(0); float32 [width] and [parts, width], both contiguous."""
    parts, width = partial.shape
    _kernel[(triton.cdiv(width, _COLUMNS),)](main_grad, partial, parts, width, _ROWS, _COLUMNS)


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

"""Converts a tensor's values between a job's form and a foreign one: order, and float formats.

numpy has no bfloat16, so 16-bit integers carry its bits. Rounding to it is to nearest, ties to
even, as in torch, and thus as the values that a bf16 run computed with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale_checkpoint.export.architectures import Change

Floats = NDArray[np.float32]
# numpy types that carry the bits, by safetensors' names.
CARRIERS = {"F32": "<f4", "BF16": "<u2", "F16": "<f2"}


def to_foreign(values: Floats, change: Change, head_size: int) -> Floats:
    """A job's parameter as the foreign tensor; C order."""
    if change == "transposed":
        return np.ascontiguousarray(values.T)
    if change == "pairs":  # rows (i, i + d/2) of each head become (2 i, 2 i + 1)
        return _swapped(values, (-1, 2, head_size // 2, *values.shape[1:]))
    return values


def to_logical(values: Floats, change: Change, head_size: int) -> Floats:
    """The inverse of :func:`to_foreign`."""
    if change == "pairs":
        return _swapped(values, (-1, head_size // 2, 2, *values.shape[1:]))
    return to_foreign(values, change, head_size)


def narrow(values: Floats, dtype: str) -> memoryview:
    """The bytes of float32 ``values`` in ``dtype``, F32 or BF16; little-endian."""
    flat = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
    carried: NDArray[Any] = flat
    if dtype == "BF16":
        bits = flat.view("<u4")
        # Add half of the cut-off range, and one less before an even result, so that ties go to it.
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        quiet = (bits >> 16) | 0x40  # else a NaN whose set bits are cut off becomes an infinity
        carried = np.where(np.isnan(flat), quiet, rounded).astype("<u2")
    return carried.data.cast("B")


def widen(data: memoryview, dtype: str) -> Floats:
    """Float32 values of ``data`` in ``dtype``, F32, BF16 or F16; 1-D; exact."""
    carried = np.frombuffer(data, CARRIERS[dtype])
    if dtype == "BF16":
        return (carried.astype("<u4") << 16).view("<f4")
    return carried.astype(np.float32, copy=False)


def _swapped(values: Floats, shape: tuple[int, ...]) -> Floats:
    return np.ascontiguousarray(values.reshape(shape).swapaxes(1, 2)).reshape(values.shape)

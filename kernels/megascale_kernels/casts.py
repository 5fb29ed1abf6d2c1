"""Casts to FP8: plain torch, or fused Triton kernels; equal bit for bit.

:mod:`megascale_kernels.quantize` is the reference, :mod:`megascale_kernels.fused.quantize` the
kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megascale_kernels import quantize as plain
from megascale_kernels.quantize import Operand


class Amax(Protocol):
    """The largest magnitude of a tensor, float32 [1]; NaN spreads."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class TensorCast(Protocol):
    """``x`` [rows, columns] under one scale, computed from ``amax``, float32 [1].

    ``out``: memory for the data.
    """

    def __call__(
        self,
        x: torch.Tensor,
        dtype: torch.dtype,
        *,
        amax: torch.Tensor,
        transposed: bool,
        out: torch.Tensor | None = None,
    ) -> Operand: ...


class RowCast(Protocol):
    """``x`` [rows, columns] with one scale for each row, a power of two."""

    def __call__(self, x: torch.Tensor, dtype: torch.dtype, *, transposed: bool) -> Operand: ...


class Transpose(Protocol):
    """:func:`megascale_kernels.quantize.transpose`."""

    def __call__(self, operand: Operand) -> Operand: ...


@dataclass(frozen=True, kw_only=True)
class Casts:
    """One implementation of each cast; all outside autograd."""

    amax: Amax
    tensor: TensorCast
    rows: RowCast
    transpose: Transpose


def casts(kind: Literal["torch", "triton"]) -> Casts:
    """The casts that belong to the operators of this name.

    Raises:
        ImportError: Triton is not installed.
    """
    if kind == "torch":
        return Casts(
            amax=plain.amax_of, tensor=plain.quantize, rows=_plain_rows, transpose=plain.transpose
        )
    from megascale_kernels.fused import quantize as fused

    return Casts(
        amax=fused.amax,
        tensor=fused.quantize,
        rows=fused.quantize_rows,
        transpose=fused.transpose,
    )


def _plain_rows(x: torch.Tensor, dtype: torch.dtype, *, transposed: bool) -> Operand:
    return plain.quantize(x, dtype, per="row", power_of_two=True, transposed=transposed)

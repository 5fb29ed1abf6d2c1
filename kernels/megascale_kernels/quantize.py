"""Matrices in FP8 with their scales, in plain torch: the reference of the fused casts.

A value is stored as value / scale, rounded to nearest and limited to the largest FP8 number;
``scale`` is the factor that restores it. Current scaling computes the scale from the largest
magnitude (amax) of the tensor itself, or of each of its rows: amax / largest FP8 number. Formats
are those of Micikevicius et al., "FP8 formats for deep learning" (arXiv 2209.05433): e4m3 with 3
bits of mantissa up to 448, e5m2 with 2 bits up to 57344.

No function waits for the device. If amax is not finite, the scale is NaN, and so is the result of
each GEMM with it: as in bf16, a broken tensor shows in the loss and in the gradient norm, and
:meth:`Operand.finite` is a flag to count it. Zeros stay zeros: amax counts as at least 2^-100.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SMALLEST_AMAX = 2.0**-100

Per = Literal["tensor", "row"]


@dataclass(frozen=True)
class Factor:
    """One side of a GEMM, whose second dimension is summed over.

    Args:
        data: [rows, depth] in FP8, contiguous along ``depth`` as Hopper's FP8 GEMMs require; or
            bf16, float32.
        scale: float32, [1] of all values or [rows] of each row; None (bf16, float32): the values
            are the data.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Operand:
    """A matrix [rows, columns] in FP8, for GEMMs that sum over its columns, or also over its rows.

    Args:
        data: [rows, columns], contiguous.
        scale: float32 [1], or [rows].
        transposed: [columns, rows], contiguous: the same values a second time. Hopper's FP8 GEMMs
            take no transposed view.
        transposed_scale: float32 [1].
    """

    data: torch.Tensor
    scale: torch.Tensor
    transposed: torch.Tensor | None = None
    transposed_scale: torch.Tensor | None = None

    def over_columns(self) -> Factor:
        """For a sum over the columns: of an input in forward, of an output's gradient in dgrad."""
        return Factor(self.data, self.scale)

    def over_rows(self) -> Factor:
        """For a sum over the rows (tokens, in a weight's gradient).

        Raises:
            ValueError: there is no transposed copy.
        """
        if self.transposed is None or self.transposed_scale is None:
            raise ValueError("a sum over the rows needs the transposed copy of the operand")
        return Factor(self.transposed, self.transposed_scale)

    def finite(self) -> torch.Tensor:
        """Bool scalar on the device: False where the quantised tensor held Inf or NaN."""
        return self.scale.isfinite().all()


def amax_of(x: torch.Tensor, per: Per = "tensor") -> torch.Tensor:
    """The largest magnitude in float32: [1] of ``x``, or [rows] of its rows; NaN spreads."""
    magnitude = x.detach().abs()
    return (magnitude.amax().view(1) if per == "tensor" else magnitude.amax(-1)).float()


def scale_of(amax: torch.Tensor, dtype: torch.dtype, *, power_of_two: bool = False) -> torch.Tensor:
    """The scale under which ``amax`` is the largest number of ``dtype``; float32 of the same shape.

    Args:
        power_of_two: round up to a power of two: up to one bit of range is lost, and scaling itself
            does not round.
    """
    # Multiplied by the reciprocal, as in the fused cast, so that their bits are equal.
    scale = amax.clamp_min(SMALLEST_AMAX) * (1.0 / LARGEST[dtype])
    if power_of_two:
        # Round up to the next exponent unless the mantissa is zero, then clear the mantissa.
        bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
        scale = bits.view(torch.float32)
    return scale + (amax - amax)  # NaN where amax is infinite or NaN


def norm_bound(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """float32 [1]: no value of a norm with these weights and biases [H] is larger.

    A normalised row of width H has no value above sqrt(H). The bound changes as weights do, once a
    step.
    """
    largest = weight.detach().abs().amax().float() * math.sqrt(weight.shape[0])
    if bias is not None:
        largest = largest + bias.detach().abs().amax().float()
    return largest.view(1)


def cast(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` [rows, columns] / ``scale`` ([1] or [rows]) in FP8, limited to its range; NaN stays."""
    largest = LARGEST[dtype]
    scaled = x.detach().float() * (1.0 / scale).view(-1, 1)
    return scaled.clamp(-largest, largest).to(dtype)


def quantize(
    x: torch.Tensor,
    dtype: torch.dtype = E4M3,
    *,
    per: Per = "tensor",
    amax: torch.Tensor | None = None,
    power_of_two: bool = False,
    transposed: bool = False,
    out: torch.Tensor | None = None,
) -> Operand:
    """``x`` as an operand under current scaling.

    Args:
        x: [rows, columns], float32 or bf16.
        per: one scale for the tensor, or one for each row.
        amax: float32 [1], or [rows] per row, if it covers more than ``x`` (a tensor-parallel group,
            earlier steps) or is known already; None: that of ``x``.
        transposed: with a transposed copy (:func:`transpose`).
        out: [rows, columns] in ``dtype``: memory for the data; None: new.
    """
    amax = amax_of(x, per) if amax is None else amax
    scale = scale_of(amax, dtype, power_of_two=power_of_two)
    data = cast(x, scale, dtype)
    operand = Operand(data if out is None else out.copy_(data), scale)
    return transpose(operand) if transposed else operand


def transpose(operand: Operand) -> Operand:
    """``operand`` with a transposed copy of its data.

    The copy has one scale, the largest of the rows' scales. If these are powers of two, it holds
    the same values, except in rows with far smaller scales, which reach the lower end of FP8's
    range. Otherwise values are rounded a second time.
    """
    data, scale = operand.data, operand.scale
    if scale.numel() == 1:
        return replace(operand, transposed=data.t().contiguous(), transposed_scale=scale)
    common = scale.amax().view(1)
    again = cast(data.float() * scale.view(-1, 1), common, data.dtype)
    return replace(operand, transposed=again.t().contiguous(), transposed_scale=common)


def dequantize(factor: Factor) -> torch.Tensor:
    """The values of ``factor`` in float32, [rows, depth]."""
    values = factor.data.float()
    return values if factor.scale is None else values * factor.scale.view(-1, 1)

"""tanh-GELU and SwiGLU with a result in FP8, in one matrix with the attention's result.

A program makes a whole row of the output projection's input, so it knows the row's largest
magnitude before it writes. :func:`activation_operand` writes FP8 with one scale for each row;
:func:`activation_with_amax` writes bf16 and finds the tensor's amax for a second pass. Backward is
that of :mod:`megascale_kernels.fused.activation`, from the input alone.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from megascale_kernels.activation import Activation
from megascale_kernels.fused.activation import _gelu_gate, _sigmoid
from megascale_kernels.fused.amax import magnitude
from megascale_kernels.fused.quantize import largest_of, scale_from, to_fp8
from megascale_kernels.quantize import E4M3, LARGEST, SMALLEST_AMAX, Operand

Form = Literal["rows", "amax"]


def activation_operand(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    beside: torch.Tensor | None = None,
    *,
    power_of_two: bool = True,
    dtype: torch.dtype = E4M3,
) -> Operand:
    """The output projection's input in FP8 with one scale for each row, outside autograd.

    Args:
        x: [rows, width], for swiglu [rows, 2 width], float32 or bf16; rows of a matrix.
        bias: of the last dimension of ``x``, or None.
        beside: [rows, others], rows of a matrix: attention's result, which comes first in a row;
            None: nothing.

    Returns:
        [rows, others + width].
    """
    result, scale = _make(x, bias, activation, beside, dtype, power_of_two=power_of_two)
    return Operand(result, scale)


def activation_with_amax(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    beside: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`activation_operand`'s values in the dtype of ``x``, and their amax, float32 [1]."""
    result, found = _make(x, bias, activation, beside, x.dtype, power_of_two=False)
    return result, largest_of(found)


def _make(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    beside: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    power_of_two: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows in ``dtype``, and of each its scale where that is FP8, else its amax."""
    rows, width = x.shape[0], x.shape[1] // (2 if activation == "swiglu" else 1)
    others = 0 if beside is None else beside.shape[1]
    result = x.new_empty((rows, others + width), dtype=dtype)
    found = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    strides = x.stride(0), 0 if beside is None else beside.stride(0)
    _activation_kernel[(rows,)](
        x,
        bias,
        beside,
        result,
        found,
        width,
        others,
        *strides,
        LARGEST=LARGEST.get(dtype, 1.0),
        SMALLEST=SMALLEST_AMAX,
        POWER_OF_TWO=power_of_two,
        BY_ROW=dtype in LARGEST,
        GATED=activation == "swiglu",
        BLOCK=block,
        OTHERS=triton.next_power_of_2(max(others, 1)),
        num_warps=_warps(block),
    )
    return result, found


def _warps(block: int) -> int:
    # A program holds a whole row: few rows of a wide matrix run at once, so each has many warps.
    return 32 if block > 8192 else max(4, block // 1024)


@triton.jit
def _activation_kernel(
    x: tl.tensor,
    bias: tl.tensor,
    beside: tl.tensor,
    result: tl.tensor,
    found: tl.tensor,
    width: tl.tensor,
    others: tl.tensor,
    x_stride: tl.tensor,
    beside_stride: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BY_ROW: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHERS: tl.constexpr,
) -> None:
    """One row: ``beside``, then the activation; ``found`` gets its scale (BY_ROW), or its amax."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    source = x + row * x_stride + column
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            up += tl.load(bias + width + column, mask=inside, other=0.0).to(tl.float32)
        value = value * _sigmoid(value) * up
    else:
        value = value * _gelu_gate(value)
    if not BY_ROW:  # the amax is of what is written, rounded
        value = value.to(result.dtype.element_ty).to(tl.float32)
    largest = tl.max(magnitude(value), axis=0)
    target = result + row * (others + width)
    if beside is not None:
        left = tl.arange(0, OTHERS)
        first = tl.load(beside + row * beside_stride + left, mask=left < others, other=0.0).to(
            tl.float32
        )
        # One scale for the whole row: the attention's part counts as well.
        largest = tl.maximum(largest, tl.max(magnitude(first), axis=0))
    amax = largest.to(tl.float32, bitcast=True)  # magnitudes were compared as integers
    if BY_ROW:  # the row is still in registers: scaled and cast without a second read
        factor = scale_from(amax, LARGEST, SMALLEST, POWER_OF_TWO)
        tl.store(found + row, factor)
        inverse = tl.div_rn(1.0, factor)
        value = to_fp8(value, inverse, LARGEST, result.dtype.element_ty)
        if beside is not None:
            first = to_fp8(first, inverse, LARGEST, result.dtype.element_ty)
    else:
        tl.store(found + row, amax)
        value = value.to(result.dtype.element_ty)
        if beside is not None:
            first = first.to(result.dtype.element_ty)
    tl.store(target + others + column, value, mask=inside)
    if beside is not None:
        tl.store(target + left, first, mask=left < others)

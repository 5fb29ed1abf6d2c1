"""tanh-GELU and SwiGLU in Triton, with the bias before them, on columns of wider matrices.

:mod:`megascale_kernels.fused.block_inner` reads its columns of the merged GEMM's result and writes
its columns of the next GEMM's input through :func:`write_activation` and :func:`write_gradients`;
:func:`activate` is the operator by itself. Bias gradients are partial sums over fixed runs of rows,
added up in order: no atomics, so they repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megascale_kernels.activation import Activation
from megascale_kernels.fused.amax import amax_slot, higher, note_amax, raise_amax
from megascale_kernels.fused.partial_sums import add_partial_sums
from megascale_kernels.parameter import Parameter
from megascale_kernels.torch_calls import apply

_ROWS, _COLUMNS = 8, 256  # a tile of the forward
# A tile of the backward is narrow, since a thread holds the bias gradient's sums of its columns
# from tile to tile.
_TILE_ROWS, _TILE_COLUMNS = 16, 64
_STEPS = 8  # tiles one below the other that a program sums the bias gradient over


def activate(
    x: torch.Tensor,
    bias: Parameter | None,
    activation: Activation,
    *,
    find_amax: bool = False,
) -> torch.Tensor:
    """Fused :func:`megascale_kernels.activation.activate`, of float32 or bf16.

    For backward it keeps ``x`` alone; the plain operator also keeps silu(gate).

    Args:
        find_amax: note the result's largest magnitude on it, and in backward the gradient's.
    """
    value, main_grad = (None, None) if bias is None else (bias.value, bias.main_grad)
    slot = amax_slot(x.device) if find_amax else None
    y: torch.Tensor = apply(_Activate, x, value, main_grad, activation, slot)
    if slot is not None:
        note_amax(y, slot)
    return y


class _Activate(torch.autograd.Function):
    """x to its activation; the bias's gradient goes to ``bias_grad``, not through autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        bias_grad: torch.Tensor | None,
        activation: Activation,
        slot: torch.Tensor | None,
    ) -> torch.Tensor:
        y = x.new_empty((*x.shape[:-1], x.shape[-1] // (2 if activation == "swiglu" else 1)))
        write_activation(y, x, bias, activation, slot)
        ctx.save_for_backward(x, bias)
        ctx.bias_grad = bias_grad
        ctx.activation = activation
        ctx.find_amax = slot is not None
        return y

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        d_x = torch.empty_like(x)
        slot = amax_slot(x.device) if ctx.find_amax else None
        write_gradients(d_x, ctx.bias_grad, d_y, x, bias, ctx.activation, slot)
        if slot is not None:
            note_amax(d_x, slot)
        return d_x, None, None, None, None


def write_activation(
    y: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    slot: torch.Tensor | None = None,
) -> None:
    """Write the activation of ``x`` + ``bias`` into ``y``.

    Args:
        y: [..., width], columns of a contiguous matrix or a matrix of its own; so is ``x``.
        x: [..., width], for swiglu [..., 2 width].
        bias: of the last dimension of ``x``, or None.
        slot: raised to the largest magnitude of what is written
            (:mod:`megascale_kernels.fused.amax`).
    """
    x_rows, y_rows = _rows(x), _rows(y)
    rows, width = y_rows.shape
    columns = min(_COLUMNS, triton.next_power_of_2(width))
    across = triton.cdiv(width, columns)
    # One dimension of programs: the second of a CUDA grid ends at 65535.
    _activation_kernel[(triton.cdiv(rows, _ROWS) * across,)](
        x=x_rows,
        bias=bias,
        y=y_rows,
        slot=slot,
        rows=rows,
        width=width,
        across=across,
        x_stride=x_rows.stride(0),
        y_stride=y_rows.stride(0),
        GATED=activation == "swiglu",
        ROWS=_ROWS,
        COLUMNS=columns,
    )


def write_gradients(
    d_x: torch.Tensor,
    bias_grad: torch.Tensor | None,
    d_y: torch.Tensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation,
    slot: torch.Tensor | None = None,
) -> None:
    """Write the gradient of ``x`` into ``d_x`` and add that of the bias to ``bias_grad``.

    Shapes and strides are those of :func:`write_activation`.

    Args:
        d_x, d_y: like ``x`` and ``y`` there.
        bias_grad: float32, as wide as ``x``; None: no bias.
        slot: as there.
    """
    x_rows, d_x_rows, d_y_rows = _rows(x), _rows(d_x), _rows(d_y)
    rows, width = d_y_rows.shape
    columns = min(_TILE_COLUMNS, triton.next_power_of_2(width))
    across, down = triton.cdiv(width, columns), triton.cdiv(rows, _TILE_ROWS * _STEPS)
    partial = None
    if bias_grad is not None:
        partial = torch.empty(down, x_rows.shape[1], dtype=torch.float32, device=x.device)
    _activation_backward_kernel[(down * across,)](
        d_y=d_y_rows,
        x=x_rows,
        bias=bias,
        d_x=d_x_rows,
        partial=partial,
        slot=slot,
        rows=rows,
        width=width,
        across=across,
        d_y_stride=d_y_rows.stride(0),
        x_stride=x_rows.stride(0),
        d_x_stride=d_x_rows.stride(0),
        partial_stride=x_rows.shape[1],
        GATED=activation == "swiglu",
        ROWS=_TILE_ROWS,
        COLUMNS=columns,
        STEPS=_STEPS,
    )
    if bias_grad is not None and partial is not None:
        add_partial_sums(bias_grad, partial)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., width] as [rows, width] without a copy; columns of a matrix keep its row stride."""
    rows = x.flatten(0, -2) if x.dim() > 2 else x
    # flatten copies what it cannot view, and a kernel would write into the copy.
    assert rows.stride(-1) == 1 and rows.data_ptr() == x.data_ptr(), (
        "not columns of a contiguous matrix"
    )
    return rows


@triton.jit
def _gelu_gate(x: tl.tensor) -> tl.tensor:
    """0.5 (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3); GELU is x times this.

    It is sigmoid(2 u) = 1 / (1 + 2^(-2 u log2(e))): one exponential instead of a tanh.
    """
    return 1.0 / (1.0 + tl.exp2(x * (-2.3022081985 - 0.1029432396 * (x * x))))


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    """1 / (1 + 2^(-x log2(e))): fewer instructions than tl.sigmoid.

    Instructions count: arithmetic limits these kernels almost as much as memory does.
    """
    return 1.0 / (1.0 + tl.exp2(-1.4426950409 * x))


@triton.jit
def _activation_kernel(
    x: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    slot: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    across: tl.tensor,
    x_stride: tl.tensor,
    y_stride: tl.tensor,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """One tile [ROWS, COLUMNS] of ``y``; GATED: up is ``width`` columns right of gate in ``x``."""
    program = tl.program_id(0)
    row = (program // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    source = x + row[:, None] * x_stride + column[None, :]
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        value += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            up += tl.load(bias + width + column, mask=column < width, other=0.0).to(tl.float32)[
                None, :
            ]
        result = value * _sigmoid(value) * up
    else:
        result = value * _gelu_gate(value)
    result = result.to(y.dtype.element_ty)
    tl.store(y + row[:, None] * y_stride + column[None, :], result, mask=inside)
    if slot is not None:
        raise_amax(slot, higher(tl.zeros([ROWS, COLUMNS], dtype=tl.int32), result, inside))


@triton.jit
def _activation_backward_kernel(
    d_y: tl.tensor,
    x: tl.tensor,
    bias: tl.tensor,
    d_x: tl.tensor,
    partial: tl.tensor,
    slot: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    across: tl.tensor,
    d_y_stride: tl.tensor,
    x_stride: tl.tensor,
    d_x_stride: tl.tensor,
    partial_stride: tl.tensor,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEPS: tl.constexpr,
) -> None:
    """STEPS tiles, one below the other; ``partial`` (None: no bias) gets sums over their rows."""
    # Tiles one below the other: a program's sums then end in one row of ``partial``.
    program = tl.program_id(0)
    below = (program // across).to(tl.int64)
    column = (program % across) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < width
    # A tile is only reduced over its rows after the last step: a reduction in each step would make
    # the threads synchronise there.
    bias_sum = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    up_sum = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    largest = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
    for step in range(STEPS):
        row = (below * STEPS + step) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < rows) & real[None, :]
        source = x + row[:, None] * x_stride + column[None, :]
        target = d_x + row[:, None] * d_x_stride + column[None, :]
        gradient = tl.load(
            d_y + row[:, None] * d_y_stride + column[None, :], mask=inside, other=0.0
        ).to(tl.float32)
        value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
        if bias is not None:
            value += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
        if GATED:
            up = tl.load(source + width, mask=inside, other=0.0).to(tl.float32)
            if bias is not None:
                up += tl.load(bias + width + column, mask=real, other=0.0).to(tl.float32)[None, :]
            # silu(g) is g * share, and its derivative share * (1 + g * (1 - share)).
            share = _sigmoid(value)
            d_up = gradient * value * share
            result = gradient * up * share * (1.0 + value * (1.0 - share))
            rounded = d_up.to(d_x.dtype.element_ty)
            tl.store(target + width, rounded, mask=inside)
            up_sum += d_up
            if slot is not None:
                largest = higher(largest, rounded, inside)
        else:
            # slope is d(2 u)/dx: sigmoid(2 u) has the derivative share * (1 - share) * slope.
            share = _gelu_gate(value)
            slope = 1.5957691216057308 + 0.2140644488 * (value * value)
            result = gradient * share * (1.0 + value * (1.0 - share) * slope)
        rounded = result.to(d_x.dtype.element_ty)
        tl.store(target, rounded, mask=inside)
        # The bias gradient adds the exact values, not the rounded ones that were stored.
        bias_sum += result
        if slot is not None:
            largest = higher(largest, rounded, inside)
    if slot is not None:
        raise_amax(slot, largest)
    if partial is not None:
        tl.store(partial + below * partial_stride + column, tl.sum(bias_sum, axis=0), mask=real)
        if GATED:
            tl.store(
                partial + below * partial_stride + width + column, tl.sum(up_sum, axis=0), mask=real
            )

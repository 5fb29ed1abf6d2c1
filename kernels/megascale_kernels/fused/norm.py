"""LayerNorm and RMSNorm in Triton, after the residual addition, in one pass in each direction.

Weight and bias gradients are summed without atomics: each program of the backward sums a fixed run
of rows, and one reduction adds those partial sums in order. So they repeat bit for bit. There are
only as many programs as the device runs at once, because each writes a float32 row of partial sums
for each such gradient. A program copies its next rows to shared memory while it computes one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from megascale_kernels.fused.amax import amax_slot, magnitude, note_amax, raise_amax
from megascale_kernels.fused.partial_sums import add_column_sums, add_stacked_sums
from megascale_kernels.fused.residual import total_value
from megascale_kernels.norm import Kind
from megascale_kernels.parameter import Parameter
from megascale_kernels.torch_calls import apply

_MULTIPROCESSORS = 132  # of a Hopper GPU
# For rows up to this width, their sums and the values of one row fit the registers together.
_KEPT_WIDTH = 8192
_REGISTERS = 128  # per thread: 16 warps of programs share the 65536 of a multiprocessor
# Two rows are copied ahead up to this size, and one above it: of three tensors, at most 96 KiB.
_AHEAD_BYTES = 16384


@dataclass(frozen=True)
class NormCall:
    """The arguments of a norm that autograd does not track.

    For :func:`norm` and :class:`megascale_kernels.fused.norm_operand.NormInFp8`.

    Args:
        centred: the mean is subtracted (layernorm).
        epsilon: see :func:`norm`.
        weight_grad, bias_grad, shift_grads: ``main_grad`` of the parameters, float32 [H]; the
            backward adds into them.
        find_amax: backward notes its result's largest magnitude on it
            (:mod:`megascale_kernels.fused.amax`).
    """

    centred: bool
    epsilon: float
    weight_grad: torch.Tensor
    bias_grad: torch.Tensor | None
    shift_grads: Sequence[torch.Tensor]
    find_amax: bool = False


def norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: Parameter,
    bias: Parameter | None,
    kind: Kind,
    epsilon: float,
    added: Sequence[Parameter] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fused :func:`megascale_kernels.norm.norm`, of float32 or bf16."""
    if added and residual is None:
        raise ValueError("biases are added together with a residual, and there is none")
    value, bias_grad = (None, None) if bias is None else (bias.value, bias.main_grad)
    shift = total_value(added) if added else None
    shift_grads = [one.main_grad for one in added]
    call = NormCall(kind == "layernorm", epsilon, weight.main_grad, bias_grad, shift_grads)
    stream, normed = apply(_Norm, x, residual, weight.value, value, shift, call)
    return stream, normed


class _Norm(torch.autograd.Function):
    """(x, residual, parameters) to (stream, norm); parameters' gradients go to ``main_grad``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shift: torch.Tensor | None,
        call: NormCall,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, width = x.contiguous(), x.shape[-1]
        rows = x.numel() // width
        stream = x.view_as(x)
        if residual is not None:
            residual, stream = residual.contiguous(), torch.empty_like(x)
        normed = torch.empty_like(x)
        scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        mean = torch.empty_like(scale) if call.centred else None
        block = triton.next_power_of_2(width)
        # Arguments by position, because Triton has an option with the name of the stream.
        _norm_forward_kernel[(rows,)](
            x,
            residual,
            shift,
            weight,
            bias,
            stream,
            normed=normed,
            mean=mean,
            scale=scale,
            width=width,
            epsilon=call.epsilon,
            BLOCK=block,
            num_warps=_warps(block),
        )
        # Backward keeps the stream and not the norm, which it computes again from the stream and
        # two numbers per row.
        ctx.save_for_backward(x if residual is None else stream, weight, mean, scale)
        ctx.call = call
        ctx.added = residual is not None
        # After the last norm the stream is not used: its gradient stays None instead of zeros.
        ctx.set_materialize_grads(False)
        return stream, normed

    @staticmethod
    def backward(
        ctx: Any, d_stream: torch.Tensor | None, d_normed: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return *norm_gradients(ctx, d_stream, d_normed), None, None, None, None


def norm_gradients(
    ctx: Any, d_stream: torch.Tensor | None, d_normed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of x and of the residual; those of the parameters go to ``main_grad``.

    Args:
        ctx: with ``call``, ``added``, and (stream, weight, mean, 1 / deviation) saved.
        d_stream, d_normed: like x; ``d_stream`` is None if the stream was not used.
    """
    x, weight, mean, scale = ctx.saved_tensors
    call: NormCall = ctx.call
    slot = amax_slot(x.device) if call.find_amax else None
    rows, width = scale.numel(), x.shape[-1]
    block = triton.next_power_of_2(width)
    kept = block <= _KEPT_WIDTH
    each = triton.cdiv(rows, _MULTIPROCESSORS * max(1, min(4, _KEPT_WIDTH // block)))
    programs = triton.cdiv(rows, each)
    stages = 3 if block * x.element_size() <= _AHEAD_BYTES else 2
    sums = [call.weight_grad]
    if call.bias_grad is not None:
        sums.append(call.bias_grad)
    if call.shift_grads and kept:
        sums.append(call.shift_grads[0])
    partial = torch.empty(len(sums), programs, width, dtype=torch.float32, device=x.device)
    d_x = torch.empty_like(x)
    _norm_backward_kernel[(programs,)](
        d_normed=d_normed.contiguous(),
        d_stream=None if d_stream is None else d_stream.contiguous(),
        x=x,
        weight=weight,
        mean=mean,
        scale=scale,
        d_x=d_x,
        d_weight=partial[0],
        d_bias=None if call.bias_grad is None else partial[1],
        d_shift=partial[-1] if call.shift_grads and kept else None,
        slot=slot,
        rows=rows,
        width=width,
        each=each,
        KEPT=kept,
        STAGES=stages if kept else 1,
        BLOCK=block,
        num_warps=_warps(block),
        maxnreg=_REGISTERS if kept else None,
    )
    add_stacked_sums(sums, partial)
    if kept:
        # Several biases were added to the same rows, so they have the same gradient.
        for main_grad in call.shift_grads[1:]:
            add_stacked_sums([main_grad], partial[-1:])
    elif call.shift_grads:
        add_column_sums(call.shift_grads, d_x)
    if slot is not None:
        note_amax(d_x, slot)
    # x and the residual were added, so they have the same gradient.
    return d_x, d_x if ctx.added else None


def _warps(block: int) -> int:
    return max(4, min(16, block // 512))


@triton.jit
def _norm_forward_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    shift: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    stream: tl.tensor,
    normed: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One row, [width] and contiguous.

    ``mean`` None: root mean square. ``residual``, ``shift`` None: nothing is added.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        if shift is not None:
            value += tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
        kept = value.to(stream.dtype.element_ty)
        tl.store(stream + at, kept, mask=inside)
        # The norm reads the rounded stream, because backward and the next layer read that one.
        value = kept.to(tl.float32)
    if mean is not None:
        average = tl.sum(value, axis=0) / width
        tl.store(mean + row, average)
        value = tl.where(inside, value - average, 0.0)  # padding would count in the variance
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + epsilon)
    tl.store(scale + row, inverse)
    result = value * inverse * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _loaded(at: tl.tensor, inside: tl.tensor, POLICY: tl.constexpr) -> tl.tensor:
    return tl.load(at, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)


@triton.jit
def _row_gradients(
    d_normed: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    factor: tl.tensor,
    inside: tl.tensor,
    average: tl.tensor,
    inverse: tl.tensor,
    width: tl.tensor,
    CENTRED: tl.constexpr,
    KEPT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """For one row: the gradient of its input, its norm before the weight, and d_normed.

    The first three arguments are addresses of the row. ``factor``: the weight, if KEPT; otherwise
    it is read here, twice, as the row is.
    """
    value = _loaded(x, inside, "evict_last")
    value = (value - average) * inverse
    gradient = _loaded(d_normed, inside, "evict_last")
    if not KEPT:
        factor = tl.load(weight, mask=inside, other=0.0)
    weighted = gradient * factor.to(tl.float32)
    # With n the norm before its weight and g = d_normed * weight:
    # d_x = (g - n mean(g n) - mean(g)) / deviation; mean(g) is part of layernorm alone.
    slope = tl.sum(weighted * value, axis=0) / width
    shift = 0.0
    if CENTRED:
        shift = tl.sum(weighted, axis=0) / width
    # The sums of a wide row fill the registers, so its values are read a second time. The first
    # reads asked the cache to keep them; these are the last.
    if not KEPT:
        value = (_loaded(x, inside, "evict_first") - average) * inverse
        gradient = _loaded(d_normed, inside, "evict_first")
        weighted = gradient * _loaded(weight, inside, "evict_last")
    return (weighted - value * slope - shift) * inverse, value, gradient


@triton.jit
def _statistics(mean: tl.tensor, scale: tl.tensor, row: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    average = 0.0
    if mean is not None:
        average = tl.load(mean + row)
    return average, tl.load(scale + row)


@triton.jit
def _larger(largest: tl.tensor, x: tl.tensor, inside: tl.tensor, GROUP: tl.constexpr) -> tl.tensor:
    """The larger of ``largest`` and the magnitudes of ``x``, one for each GROUP of columns."""
    found = tl.where(inside, magnitude(x.to(tl.float32)), 0)
    groups: tl.constexpr = x.shape[0] // GROUP
    return tl.maximum(largest, tl.max(tl.reshape(found, [groups, GROUP]), axis=1))


@triton.jit
def _store_sum(sums: tl.tensor, at: tl.tensor, found: tl.tensor, inside: tl.tensor) -> None:
    if sums is not None:
        tl.store(sums + at, found, mask=inside)


@triton.jit
def _norm_backward_kernel(
    d_normed: tl.tensor,
    d_stream: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    mean: tl.tensor,
    scale: tl.tensor,
    d_x: tl.tensor,
    d_weight: tl.tensor,
    d_bias: tl.tensor,
    d_shift: tl.tensor,
    slot: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    each: tl.tensor,
    KEPT: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """``each`` rows in turn; their sums go to row ``program`` of ``d_weight`` and the others.

    KEPT: a row stays in registers; otherwise it is read again, from the cache.
    """
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight_sum = tl.zeros([BLOCK], dtype=tl.float32)
    bias_sum = tl.zeros([BLOCK], dtype=tl.float32)
    shift_sum = tl.zeros([BLOCK], dtype=tl.float32)
    if slot is not None:
        # One maximum per 8 columns, which one thread holds: no thread waits for another.
        group: tl.constexpr = 8 if KEPT else BLOCK
        largest = tl.zeros([BLOCK // group], dtype=tl.int32)
    first = program * each
    end = tl.minimum(first + each, rows)
    average, inverse = _statistics(mean, scale, first)
    weight_at, factor = weight + column, 0.0
    CENTRED: tl.constexpr = mean is not None
    if KEPT:
        factor = tl.load(weight_at, mask=inside, other=0.0)
    for row in tl.range(first, end, num_stages=STAGES):
        at = row * width + column
        # The statistics of the next row: nothing waits for these loads before that row.
        following = _statistics(mean, scale, tl.minimum(row + 1, end - 1))
        # Loaded together with the other tensors: after the sums of the row it would come late.
        if d_stream is not None:
            straight = tl.load(d_stream + at, mask=inside, other=0.0)
        result, value, gradient = _row_gradients(
            d_normed + at, x + at, weight_at, factor, inside, average, inverse, width, CENTRED, KEPT
        )
        weight_sum += gradient * value
        if d_bias is not None:
            bias_sum += gradient
        if d_stream is not None:
            result += straight.to(tl.float32)
        result = result.to(d_x.dtype.element_ty)
        tl.store(d_x + at, result, mask=inside)
        # The biases' gradient sums what the next node reads, the rounded gradient.
        if d_shift is not None:
            shift_sum += result.to(tl.float32)
        if slot is not None:
            largest = _larger(largest, result, inside, group)
        average, inverse = following
    at = program * width + column
    _store_sum(d_weight, at, weight_sum, inside)
    _store_sum(d_bias, at, bias_sum, inside)
    _store_sum(d_shift, at, shift_sum, inside)
    if slot is not None:
        raise_amax(slot, largest)

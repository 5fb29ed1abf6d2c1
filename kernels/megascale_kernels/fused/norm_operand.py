"""LayerNorm and RMSNorm with the residual addition, whose result leaves the kernel in FP8.

A program has a whole row, so it has the row's largest magnitude before it writes:

- ``rows``: FP8 with one scale for each row, no other pass over the tensor;
- ``given``: FP8 under one scale from before. No row exceeds
  :func:`megascale_kernels.quantize.norm_bound`, since a normalised row of width H has no value
  above sqrt(H): no pass, and no amax for a tensor-parallel group to agree on;
- ``amax``: bf16 and the tensor's amax, for current scaling of the tensor in a second pass.

Backward needs no FP8: it is that of :mod:`megascale_kernels.fused.norm`, from the stream and the
rows' statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from megascale_kernels.fp8_activation import Fp8Activation, OwnPart, stand_in
from megascale_kernels.fused.amax import magnitude
from megascale_kernels.fused.norm import NormCall, norm_gradients
from megascale_kernels.fused.quantize import largest_of, scale_from, to_fp8
from megascale_kernels.fused.residual import total_value
from megascale_kernels.norm import Kind
from megascale_kernels.parameter import Parameter
from megascale_kernels.quantize import E4M3, LARGEST, SMALLEST_AMAX, Operand
from megascale_kernels.torch_calls import apply

Form = Literal["rows", "given", "amax"]


@dataclass(frozen=True)
class NormCast:
    """How a norm's result leaves its kernel.

    Args:
        form: see the module.
        scale: float32 [1], of the form ``given`` alone; values beyond it are limited to FP8's
            largest.
        power_of_two: scales of rows are rounded up to powers of two.
        dtype: which FP8; without effect in the form ``amax``.
        out: [rows, H], memory for the result; None: new.

    Raises:
        ValueError: the form ``given`` without a scale, or another form with one.
    """

    form: Form
    scale: torch.Tensor | None = None
    power_of_two: bool = True
    dtype: torch.dtype = E4M3
    out: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.form == "given") != (self.scale is not None):
            raise ValueError("the form given takes a scale, and no other form does")


@dataclass(frozen=True)
class Normed:
    """What the forward of a norm leaves.

    Args:
        stream: [rows, H], ``x`` + biases + residual; ``x`` itself without a residual.
        operand: [rows, H] in FP8; None in the form ``amax``.
        normed, amax: [rows, H] in the dtype of ``x`` and float32 [1], in the form ``amax``; else
            None.
        mean, inverse: float32 [rows], what backward needs: the mean (None: root mean square) and 1
            / deviation.
    """

    stream: torch.Tensor
    operand: Operand | None
    normed: torch.Tensor | None
    amax: torch.Tensor | None
    mean: torch.Tensor | None
    inverse: torch.Tensor


def norm_operand(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    shift: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: Kind,
    epsilon: float,
    cast: NormCast,
) -> Normed:
    """The norm of ``x`` + ``shift`` + ``residual``, outside autograd.

    Args:
        x, residual: [rows, H], contiguous, float32 or bf16.
        shift: [H], added with the residual (biases of the projection before); None without.
        weight, bias: [H].
    """
    rows, width = x.shape
    stream = x if residual is None else torch.empty_like(x)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(inverse) if kind == "layernorm" else None
    result = cast.out
    if result is None:
        result = torch.empty_like(x, dtype=x.dtype if cast.form == "amax" else cast.dtype)
    found = None if cast.form == "given" else torch.empty_like(inverse)
    block = triton.next_power_of_2(width)
    # By place to the stream: Triton has an option of that name.
    _norm_kernel[(rows,)](
        x,
        residual,
        shift,
        weight,
        bias,
        stream,
        normed=result,
        mean=mean,
        inverse=inverse,
        found=found,
        scale=cast.scale,
        width=width,
        epsilon=epsilon,
        LARGEST=LARGEST[cast.dtype],
        SMALLEST=SMALLEST_AMAX,
        POWER_OF_TWO=cast.power_of_two,
        BY_ROW=cast.form == "rows",
        BLOCK=block,
        num_warps=_warps(block),
        # Of 65536 for two programs of a wide row: one loads, one computes.
        maxnreg=128 if block > 8192 else None,
    )
    if cast.form == "amax":
        assert found is not None
        return Normed(stream, None, result, largest_of(found), mean, inverse)
    factor = found if cast.scale is None else cast.scale
    assert factor is not None
    return Normed(stream, Operand(result, factor), None, None, mean, inverse)


@dataclass(frozen=True)
class NormInFp8:
    """:func:`megascale_kernels.fused.norm.norm` with its second result in FP8.

    Args:
        scale: float32 [1], of the result.
        own_part: makes the memory for it.
    """

    scale: torch.Tensor
    own_part: OwnPart

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: Parameter,
        bias: Parameter | None,
        kind: Kind,
        epsilon: float,
        added: Sequence[Parameter] = (),
    ) -> tuple[torch.Tensor, Fp8Activation]:
        """The stream, and its norm in FP8."""
        value, bias_grad = (None, None) if bias is None else (bias.value, bias.main_grad)
        shift = total_value(added) if added else None
        shift_grads = [one.main_grad for one in added]
        call = NormCall(
            kind == "layernorm", epsilon, weight.main_grad, bias_grad, shift_grads, find_amax=True
        )
        kept: list[Operand] = []
        stream, standing = apply(
            _NormInFp8, x, residual, weight.value, value, shift, call, self, kept
        )
        return stream, Fp8Activation(standing, kept[0])


class _NormInFp8(torch.autograd.Function):
    """(x, residual, parameters) to (stream, what stands for the norm)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shift: torch.Tensor | None,
        call: NormCall,
        target: NormInFp8,
        kept: list[Operand],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous()  # backward reads it as rows, too
        rows = x.view(-1, x.shape[-1])
        other = None if residual is None else residual.contiguous().view_as(rows)
        kind: Kind = "layernorm" if call.centred else "rmsnorm"
        cast = NormCast("given", target.scale, out=target.own_part(rows, E4M3))
        found = norm_operand(rows, other, shift, weight, bias, kind, call.epsilon, cast)
        assert found.operand is not None
        kept.append(found.operand)
        stream = found.stream.view(x.shape)
        ctx.save_for_backward(x if residual is None else stream, weight, found.mean, found.inverse)
        ctx.call = call
        ctx.added = residual is not None
        ctx.set_materialize_grads(False)
        return stream, stand_in(x.shape, x)

    @staticmethod
    def backward(
        ctx: Any, d_stream: torch.Tensor | None, d_standing: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return *norm_gradients(ctx, d_stream, d_standing), *(None for _ in range(6))


def _warps(block: int) -> int:
    return 8 if block > 8192 else max(4, min(16, block // 512))


@triton.jit
def _norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    shift: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    stream: tl.tensor,
    normed: tl.tensor,
    mean: tl.tensor,
    inverse: tl.tensor,
    found: tl.tensor,
    scale: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
    BY_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row. Without a ``scale`` ``found`` gets the row's scale (BY_ROW) or its amax."""
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
        value = kept.to(tl.float32)  # of the rounded stream, which backward reads
    if mean is not None:
        average = tl.sum(value, axis=0) / width
        tl.store(mean + row, average)
        value = tl.where(inside, value - average, 0.0)  # padding would count in the variance
    share = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + epsilon)
    tl.store(inverse + row, share)
    result = value * share * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    if scale is not None:  # no reduction over the row stands between the norm and its store
        result = to_fp8(result, tl.div_rn(1.0, tl.load(scale)), LARGEST, normed.dtype.element_ty)
    elif BY_ROW:  # NaN and infinity are the largest integers: they break the row's scale
        amax = tl.max(magnitude(result), axis=0).to(tl.float32, bitcast=True)
        factor = scale_from(amax, LARGEST, SMALLEST, POWER_OF_TWO)
        tl.store(found + row, factor)
        result = to_fp8(result, tl.div_rn(1.0, factor), LARGEST, normed.dtype.element_ty)
    else:
        result = result.to(normed.dtype.element_ty)  # the amax of what is written
        tl.store(
            found + row,
            tl.max(magnitude(result.to(tl.float32)), axis=0).to(tl.float32, bitcast=True),
        )
    tl.store(normed + at, result, mask=inside)

"""LayerNorm and RMSNorm with the residual addition, with results written in FP8.

The scale is known before: no row exceeds :func:`megascale_kernels.quantize.norm_bound`, since a
normalised row of width H has no value above sqrt(H). So the cast needs no other pass and no amax on
which a tensor-parallel group would have to agree.

Backward needs no FP8: it is that of :mod:`megascale_kernels.fused.norm`, from the stream and the
rows' statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from megascale_kernels.fp8_activation import Fp8Activation, OwnPart, make_placeholder
from megascale_kernels.fused.norm import NormCall, norm_gradients
from megascale_kernels.fused.quantize import to_fp8
from megascale_kernels.fused.residual import total_value
from megascale_kernels.norm import Kind
from megascale_kernels.parameter import Parameter
from megascale_kernels.quantize import E4M3, LARGEST, Operand
from megascale_kernels.torch_calls import apply


@dataclass(frozen=True)
class Normed:
    """The results of a norm's forward.

    Args:
        stream: [rows, H], ``x`` + biases + residual; ``x`` itself without a residual.
        operand: [rows, H] in FP8.
        mean, inverse: float32 [rows], for backward: the mean (None: root mean square), and
            1 / deviation.
    """

    stream: torch.Tensor
    operand: Operand
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
    scale: torch.Tensor,
    out: torch.Tensor,
) -> Normed:
    """The norm of ``x`` + ``shift`` + ``residual``, outside autograd.

    Args:
        x, residual: [rows, H], contiguous, float32 or bf16.
        shift: [H], added with the residual (biases of the projection before); None without.
        weight, bias: [H].
        scale: float32 [1]; larger values are limited to the largest of FP8.
        out: [rows, H] in FP8, memory for the result.
    """
    rows, width = x.shape
    stream = x if residual is None else torch.empty_like(x)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    mean = torch.empty_like(inverse) if kind == "layernorm" else None
    block = triton.next_power_of_2(width)
    # Arguments by position, because Triton has an option with the name of the stream.
    _norm_kernel[(rows,)](
        x,
        residual,
        shift,
        weight,
        bias,
        stream,
        normed=out,
        mean=mean,
        inverse=inverse,
        scale=scale,
        width=width,
        epsilon=epsilon,
        LARGEST=LARGEST[out.dtype],
        BLOCK=block,
        num_warps=_warps(block),
        # The 65536 registers of a multiprocessor are enough for two programs of a wide row: one
        # loads while the other computes.
        maxnreg=128 if block > 8192 else None,
    )
    return Normed(stream, Operand(out, scale), mean, inverse)


@dataclass(frozen=True)
class NormInFp8:
    """:func:`megascale_kernels.fused.norm.norm` with its second result in FP8.

    Args:
        scale: float32 [1], the scale of the result.
        own_part: makes the memory for the result.
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
        stream, placeholder = apply(
            _NormInFp8, x, residual, weight.value, value, shift, call, self, kept
        )
        return stream, Fp8Activation(placeholder, kept[0])


class _NormInFp8(torch.autograd.Function):
    """(x, residual, parameters) to (stream, the placeholder of the norm)."""

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
        x = x.contiguous()  # backward reads it as rows, as the kernel does
        rows = x.view(-1, x.shape[-1])
        other = None if residual is None else residual.contiguous().view_as(rows)
        kind: Kind = "layernorm" if call.centred else "rmsnorm"
        out = target.own_part(rows, E4M3)
        found = norm_operand(
            rows, other, shift, weight, bias, kind, call.epsilon, target.scale, out
        )
        kept.append(found.operand)
        stream = found.stream.view(x.shape)
        ctx.save_for_backward(x if residual is None else stream, weight, found.mean, found.inverse)
        ctx.call = call
        ctx.added = residual is not None
        ctx.set_materialize_grads(False)
        return stream, make_placeholder(x.shape, x)

    @staticmethod
    def backward(
        ctx: Any, d_stream: torch.Tensor | None, d_placeholder: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        return *norm_gradients(ctx, d_stream, d_placeholder), *(None for _ in range(6))


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
    scale: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One row; it is stored in FP8 without a further reduction over it."""
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
        value = kept.to(tl.float32)  # the norm of the rounded stream, which backward reads
    if mean is not None:
        average = tl.sum(value, axis=0) / width
        tl.store(mean + row, average)
        value = tl.where(inside, value - average, 0.0)  # padding would count in the variance
    share = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / width + epsilon)
    tl.store(inverse + row, share)
    result = value * share * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        result += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    result = to_fp8(result, tl.div_rn(1.0, tl.load(scale)), LARGEST, normed.dtype.element_ty)
    tl.store(normed + at, result, mask=inside)

"""The operators of a layer whose linear layers multiply in FP8: their inputs leave in FP8.

The norm's result is in e4m3 under the scale that bounds it
(:func:`megascale_kernels.quantize.norm_bound`), which is the same on all ranks of a tensor-parallel
group. The output projection's input is in e4m3 under this rank's own scale, with the transposed
copy that the weight's gradient needs: it is all that is kept of it for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megascale_kernels import norm as plain_norm
from megascale_kernels.activation import Activation
from megascale_kernels.block_inner import AttentionContext
from megascale_kernels.casts import Casts
from megascale_kernels.fp8_activation import Fp8Activation, OwnPart, in_fp8
from megascale_kernels.operators import LayerOperators, Operators
from megascale_kernels.parameter import Parameter
from megascale_kernels.quantize import E4M3, Operand, cast

# The scale of a norm's result, float32 [1], from its weight and bias.
NormScale = Callable[[Parameter, Parameter | None], torch.Tensor]


def fp8_operators(
    operators: Operators, casts: Casts, norm_scale: NormScale, own_part: OwnPart
) -> LayerOperators[Fp8Activation]:
    """``operators`` with results in FP8 where a linear layer reads them."""
    made = _Fp8Operators(operators, casts, norm_scale, own_part)
    return LayerOperators(
        norm=made.norm, add=operators.add, block_inner=made.block_inner, activate=made.activate
    )


class _Fp8Operators:
    def __init__(
        self, operators: Operators, casts: Casts, norm_scale: NormScale, own_part: OwnPart
    ) -> None:
        self._operators = operators
        self._casts = casts
        self._norm_scale = norm_scale
        self._own_part = own_part

    def norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: Parameter,
        bias: Parameter | None,
        kind: plain_norm.Kind,
        epsilon: float,
        added: Sequence[Parameter] = (),
    ) -> tuple[torch.Tensor, Fp8Activation]:
        """:func:`megascale_kernels.norm.norm` with its second result in FP8."""
        scale = self._norm_scale(weight, bias)
        if self._operators.name == "triton":
            from megascale_kernels.fused.norm_operand import NormInFp8

            fused = NormInFp8(scale, self._own_part)
            return fused(x, residual, weight, bias, kind, epsilon, added)
        stream, normed = self._operators.norm(x, residual, weight, bias, kind, epsilon, added)
        return stream, in_fp8(normed, lambda x: Operand(cast(x.flatten(0, -2), scale, E4M3), scale))

    def block_inner(
        self,
        inputs: torch.Tensor,
        bias: Parameter | None,
        context: AttentionContext,
        activation: Activation | None,
    ) -> Fp8Activation:
        """:func:`megascale_kernels.block_inner.block_inner` in FP8."""
        if self._operators.name == "triton":
            from megascale_kernels.fused.block_inner import block_inner

            inner = block_inner(inputs, bias, context, activation, find_amax=True)
        else:
            inner = self._operators.block_inner(inputs, bias, context, activation)
        return in_fp8(inner, self._with_transposed)

    def activate(
        self, x: torch.Tensor, bias: Parameter | None, activation: Activation
    ) -> Fp8Activation:
        """:func:`megascale_kernels.activation.activate` in FP8."""
        if self._operators.name == "triton":
            from megascale_kernels.fused.activation import activate

            y = activate(x, bias, activation, find_amax=True)
        else:
            y = self._operators.activate(x, bias, activation)
        return in_fp8(y, self._with_transposed)

    def _with_transposed(self, x: torch.Tensor) -> Operand:
        amax = self._casts.amax(x)
        return self._casts.tensor(x.flatten(0, -2), E4M3, amax=amax, transposed=True)

"""The experts' products in FP8: no cast is a pass of its own, none is made per expert.

Rows are cast on their way to the experts, and again in the activation, each under a scale of its
own. A weight is cast once per update, with one scale per column of its product. Weight gradients
read transposed copies, in which the rows of an expert share a scale. The router and the shared
experts stay in the model's dtype.

The second product is summed like other output projections: exactly in float32, unless the job asks
for fast sums everywhere (docs/evidence.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megascale_kernels.expert_operators import ExpertOperators
from megascale_kernels.expert_rows import RowPlan
from megascale_kernels.grouped_gemm import ExpertGroups
from megascale_kernels.quantize import Factor, Operand
from megascale_trainer.parallel.tensor.fp8 import FastSums, Fp8Weights
from megascale_trainer.parallel.tensor.linear import Product
from megascale_trainer.weights import Weight


class Fp8Experts:
    """See :class:`megascale_trainer.parallel.expert.experts.ExpertArithmetic`."""

    def __init__(self, operators: ExpertOperators, weights: Fp8Weights, fast: FastSums) -> None:
        self._operators = operators
        self._weights = weights
        self._fast = fast

    def spread(self, x: torch.Tensor, plan: RowPlan) -> Operand:
        return self._operators.spread_in_fp8(x, plan)

    def activate(self, h: torch.Tensor, weights: torch.Tensor) -> Operand:
        return self._operators.activate_in_fp8(h, weights)

    def activation_gradient(
        self, d_result: torch.Tensor, h: torch.Tensor, weights: torch.Tensor
    ) -> tuple[Operand, torch.Tensor]:
        d_h, d_weights = self._operators.activation_gradient_in_fp8(d_result, h, weights)
        assert d_weights is not None, "weights were given"
        return d_h, d_weights

    def forward(
        self, rows: Operand, weight: Weight, groups: ExpertGroups, product: Product
    ) -> torch.Tensor:
        factor, _ = self._weights.experts(weight)
        return self._multiply(rows, factor, groups, product)

    def input_gradient(self, d_rows: Operand, weight: Weight, groups: ExpertGroups) -> torch.Tensor:
        _, factor = self._weights.experts(weight)
        return self._multiply(d_rows, factor, groups, "input_gradient")

    def accumulate(
        self, main_grad: torch.Tensor, d_rows: Operand, rows: Operand, groups: ExpertGroups
    ) -> None:
        flip = self._operators.flip
        self._operators.add_weight_gradients_in_fp8(
            flip(d_rows, groups), flip(rows, groups), groups, main_grad
        )

    def tensors(self, rows: Operand) -> tuple[torch.Tensor, ...]:
        return rows.data, rows.scale

    def rows(self, tensors: Sequence[torch.Tensor]) -> Operand:
        data, scale = tensors
        return Operand(data, scale)

    def _multiply(
        self, rows: Operand, factor: Factor, groups: ExpertGroups, product: Product
    ) -> torch.Tensor:
        out = torch.empty(
            (rows.data.shape[0], factor.data.shape[1]),
            dtype=torch.bfloat16,
            device=rows.data.device,
        )
        fast = self._fast.of_product(product)
        self._operators.multiply(rows.over_columns(), factor, groups, out, fast=fast)
        return out

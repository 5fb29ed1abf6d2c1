"""The operators of a mixture of experts: plain torch, or fused Triton kernels.

:mod:`megascale_kernels.router`, :mod:`megascale_kernels.expert_rows` and
:mod:`megascale_kernels.grouped_gemm` are the references; the kernels have the same names in
:mod:`megascale_kernels.fused`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megascale_kernels import expert_rows, grouped_gemm, router
from megascale_kernels.expert_rows import RowPlan
from megascale_kernels.grouped_gemm import ExpertGroups, FlippedRows
from megascale_kernels.quantize import E4M3, Factor, Operand
from megascale_kernels.router import RouterSettings, Routing

_HOPPER = (9, 0)  # the grouped GEMMs read and write by bulk copies


class Route(Protocol):
    """:func:`megascale_kernels.router.route`."""

    def __call__(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        sequences: int,
        settings: RouterSettings,
    ) -> Routing: ...


class Spread(Protocol):
    """:func:`megascale_kernels.expert_rows.spread`."""

    def __call__(self, x: torch.Tensor, plan: RowPlan) -> torch.Tensor: ...


class SpreadInFp8(Protocol):
    """:func:`megascale_kernels.expert_rows.spread_in_fp8`."""

    def __call__(self, x: torch.Tensor, plan: RowPlan, dtype: torch.dtype = E4M3) -> Operand: ...


class Join(Protocol):
    """:func:`megascale_kernels.expert_rows.join`."""

    def __call__(
        self, rows: torch.Tensor, plan: RowPlan, weights: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class Activate(Protocol):
    """:func:`megascale_kernels.expert_rows.activate`."""

    def __call__(self, h: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor: ...


class ActivateInFp8(Protocol):
    """:func:`megascale_kernels.expert_rows.activate_in_fp8`."""

    def __call__(
        self, h: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype = E4M3
    ) -> Operand: ...


class ActivationGradient(Protocol):
    """:func:`megascale_kernels.expert_rows.activation_gradient`."""

    def __call__(
        self, d_result: torch.Tensor, h: torch.Tensor, weights: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]: ...


class ActivationGradientInFp8(Protocol):
    """:func:`megascale_kernels.expert_rows.activation_gradient_in_fp8`."""

    def __call__(
        self,
        d_result: torch.Tensor,
        h: torch.Tensor,
        weights: torch.Tensor | None,
        dtype: torch.dtype = E4M3,
    ) -> tuple[Operand, torch.Tensor | None]: ...


class Flip(Protocol):
    """:func:`megascale_kernels.expert_rows.flip`."""

    def __call__(self, rows: Operand, groups: ExpertGroups) -> FlippedRows: ...


class Multiply(Protocol):
    """:func:`megascale_kernels.grouped_gemm.multiply`."""

    def __call__(
        self,
        rows: Factor,
        weights: Factor,
        groups: ExpertGroups,
        out: torch.Tensor,
        *,
        over_rows: bool = False,
        fast: bool = True,
    ) -> None: ...


class AddWeightGradients(Protocol):
    """:func:`megascale_kernels.grouped_gemm.add_weight_gradients`."""

    def __call__(
        self, gradient: torch.Tensor, rows: torch.Tensor, groups: ExpertGroups, out: torch.Tensor
    ) -> None: ...


class AddWeightGradientsInFp8(Protocol):
    """:func:`megascale_kernels.grouped_gemm.add_weight_gradients_in_fp8`."""

    def __call__(
        self, gradient: FlippedRows, rows: FlippedRows, groups: ExpertGroups, out: torch.Tensor
    ) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ExpertOperators:
    """One implementation of each operator; ``waits``: its products make the host wait."""

    waits: bool
    route: Route
    spread: Spread
    spread_in_fp8: SpreadInFp8
    join: Join
    activate: Activate
    activate_in_fp8: ActivateInFp8
    activation_gradient: ActivationGradient
    activation_gradient_in_fp8: ActivationGradientInFp8
    flip: Flip
    multiply: Multiply
    add_weight_gradients: AddWeightGradients
    add_weight_gradients_in_fp8: AddWeightGradientsInFp8


def expert_operators(kind: Literal["torch", "triton"], dtype: torch.dtype) -> ExpertOperators:
    """The operators of this name for hidden states in ``dtype``.

    The kernels multiply bf16 and FP8 on Hopper and later devices, or in Triton's interpreter; else
    the products are torch's, one per expert, which wait for the device.

    Raises:
        ImportError: Triton is not installed.
    """
    plain = ExpertOperators(
        waits=True,
        route=router.route,
        spread=expert_rows.spread,
        spread_in_fp8=expert_rows.spread_in_fp8,
        join=expert_rows.join,
        activate=expert_rows.activate,
        activate_in_fp8=expert_rows.activate_in_fp8,
        activation_gradient=expert_rows.activation_gradient,
        activation_gradient_in_fp8=expert_rows.activation_gradient_in_fp8,
        flip=expert_rows.flip,
        multiply=grouped_gemm.multiply,
        add_weight_gradients=grouped_gemm.add_weight_gradients,
        add_weight_gradients_in_fp8=grouped_gemm.add_weight_gradients_in_fp8,
    )
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < _HOPPER
    if kind == "torch" or dtype != torch.bfloat16 or old:
        return plain
    from megascale_kernels.fused import expert_rows as fused_rows
    from megascale_kernels.fused import grouped_gemm as fused_gemm
    from megascale_kernels.fused import router as fused_router

    return ExpertOperators(
        waits=False,
        route=fused_router.route,
        spread=fused_rows.spread,
        spread_in_fp8=fused_rows.spread_in_fp8,
        join=fused_rows.join,
        activate=fused_rows.activate,
        activate_in_fp8=fused_rows.activate_in_fp8,
        activation_gradient=fused_rows.activation_gradient,
        activation_gradient_in_fp8=fused_rows.activation_gradient_in_fp8,
        flip=fused_rows.flip,
        multiply=fused_gemm.multiply,
        add_weight_gradients=fused_gemm.add_weight_gradients,
        add_weight_gradients_in_fp8=fused_gemm.add_weight_gradients_in_fp8,
    )

"""The linear operators of layers in FP8: the GEMMs of :mod:`.linear` with operands and scales.

    forward            y  = x  @ w^T      e4m3, e4m3
    input gradient     dx = dy @ w        gradients' format, e4m3
    weight gradient    dw += dy^T @ x     gradients' format, e4m3; added to float32 in the GEMM

Results are bf16. Hopper's FP8 GEMMs sum over the contiguous dimension alone, so a weight gradient
reads transposed copies. They are all that is kept of an input for backward, 1 byte a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megascale_job.config import FastAccumulation
from megascale_kernels.casts import Casts
from megascale_kernels.fp8_activation import Fp8Activation
from megascale_kernels.gemm import Gemm
from megascale_kernels.overlap.fp8_matmul import Fp8Gemms
from megascale_kernels.quantize import E4M3, E5M2, Factor, Operand
from megascale_trainer.parallel.tensor.fp8_weights import Fp8Weights
from megascale_trainer.parallel.weight_gradients import WeightGradients
from megascale_trainer.weights import Weight


@dataclass(frozen=True, slots=True)
class FastSums:
    """Which GEMMs are summed with fewer bits than float32 has.

    ``column``, ``row``: those of the forward, of column-parallel weights (whose inputs are
    normalised) and of row-parallel ones. ``input_gradients``, ``weight_gradients``: of both kinds
    of weights.
    """

    column: bool
    row: bool
    input_gradients: bool
    weight_gradients: bool

    @classmethod
    def of(cls, setting: FastAccumulation) -> FastSums:
        """What a job's ``fast_accumulation`` says."""
        gradients = setting in ("all", "all_but_output_projections")
        return cls(setting != "none", setting in ("forward", "all"), gradients, gradients)


class Fp8Linears:
    """The linear operators of a tensor-parallel group, as a layer is given them.

    It implements :class:`megascale_trainer.model.sharding.LayerSharding` for inputs in FP8.

    Args:
        size: number of ranks.
        gemms: the GEMMs with their transfers.
        by_row: gradients are e4m3 with one scale for each row (token); else e5m2 with one for the
            tensor, on which the ranks agree where rows are gathered.
        fast: which GEMMs are summed with fewer bits.
    """

    def __init__(
        self,
        size: int,
        gemms: Fp8Gemms,
        gemm: Gemm,
        casts: Casts,
        weights: Fp8Weights,
        weight_gradients: WeightGradients,
        *,
        by_row: bool,
        fast: FastSums,
    ) -> None:
        self.size, self.gemms, self.casts = size, gemms, casts
        self.weight_gradients, self.fast = weight_gradients, fast
        self._gemm, self._weights, self._by_row = gemm, weights, by_row

    def column_parallel(self, x: Fp8Activation, weight: Weight) -> torch.Tensor:
        """[S / tp, B, in] times ``weight`` [out / tp, in]: this rank's columns [S, B, out / tp]."""
        operand = self._weights.operand(weight)
        y: torch.Tensor = _Column.apply(x.stand_in, x.operand, operand, weight.main_grad, self)  # type: ignore[no-untyped-call]
        return y

    def row_parallel(self, x: Fp8Activation, weight: Weight) -> torch.Tensor:
        """[S, B, in / tp] times ``weight`` [in / tp, out], summed over tp: [S / tp, B, out]."""
        gradient = _Gradient()
        standing = _RowInput.apply(x.stand_in, x.operand, weight.main_grad, gradient, self)  # type: ignore[no-untyped-call]
        operand = self._weights.operand(weight)
        y: torch.Tensor = _Row.apply(standing, x.operand.over_columns(), operand, gradient, self)  # type: ignore[no-untyped-call]
        return y

    def gradient(self, d: torch.Tensor, *, gathered: bool, transposed: bool) -> Operand:
        """A gradient [S, B, columns] in FP8, [S * B, columns].

        Args:
            gathered: its rows are gathered afterwards, so all ranks use the same scale.
        """
        d = d.contiguous()
        rows = d.flatten(0, 1)
        if self._by_row:
            return self.casts.rows(rows, E4M3, transposed=transposed)
        amax = self.casts.amax(d)
        if gathered and self.size > 1:
            amax = self.gemms.largest(amax)
        out = self.gemms.own_part(rows, E5M2) if gathered else None
        return self.casts.tensor(rows, E5M2, amax=amax, transposed=transposed, out=out)

    def with_transposed(self, operand: Operand) -> Operand:
        """``operand`` with the copy that a weight gradient reads."""
        return operand if operand.transposed is not None else self.casts.transpose(operand)

    def accumulate(self, main_grad: torch.Tensor, left: Factor, right: Factor) -> None:
        """``main_grad`` += left @ right^T."""
        fast = self.fast.weight_gradients
        self._gemm.multiply(left, right, main_grad, accumulate=True, fast=fast)

    def rehearse(
        self, rows: int, columns: int, tokens: int, device: torch.device, *, column: bool
    ) -> None:
        """Run the GEMMs of a weight [rows, columns] on random numbers: algorithms are chosen now.

        Args:
            tokens: of all ranks.
            column: whether the weight is column-parallel, [out, in], or row-parallel, [in, out].
        """
        dtype = E4M3 if self._by_row else E5M2
        x_width, d_width = (columns, rows) if column else (rows, columns)
        forward = self.fast.column if column else self.fast.row
        for height in self.gemms.rows_at_once(tokens):
            for width, out, kind, by_row, fast in (
                (x_width, d_width, E4M3, False, forward),
                (d_width, x_width, dtype, self._by_row, self.fast.input_gradients),
            ):
                left = _random(height, width, kind, device, by_row=by_row)
                right = _random(out, width, E4M3, device)
                result = torch.empty(height, out, dtype=torch.bfloat16, device=device)
                self._gemm.multiply(left, right, result, fast=fast)
        x, d = (
            _random(width, tokens, kind, device)
            for width, kind in ((x_width, E4M3), (d_width, dtype))
        )
        total = torch.zeros(rows, columns, device=device)
        self.accumulate(total, *((d, x) if column else (x, d)))


def _random(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, by_row: bool = False
) -> Factor:
    """Normal numbers: zeros would draw less power, and other algorithms would win."""
    values = torch.randn(rows, columns, dtype=torch.bfloat16, device=device).to(dtype)
    return Factor(values, torch.ones(rows if by_row else 1, device=device))


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        standing: torch.Tensor,
        part: Operand,
        weight: Operand,
        main_grad: torch.Tensor,
        linears: Fp8Linears,
    ) -> torch.Tensor:
        y, gathered = linears.gemms.all_gather_matmul(
            part, weight.over_columns(), fast=linears.fast.column
        )
        if ctx.needs_input_grad[0]:
            kept = linears.with_transposed(gathered).over_rows()
            ctx.save_for_backward(kept.data, kept.scale)
        ctx.weight, ctx.main_grad, ctx.linears = weight, main_grad, linears
        return y.view(-1, standing.shape[1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        x, linears = Factor(*ctx.saved_tensors), ctx.linears
        d = linears.gradient(d_y, gathered=False, transposed=True)
        accumulate = partial(linears.accumulate, ctx.main_grad, d.over_rows(), x)
        # The weight gradient does not need the scattered result: the last rows travel under it.
        d_x = linears.gemms.matmul_reduce_scatter(
            d.over_columns(),
            ctx.weight.over_rows(),
            partial(linears.weight_gradients.run, accumulate),
            fast=linears.fast.input_gradients,
        )
        return d_x.view(-1, d_y.shape[1], d_x.shape[1]), None, None, None, None


class _Gradient:
    """The gathered gradient of a row-parallel result: from :class:`_Row` to :class:`_RowInput`."""

    gathered: Operand | None = None


class _RowInput(torch.autograd.Function):
    """Keeps the operator's input for the weight gradient.

    A node of its own, and the last of a layer to save a tensor, as in
    :mod:`megascale_trainer.parallel.tensor.linear`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        standing: torch.Tensor,
        x: Operand,
        main_grad: torch.Tensor,
        gradient: _Gradient,
        linears: Fp8Linears,
    ) -> torch.Tensor:
        if ctx.needs_input_grad[0]:
            kept = linears.with_transposed(x).over_rows()
            ctx.save_for_backward(kept.data, kept.scale)
        ctx.main_grad, ctx.gradient, ctx.linears = main_grad, gradient, linears
        return standing.view_as(standing)

    @staticmethod
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        x, linears = Factor(*ctx.saved_tensors), ctx.linears
        d_y, ctx.gradient.gathered = ctx.gradient.gathered, None
        linears.weight_gradients.run(partial(linears.accumulate, ctx.main_grad, x, d_y.over_rows()))
        return d_x, None, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        standing: torch.Tensor,
        x: Factor,
        weight: Operand,
        gradient: _Gradient,
        linears: Fp8Linears,
    ) -> torch.Tensor:
        ctx.weight, ctx.gradient, ctx.linears = weight, gradient, linears
        y = linears.gemms.matmul_reduce_scatter(x, weight.over_rows(), fast=linears.fast.row)
        return y.view(-1, standing.shape[1], y.shape[1])

    @staticmethod
    def backward(ctx: Any, d_part: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        linears: Fp8Linears = ctx.linears
        alone = linears.size == 1  # then there is nothing to gather before the transposed copy
        part = linears.gradient(d_part, gathered=True, transposed=alone)
        d_x, gathered = linears.gemms.all_gather_matmul(
            part, ctx.weight.over_columns(), fast=linears.fast.input_gradients
        )
        # The weight needs the gathered gradient too: _RowInput's backward runs next and takes it.
        ctx.gradient.gathered = linears.with_transposed(gathered)
        return d_x.view(-1, d_part.shape[1], d_x.shape[1]), None, None, None, None

"""A parallel block's layer on one tensor-parallel rank, transfers included, in bf16 and in FP8.

The four operators of a layer are the all-gathered input projection, the output projection with its
reduce-scatter, and the gradients of their inputs, which gather and scatter the other way round.
:mod:`benchmarks.fp8_recipes` has the tensors, the casts and what a layer computes besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from benchmarks.fp8_recipes import (
    EPSILON,
    Recipe,
    Run,
    Tensors,
    activation_cast,
    cast,
    norm_cast,
    plain_activation,
)

from megascale_kernels.fused import quantize as casts
from megascale_kernels.fused.norm_operand import NormCast, norm_operand
from megascale_kernels.gemm import Gemm, multiply_by_torch
from megascale_kernels.overlap.fp8_matmul import Fp8Gemms
from megascale_kernels.quantize import E4M3, Factor, Operand, norm_bound, scale_of
from megascale_trainer.parallel.tensor.matmul import SequenceMatmuls

GATHER_IN, SCATTER_OUT = "all-gather, input projection", "output projection, reduce-scatter"
GATHER_OUT, SCATTER_IN = "all-gather, output dgrad", "input dgrad, reduce-scatter beside wgrad"


class Silent:
    """GEMMs of the whole sequence without any transfer: the time that hidden transfers approach.

    Not even the partial sums are added: all that transfers bring counts as communication.
    """

    def __init__(self, size: int, gemm: Gemm) -> None:
        self._size, self._gemm = size, gemm
        self._whole: dict[tuple[torch.Size, torch.dtype, bool], torch.Tensor] = {}

    def gather(self, part: torch.Tensor, *, by_row: bool = False) -> torch.Tensor:
        """All ranks' rows: this rank's, repeated, of the first part of its kind."""
        key = part.shape, part.dtype, by_row
        if key not in self._whole:
            bits = part.view(torch.uint8) if part.itemsize == 1 else part
            whole = bits.repeat(self._size, *(1 for _ in part.shape[1:]))
            self._whole[key] = whole.view(part.dtype)
        return self._whole[key]


class SilentMatmuls(Silent):
    """In bf16."""

    def all_gather_matmul(
        self, part: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As :class:`megascale_trainer.parallel.tensor.matmul.SequenceMatmuls`."""
        whole = self.gather(part)
        return torch.matmul(whole, factor), whole

    def matmul_reduce_scatter(
        self, x: torch.Tensor, factor: torch.Tensor, meanwhile: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """As :class:`megascale_trainer.parallel.tensor.matmul.SequenceMatmuls`."""
        product = torch.matmul(x, factor)
        if meanwhile is not None:
            meanwhile()
        return product[: x.shape[0] // self._size]


class SilentFp8Gemms(Silent):
    """In FP8."""

    def all_gather_matmul(
        self, part: Operand, factor: Factor, *, fast: bool
    ) -> tuple[torch.Tensor, Operand]:
        """As :class:`megascale_kernels.overlap.fp8_matmul.Fp8Gemms`."""
        by_row = part.scale.numel() == part.data.shape[0]
        scale = self.gather(part.scale) if by_row else part.scale
        whole = Operand(self.gather(part.data, by_row=by_row), scale)
        rows, columns = whole.data.shape[0], factor.data.shape[0]
        product = torch.empty(rows, columns, dtype=torch.bfloat16, device=part.data.device)
        self._gemm.multiply(whole.over_columns(), factor, product, fast=fast)
        return product, whole

    def matmul_reduce_scatter(
        self,
        x: Factor,
        factor: Factor,
        meanwhile: Callable[[], None] | None = None,
        *,
        fast: bool,
    ) -> torch.Tensor:
        """As :class:`megascale_kernels.overlap.fp8_matmul.Fp8Gemms`."""
        rows, columns = x.data.shape[0], factor.data.shape[0]
        product = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.data.device)
        self._gemm.multiply(x, factor, product, fast=fast)
        if meanwhile is not None:
            meanwhile()
        return product[: rows // self._size]

    def largest(self, amax: torch.Tensor) -> torch.Tensor:
        """As :class:`megascale_kernels.overlap.fp8_matmul.Fp8Gemms`."""
        return amax


class Bf16Layer:
    """What a layer runs in bf16, with torch's GEMMs as the trainer has them."""

    def __init__(self, t: Tensors) -> None:
        self._t = t

    def run(self, products: SequenceMatmuls) -> None:
        """Both projections forward and backward, with the norm and the activation."""
        t = self._t
        normed = norm_operand(
            t.x,
            t.residual,
            t.vector,
            t.norm_weight,
            t.vector,
            "layernorm",
            EPSILON,
            NormCast("amax"),
        ).normed
        assert normed is not None
        x = products.all_gather_matmul(_sequence(normed), t.weight_in.t())[1]
        plain_activation(t)
        products.matmul_reduce_scatter(_sequence(t.joined), t.weight_out.t())
        dy = products.all_gather_matmul(_sequence(t.d_part), t.weight_out)[1]
        _accumulate(t.joined, dy, t.main_out)
        products.matmul_reduce_scatter(
            _sequence(t.d_inputs),
            t.weight_in,
            partial(_accumulate, t.d_inputs, x, t.main_in),
        )

    def operators(self, products: SequenceMatmuls) -> Mapping[str, Callable[[], object]]:
        """Each operator alone."""
        t = self._t
        into, out = t.weight_in.t(), t.weight_out.t()
        x, dy, joined, d_inputs = map(_sequence, (t.x, t.d_part, t.joined, t.d_inputs))
        wgrad = partial(_accumulate, t.d_inputs, t.gathered, t.main_in)
        return {
            GATHER_IN: partial(products.all_gather_matmul, x, into),
            SCATTER_OUT: partial(products.matmul_reduce_scatter, joined, out),
            GATHER_OUT: partial(products.all_gather_matmul, dy, t.weight_out),
            SCATTER_IN: partial(products.matmul_reduce_scatter, d_inputs, t.weight_in, wgrad),
        }


class Fp8Layer:
    """What a layer runs in FP8 by ``recipe``, all casts but the weights' included."""

    def __init__(self, t: Tensors, recipe: Recipe, gemm: Gemm) -> None:
        self._t, self._recipe, self._gemm = t, recipe, gemm
        self._into, self._out = (
            casts.quantize(weight, amax=casts.amax(weight))
            for weight in (t.weight_in, t.weight_out.t().contiguous())
        )
        self._bound = scale_of(norm_bound(t.norm_weight, t.vector), E4M3)

    def run(self, gemms: Fp8Gemms) -> None:
        """Both projections forward and backward, with norm, activation and transposed copies."""
        t, recipe = self._t, self._recipe
        part = norm_cast(t, recipe, self._bound)
        gather = partial(gemms.all_gather_matmul, fast=recipe.fast)
        scatter = partial(gemms.matmul_reduce_scatter, fast=recipe.fast)
        x = casts.transpose(gather(part, self._into.over_columns())[1])
        joined = activation_cast(t, recipe)
        scatter(joined.over_columns(), self._out.over_rows())
        part = self._gradient(gemms)
        dy = casts.transpose(gather(part, self._out.over_columns())[1])
        self._accumulate(joined, dy, t.main_out)
        d_inputs = cast(t.d_inputs, recipe, transposed=True)
        scatter(
            d_inputs.over_columns(),
            self._into.over_rows(),
            partial(self._accumulate, d_inputs, x, t.main_in),
        )

    def operators(self, gemms: Fp8Gemms) -> Mapping[str, Callable[[], object]]:
        """Each operator alone, its operands cast before."""
        t, recipe = self._t, self._recipe
        x, dy = norm_cast(t, recipe, self._bound), self._gradient(self._silent())
        joined, d_inputs = activation_cast(t, recipe), cast(t.d_inputs, recipe, transposed=True)
        whole = casts.quantize(t.gathered, amax=casts.amax(t.gathered), straight=False)
        wgrad = partial(self._accumulate, d_inputs, whole, t.main_in)
        into, out = self._into, self._out
        gather = partial(gemms.all_gather_matmul, fast=recipe.fast)
        scatter = partial(gemms.matmul_reduce_scatter, fast=recipe.fast)
        return {
            GATHER_IN: partial(gather, x, into.over_columns()),
            SCATTER_OUT: partial(scatter, joined.over_columns(), out.over_rows()),
            GATHER_OUT: partial(gather, dy, out.over_columns()),
            SCATTER_IN: partial(scatter, d_inputs.over_columns(), into.over_rows(), wgrad),
        }

    def extras(self) -> Mapping[str, Run]:
        """What the gathered operands cost besides: transposed copies, and the gradient's cast."""
        silent = self._silent()
        x, dy = norm_cast(self._t, self._recipe, self._bound), self._gradient(silent)
        whole_x, whole_dy = (
            silent.all_gather_matmul(part, weight.over_columns(), fast=self._recipe.fast)[1]
            for part, weight in ((x, self._into), (dy, self._out))
        )
        return {
            "cast of dy": partial(self._gradient, silent),
            "transposed copy of x": partial(casts.transpose, whole_x),
            "transposed copy of dy": partial(casts.transpose, whole_dy),
        }

    def _silent(self) -> SilentFp8Gemms:
        return SilentFp8Gemms(self._t.layer.tp, self._gemm)

    def _gradient(self, gemms: Fp8Gemms) -> Operand:
        """This rank's rows of the output projection's gradient: by rows, or one agreed scale."""
        part = self._t.d_part
        if self._recipe.by_row:
            return cast(part, self._recipe, transposed=False)
        return cast(part, self._recipe, gemms.largest(casts.amax(part)), transposed=False)

    def _accumulate(self, left: Operand, right: Operand, total: torch.Tensor) -> None:
        self._gemm.multiply(
            left.over_rows(), right.over_rows(), total, accumulate=True, fast=self._recipe.fast
        )


def _sequence(rows: torch.Tensor) -> torch.Tensor:
    return rows.unsqueeze(1)


def _accumulate(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor) -> None:
    left, right = left.flatten(0, -2), right.flatten(0, -2)
    multiply_by_torch(Factor(left.t()), Factor(right.t()), total, accumulate=True)

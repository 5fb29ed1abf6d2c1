"""FP8 on a rank: its arithmetic, its weights, and the operators for ``precision: fp8``.

Only the layers' GEMMs are in FP8; embedding, head, attention, routers, shared experts and the
layers that the job keeps in bf16 stay as they are. Transfers in FP8 and in bf16 share one order and
one peer memory.

Weights in FP8, and the scales of norms, are made once per update and shared by its micro-batches.
The master values stay in float32 and the parameters in bf16; nothing here is part of a checkpoint.
A weight is cast at its first use after an update, so its parameters have arrived by then. One that
has arrived in FP8 needs only its transposed copy, unless its place among the arrived bytes is not
aligned for GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megascale_job.config import FastAccumulation, JobConfig
from megascale_job.sizes.parameter_table import OPERAND_ALIGNMENT, ParameterTable, fp8_weights
from megascale_kernels.cache_folder import cache_folder
from megascale_kernels.casts import Casts, casts
from megascale_kernels.fp8_activation import Fp8Activation
from megascale_kernels.fp8_operators import fp8_operators
from megascale_kernels.gemm import Gemm
from megascale_kernels.operators import LayerOperators, Operators
from megascale_kernels.overlap.fp8_matmul import Fp8Gemms, OverlappedFp8Gemms, PlainFp8Gemms
from megascale_kernels.parameter import Parameter
from megascale_kernels.quantize import E4M3, E5M2, Factor, Operand, norm_bound, scale_of
from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.tensor.linear import Linears, Product
from megascale_trainer.parallel.tensor.matmul import OverlappedMatmuls
from megascale_trainer.parallel.tensor.sharding import TensorParallel
from megascale_trainer.weights import Weight

# Note [Scales in FP8]
# ~~~~~~~~~~~~~~~~~~~~
# A GEMM multiplies FP8 numbers and applies the factors' scales to the sums. Rows that ranks gather
# for one GEMM must either share a scale or bring one per row:
#
# - The input of a column-parallel weight is a norm's result. Its scale is a bound computed from the
#   norm's weights, which are equal on all tp ranks: no amax is searched and nothing is exchanged.
# - The input of a row-parallel weight stays on its rank, so it has this rank's own scale.
# - A gradient in e5m2 has one scale per tensor. Before rows are gathered, the ranks agree on the
#   largest amax, which is one more exchange per gather. In e4m3 a gradient has one scale per token:
#   it travels with the rows, and needs no agreement. It is a power of two, so that the transposed
#   copy, which must have one scale, holds the same values.
# - A weight has a scale of its own, and is cast once per update. If parameters are gathered in FP8,
#   the owners of a weight's parts have agreed on its scale before.

_ADA = (8, 9)  # the first compute capability with FP8
_CHOICE_S = 0.02  # time for which each proposed algorithm is measured


@dataclass(frozen=True, slots=True)
class FastSums:
    """The GEMMs that are summed with fewer bits than float32 has.

    ``column`` and ``row`` are the forwards of column-parallel weights (whose inputs are normalised)
    and of row-parallel weights. ``input_gradients`` and ``weight_gradients`` cover both kinds.
    """

    column: bool
    row: bool
    input_gradients: bool
    weight_gradients: bool

    @classmethod
    def of(cls, setting: FastAccumulation) -> FastSums:
        """The GEMMs that a job's ``fast_accumulation`` names."""
        gradients = setting in ("all", "all_but_output_projections")
        return cls(
            column=setting != "none",
            row=setting in ("forward", "all"),
            input_gradients=gradients,
            weight_gradients=gradients,
        )

    def of_product(self, product: Product) -> bool:
        """Whether ``product`` is summed with fewer bits."""
        if product == "column":
            return self.column
        return self.row if product == "row" else self.input_gradients


class Fp8Weights:
    """This rank's weights as operands in e4m3, each under a scale of its own.

    An operand keeps its memory, because CUDA graphs read it there.
    """

    def __init__(self, casts: Casts) -> None:
        self.casts = casts
        # By the address of the weight, which has a fixed place in the stage's buffers.
        self._operands: dict[int, Operand] = {}
        self._experts: dict[int, tuple[Factor, Factor]] = {}
        self._norm_scales: dict[int, tuple[torch.Tensor, Parameter | None]] = {}
        self._stale = set[int]()

    def forget(self) -> None:
        """Mark all casts as stale: the parameters have changed."""
        self._stale.update(self._operands, self._experts, self._norm_scales)

    def renew(self, weights: Iterable[Weight]) -> None:
        """Cast those of ``weights`` again whose casts are stale."""
        for weight in weights if self._stale else ():
            key = weight.value.data_ptr()
            if key in self._operands:
                self.operand(weight)
            elif key in self._experts:
                self.experts(weight)
            elif key in self._norm_scales:
                self.norm_scale(weight, self._norm_scales[key][1])

    def operand(self, weight: Weight) -> Operand:
        """``weight`` [rows, columns] with its transposed copy: GEMMs sum over either dimension."""
        key = weight.value.data_ptr()
        found = self._operands.get(key)
        if found is None or key in self._stale:
            cast = self._cast(weight, None if found is None else found.data)
            if found is None:
                self._operands[key] = found = cast
            else:
                # ``data`` is in its place already; the rest is copied into its own.
                assert found.transposed is not None and cast.transposed is not None
                found.transposed.copy_(cast.transposed)
                found.scale.copy_(cast.scale)
            self._stale.discard(key)
        return found

    def _cast(self, weight: Weight, out: torch.Tensor | None) -> Operand:
        value = weight.value.detach()
        if weight.scale is not None:
            # The parameter has arrived in FP8. GEMMs can read it where it is, if it is aligned.
            if value.storage_offset() % OPERAND_ALIGNMENT:
                value = value.clone() if out is None else out.copy_(value)
            return self.casts.transpose(Operand(value, weight.scale))
        amax = self.casts.amax(value)
        return self.casts.tensor(value, E4M3, amax=amax, transposed=True, out=out)

    def experts(self, weight: Weight) -> tuple[Factor, Factor]:
        """Experts [experts, out, in] for the product with rows, and transposed for its gradient.

        Each has one scale per expert and column of its product: [experts, out] and [experts, in].
        """
        key = weight.value.data_ptr()
        found = self._experts.get(key)
        if found is None or key in self._stale:
            value = weight.value.detach()
            made = self._by_column(value), self._by_column(value.transpose(1, 2).contiguous())
            if found is None:
                self._experts[key] = found = made
            else:
                for old, new in zip(found, made, strict=True):
                    assert old.scale is not None and new.scale is not None
                    old.data.copy_(new.data)
                    old.scale.copy_(new.scale)
            self._stale.discard(key)
        return found

    def _by_column(self, value: torch.Tensor) -> Factor:
        experts, columns, depth = value.shape
        cast = self.casts.rows(value.view(-1, depth), E4M3, transposed=False)
        return Factor(cast.data.view(experts, columns, depth), cast.scale.view(experts, columns))

    def norm_scale(self, weight: Parameter, bias: Parameter | None) -> torch.Tensor:
        """The scale that bounds a norm's result, float32 [1]; equal on all tp ranks."""
        key = weight.value.data_ptr()
        found = self._norm_scales.get(key)
        if found is not None and key not in self._stale:
            return found[0]
        bound = norm_bound(weight.value, None if bias is None else bias.value)
        scale = scale_of(bound, E4M3)
        if found is None:
            self._norm_scales[key] = scale, bias
        else:
            scale = found[0].copy_(scale)
        self._stale.discard(key)
        return scale


class Fp8Arithmetic:
    """FP8 with current scaling: see :class:`megascale_trainer.parallel.tensor.linear.Arithmetic`.

    Inputs and weights are e4m3, results bf16. Hopper's FP8 GEMMs sum only over the contiguous
    dimension, so a weight gradient reads transposed copies. Only this copy of an input is kept for
    backward, 1 byte per value.

    Args:
        gemms: the GEMMs of the group with their transfers; they use ``gemm``.
        by_row: gradients are e4m3 with one scale per row (token); else e5m2 with one scale per
            tensor, on which the ranks agree before rows are gathered.
        fast: the GEMMs that are summed with fewer bits.
    """

    def __init__(
        self,
        size: int,
        gemms: Fp8Gemms,
        gemm: Gemm,
        weights: Fp8Weights,
        *,
        by_row: bool,
        fast: FastSums,
    ) -> None:
        self.size = size
        self._gemms = gemms
        self._gemm = gemm
        self._weights = weights
        self._casts = weights.casts
        self._by_row = by_row
        self.fast = fast

    def input(self, x: Fp8Activation) -> tuple[torch.Tensor, Operand]:
        return x.placeholder, x.operand

    def weight(self, weight: Weight) -> Operand:
        return self._weights.operand(weight)

    def gradient(self, d: torch.Tensor, *, gathered: bool, transposed: bool) -> Operand:
        """A gradient [S, B, columns] in FP8, [S * B, columns].

        Args:
            gathered: its rows are gathered afterwards, so all ranks use the same scale: see
                Note [Scales in FP8].
        """
        d = d.contiguous()
        rows = d.flatten(0, 1)
        if self._by_row:
            return self._casts.rows(rows, E4M3, transposed=transposed)
        amax = self._casts.amax(d)
        if gathered and self.size > 1:
            amax = self._gemms.largest(amax)
        # The cast writes where the peers read, which saves a copy. There must be no other operation
        # of the group between this and the gather.
        out = self._gemms.own_part(rows, E5M2) if gathered else None
        return self._casts.tensor(rows, E5M2, amax=amax, transposed=transposed, out=out)

    def all_gather_matmul(
        self, part: Operand, factor: Factor, product: Product, sequences: int
    ) -> tuple[torch.Tensor, Operand]:
        fast = self.fast.of_product(product)
        y, gathered = self._gemms.all_gather_matmul(part, factor, fast=fast)
        return y.view(-1, sequences, y.shape[1]), gathered

    def matmul_reduce_scatter(
        self,
        x: Factor,
        factor: Factor,
        product: Product,
        sequences: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        fast = self.fast.of_product(product)
        y = self._gemms.matmul_reduce_scatter(x, factor, meanwhile, fast=fast)
        return y.view(-1, sequences, y.shape[1])

    def ready_for_rows(self, operand: Operand) -> Operand:
        return operand if operand.transposed is not None else self._casts.transpose(operand)

    def keep(self, x: Operand) -> Sequence[torch.Tensor]:
        kept = self.ready_for_rows(x).over_rows()
        assert kept.scale is not None
        return kept.data, kept.scale

    def kept(self, saved: Sequence[torch.Tensor]) -> Factor:
        data, scale = saved
        return Factor(data, scale)

    def accumulate(self, main_grad: torch.Tensor, left: Factor, right: Factor) -> None:
        """``main_grad`` += left @ right^T."""
        fast = self.fast.weight_gradients
        self._gemm.multiply(left, right, main_grad, accumulate=True, fast=fast)

    def rehearse(
        self, rows: int, columns: int, tokens: int, device: torch.device, *, column: bool
    ) -> None:
        """Run the GEMMs of a weight [rows, columns] on random numbers, to choose algorithms.

        Args:
            tokens: tokens of all ranks.
            column: the weight is column-parallel, [out, in]; else row-parallel, [in, out].
        """
        # The same shapes, dtypes and scales as in a step: a choice is kept by these.
        dtype = E4M3 if self._by_row else E5M2
        x_width, d_width = (columns, rows) if column else (rows, columns)
        forward = self.fast.column if column else self.fast.row
        for height in self._gemms.rows_at_once(tokens):
            for width, out, kind, by_row, fast in (
                (x_width, d_width, E4M3, False, forward),
                (d_width, x_width, dtype, self._by_row, self.fast.input_gradients),
            ):
                left = _random(height, width, kind, device, by_row=by_row)
                right = _random(out, width, E4M3, device)
                result = torch.empty(height, out, dtype=torch.bfloat16, device=device)
                self._gemm.multiply(left, right, result, fast=fast)
        x = _random(x_width, tokens, E4M3, device)
        d = _random(d_width, tokens, dtype, device)
        total = torch.zeros(rows, columns, device=device)
        if column:
            self.accumulate(total, d, x)
        else:
            self.accumulate(total, x, d)


@dataclass(frozen=True)
class Fp8:
    """Operators and weights for a stage's layers in FP8; ``layers`` are indices in the model."""

    layers: range
    operators: LayerOperators[Fp8Activation]
    arithmetic: Fp8Arithmetic
    linears: Linears[Fp8Activation, Operand]
    weights: Fp8Weights
    fast: FastSums

    def choose_algorithms(self, table: ParameterTable, tokens: int, device: torch.device) -> None:
        """Time the algorithms of all GEMMs of this rank's layers, before the first step.

        Inside an operator, timing would keep other ranks in a barrier, or run while a receive is
        posted.

        Args:
            tokens: of a micro-batch, over all tp ranks.
        """
        shapes = {
            (tensor.shape, tensor.name.endswith("in.weight"))
            for tensor in fp8_weights(self.layers, table)
        }
        for shape, column in sorted(shapes):
            self.arithmetic.rehearse(shape[0], shape[1], tokens, device, column=column)


def fp8_of(
    config: JobConfig, operators: Operators, tp: TensorParallel, device: torch.device
) -> Fp8 | None:
    """The FP8 operators that the job asks for; None without FP8.

    Raises:
        ValueError: ``device`` has no FP8.
    """
    if not config.fp8_layers:
        return None
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _ADA:
        raise ValueError(
            f"trainer.training.precision is fp8, but {torch.cuda.get_device_name(device)} is older "
            "than compute capability 8.9: use bf16"
        )
    # With a measured choice two runs could take different algorithms, which round differently.
    gemm = Gemm(_choices_file(), timed=not config.training.deterministic, duration_s=_CHOICE_S)
    made = casts(operators.name)
    weights = Fp8Weights(made)
    gemms = _gemms(tp, gemm)
    fast = FastSums.of(config.training.fp8.fast_accumulation)
    by_row = config.training.fp8.format == "e4m3"
    arithmetic = Fp8Arithmetic(tp.size, gemms, gemm, weights, by_row=by_row, fast=fast)
    return Fp8(
        config.fp8_layers,
        fp8_operators(operators, made, weights.norm_scale, gemms.own_part),
        arithmetic,
        Linears(arithmetic, tp.weight_gradients),
        weights,
        fast,
    )


def _random(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, *, by_row: bool = False
) -> Factor:
    """Normal numbers: with zeros the device draws less power, and other algorithms would win."""
    values = torch.randn(rows, columns, dtype=torch.bfloat16, device=device).to(dtype)
    return Factor(values, torch.ones(rows if by_row else 1, device=device))


def _choices_file() -> Path | None:
    """The file in which this machine keeps its fastest algorithms; None: no home folder."""
    folder = cache_folder()
    return None if folder is None else folder / "gemm-choices.json"


def _gemms(tp: TensorParallel, gemm: Gemm) -> Fp8Gemms:
    if not isinstance(tp.matmuls, OverlappedMatmuls):
        return PlainFp8Gemms(tp.group, gemm)
    return _Counted(tp.group, OverlappedFp8Gemms(tp.matmuls.transfers, gemm))


class _Counted:
    """Overlapped FP8 GEMMs and agreements, each counted as one operation of the group."""

    def __init__(self, group: Group, gemms: OverlappedFp8Gemms) -> None:
        self._group = group
        self._gemms = gemms

    def all_gather_matmul(
        self, part: Operand, factor: Factor, *, fast: bool
    ) -> tuple[torch.Tensor, Operand]:
        with self._group.operation(part.data):
            return self._gemms.all_gather_matmul(part, factor, fast=fast)

    def matmul_reduce_scatter(
        self,
        x: Factor,
        factor: Factor,
        meanwhile: Callable[[], None] | None = None,
        *,
        fast: bool,
    ) -> torch.Tensor:
        with self._group.operation(x.data):
            return self._gemms.matmul_reduce_scatter(x, factor, meanwhile, fast=fast)

    def largest(self, amax: torch.Tensor) -> torch.Tensor:
        with self._group.operation(amax):
            return self._gemms.largest(amax)

    def own_part(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._gemms.own_part(like, dtype)

    def rows_at_once(self, rows: int) -> Sequence[int]:
        return self._gemms.rows_at_once(rows)

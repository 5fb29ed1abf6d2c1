"""The linear operators behind every GEMM of the model: column-parallel in, row-parallel out.

Forward and backward of each operator gather the sequence once and scatter it once: a parallel block
has one of each operator and so two all-gathers and two reduce-scatters, a serial block twice that
(full recompute gathers once more for each column-parallel operator). An operator accumulates the
gradient of its weight into ``main_grad`` in float32, at once or when
:class:`megascale_trainer.weights.WeightGradients` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch

from megascale_kernels.quantize import Factor
from megascale_kernels.torch_calls import apply
from megascale_trainer import compat
from megascale_trainer.parallel.tensor.matmul import SequenceMatmuls
from megascale_trainer.weights import Weight, WeightGradients

# Note [Operands of a linear operator]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# An operator multiplies *operands*: in FP8 values with the scale that restores them, in bf16 and
# float32 the values alone. Each GEMM sums over one dimension of both sides, which `Factor` has
# last:
#
#     forward            y  = x  @ w^T      over the columns of x and w
#     input gradient     dx = dy @ w        over the columns of dy and the rows of w
#     weight gradient    dw += dy^T @ x     over the rows of dy and x; added to float32 in the GEMM
#
# An `Arithmetic` makes operands of inputs, weights and gradients, multiplies them over the
# tensor-parallel ranks, and chooses what to keep of an input for backward. The operators decide all
# else, once for every number format: what is gathered and scattered, in which order, and when
# weight gradients run.

# The products for which an arithmetic can choose how to sum: the forwards of both kinds of
# operators, and the input gradients of both.
Product = Literal["column", "row", "input_gradient"]


class Operand(Protocol):
    """A matrix for GEMMs; see :class:`megascale_kernels.quantize.Operand`."""

    def over_columns(self) -> Factor:
        """For a sum over the columns."""
        ...

    def over_rows(self) -> Factor:
        """For a sum over the rows."""
        ...


Input = TypeVar("Input")  # the input of an operator: a tensor, or an activation in FP8
Input_contra = TypeVar("Input_contra", contravariant=True)
Op = TypeVar("Op", bound=Operand)


class Arithmetic(Protocol[Input_contra, Op]):
    """A number format of the linear operators: Note [Operands of a linear operator]."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def input(self, x: Input_contra) -> tuple[torch.Tensor, Op]:
        """The tensor that autograd follows, [S, B, columns], and the operand of ``x``."""
        ...

    def weight(self, weight: Weight) -> Op:
        """The operand of ``weight``."""
        ...

    def gradient(self, d: torch.Tensor, *, gathered: bool, transposed: bool) -> Op:
        """The operand of a gradient [S, B, columns].

        Args:
            gathered: its rows are gathered afterwards, so the ranks agree on the scale.
            transposed: a sum over its rows follows.
        """
        ...

    def all_gather_matmul(
        self, part: Op, factor: Factor, product: Product, sequences: int
    ) -> tuple[torch.Tensor, Op]:
        """All ranks' rows times ``factor`` [N, K]: [S, B, N], and the gathered rows."""
        ...

    def matmul_reduce_scatter(
        self,
        x: Factor,
        factor: Factor,
        product: Product,
        sequences: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """This rank's part [S / tp, B, N] of the sum over ranks of ``x`` times ``factor``.

        ``meanwhile`` is further work that does not need the result, under which transfers can hide.
        """
        ...

    def ready_for_rows(self, operand: Op) -> Op:
        """``operand``, ready for a sum over its rows."""
        ...

    def keep(self, x: Op) -> Sequence[torch.Tensor]:
        """The tensors of an input that its weight gradient needs, to be saved until backward."""
        ...

    def kept(self, saved: Sequence[torch.Tensor]) -> Factor:
        """The input that was kept, for a sum over its rows."""
        ...

    def accumulate(self, main_grad: torch.Tensor, left: Factor, right: Factor) -> None:
        """``main_grad`` += left @ right^T."""
        ...


class Linears(Generic[Input, Op]):
    """The linear operators of a tensor-parallel group in one number format.

    It implements :class:`megascale_trainer.model.sharding.LayerSharding`.
    """

    def __init__(
        self, arithmetic: Arithmetic[Input, Op], weight_gradients: WeightGradients
    ) -> None:
        self.arithmetic = arithmetic
        self._weight_gradients = weight_gradients

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.arithmetic.size

    def column_parallel(self, x: Input, weight: Weight) -> torch.Tensor:
        """This rank's columns for the whole sequence (input projections, head).

        Args:
            x: [S / tp, B, in].
            weight: [out / tp, in].

        Returns:
            [S, B, out / tp] in the dtype of ``x``; bf16 from FP8.
        """
        tracked, part = self.arithmetic.input(x)
        operand = self.arithmetic.weight(weight)
        y: torch.Tensor = apply(
            _Column, tracked, weight.value, part, operand, self._weight_sum(weight)
        )
        return y

    def column_parallel_both_ways(
        self, x: Input, weight: Weight, gradient: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Forward and backward of :meth:`column_parallel` in one; autograd follows neither.

        Args:
            x: [S / tp, B, in].
            weight: [out / tp, in].
            gradient: from the columns [S, B, out / tp] to their gradient; may write over them.

        Returns:
            The gradient of ``x``. That of the weight is added to its ``main_grad``.
        """
        tracked, part = self.arithmetic.input(x)
        operand, weight_sum = self.arithmetic.weight(weight), self._weight_sum(weight)
        y, gathered = self.arithmetic.all_gather_matmul(
            part, operand.over_columns(), "column", tracked.shape[1]
        )
        kept = self.arithmetic.kept(self.arithmetic.keep(gathered))
        return _column_gradients(gradient(y), operand, kept, weight_sum)

    def row_parallel(self, x: Input, weight: Weight) -> torch.Tensor:
        """The sum of the ranks' partial results, for this rank's part of the sequence.

        For output projections.

        Args:
            x: [S, B, in / tp].
            weight: [in / tp, out].

        Returns:
            [S / tp, B, out] in the dtype of ``x``; bf16 from FP8.
        """
        gathered = _Gathered()
        tracked, operand = self.arithmetic.input(x)
        tracked = apply(_RowInput, tracked, operand, self._weight_sum(weight), gathered)
        factor = operand.over_columns()
        operand_of_weight = self.arithmetic.weight(weight)
        y: torch.Tensor = apply(
            _Row, tracked, weight.value, factor, operand_of_weight, gathered, self.arithmetic
        )
        return y

    def whole(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """The product with a weight that every rank holds whole, in float32 (routers).

        Args:
            x: [tokens, in], this rank's own.
            weight: [out, in].

        Returns:
            float32 [tokens, out].
        """
        y: torch.Tensor = apply(_Whole, x, weight.value, weight.main_grad, self._weight_gradients)
        return y

    def _weight_sum(self, weight: Weight) -> _WeightSum:
        return _WeightSum(weight.main_grad, self.arithmetic, self._weight_gradients)


@dataclass(frozen=True)
class Unscaled:
    """An operand in bf16 or float32, whose values are the data: [S, B, columns] or a matrix."""

    data: torch.Tensor

    def over_columns(self) -> Factor:
        """See :class:`Operand`."""
        return Factor(self.data)

    def over_rows(self) -> Factor:
        """See :class:`Operand`; a view."""
        return Factor(self.data.flatten(0, -2).t())


class UnscaledArithmetic:
    """bf16 or float32: see :class:`Arithmetic`.

    Weights are the stored leaves, which require grad, and are not detached: torch.matmul then folds
    an input of any strides to one matrix. Detached, it would choose another GEMM for some strides,
    and sums would have another order. The input gradient of row-parallel weights is detached.
    """

    def __init__(self, size: int, matmuls: SequenceMatmuls) -> None:
        self.size = size
        self._matmuls = matmuls

    def input(self, x: torch.Tensor) -> tuple[torch.Tensor, Unscaled]:
        return x, Unscaled(x)

    def weight(self, weight: Weight) -> Unscaled:
        # Not detached: torch.matmul chooses its GEMM by whether the factor requires grad.
        return Unscaled(weight.value)

    def gradient(self, d: torch.Tensor, *, gathered: bool, transposed: bool) -> Unscaled:
        return Unscaled(d)

    def all_gather_matmul(
        self, part: Unscaled, factor: Factor, product: Product, sequences: int
    ) -> tuple[torch.Tensor, Unscaled]:
        values = factor.data.detach() if product == "input_gradient" else factor.data
        y, whole = self._matmuls.all_gather_matmul(part.data, values.t())
        return y, Unscaled(whole)

    def matmul_reduce_scatter(
        self,
        x: Factor,
        factor: Factor,
        product: Product,
        sequences: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        return self._matmuls.matmul_reduce_scatter(x.data, factor.data.t(), meanwhile)

    def ready_for_rows(self, operand: Unscaled) -> Unscaled:
        return operand

    def keep(self, x: Unscaled) -> Sequence[torch.Tensor]:
        return (x.data,)

    def kept(self, saved: Sequence[torch.Tensor]) -> Factor:
        [data] = saved
        return Unscaled(data).over_rows()

    def accumulate(self, main_grad: torch.Tensor, left: Factor, right: Factor) -> None:
        compat.accumulate_matmul(main_grad, left.data, right.data.t())


@dataclass(frozen=True)
class _WeightSum:
    """The memory into which the gradient of one weight is added, and the schedule for it."""

    main_grad: torch.Tensor
    arithmetic: Arithmetic[Any, Any]
    weight_gradients: WeightGradients

    def add(self, left: Factor, right: Factor) -> None:
        """Add left @ right^T, now or when the schedule asks for it."""
        self.weight_gradients.run(partial(self.arithmetic.accumulate, self.main_grad, left, right))


class _Column(torch.autograd.Function):
    # ``leaf``, the stored weight, is an argument only for its edge in autograd's graph: by these
    # edges the nodes that use a weight are counted (parallel/data/overlapped_buffers.py).
    @staticmethod
    def forward(
        ctx: Any,
        tracked: torch.Tensor,
        leaf: torch.Tensor,
        part: Operand,
        weight: Operand,
        weight_sum: _WeightSum,
    ) -> torch.Tensor:
        arithmetic = weight_sum.arithmetic
        y, gathered = arithmetic.all_gather_matmul(
            part, weight.over_columns(), "column", tracked.shape[1]
        )
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(*arithmetic.keep(gathered))
        ctx.weight = weight
        ctx.weight_sum = weight_sum
        return y

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        weight_sum: _WeightSum = ctx.weight_sum
        kept = weight_sum.arithmetic.kept(ctx.saved_tensors)
        d_x = _column_gradients(d_y, ctx.weight, kept, weight_sum)
        return d_x, None, None, None, None


def _column_gradients(
    d_y: torch.Tensor, weight: Operand, x: Factor, weight_sum: _WeightSum
) -> torch.Tensor:
    """The gradient of a column-parallel input; that of the weight is added.

    ``x`` is the gathered input, for a sum over its rows.
    """
    arithmetic = weight_sum.arithmetic
    d = arithmetic.gradient(d_y, gathered=False, transposed=True)
    # The weight gradient does not need the scattered result, so the last rows travel under it.
    meanwhile = partial(weight_sum.add, d.over_rows(), x)
    return arithmetic.matmul_reduce_scatter(
        d.over_columns(), weight.over_rows(), "input_gradient", d_y.shape[1], meanwhile
    )


class _Gathered:
    """The gathered gradient of a row-parallel result: from :class:`_Row` to :class:`_RowInput`."""

    gradient: Operand | None = None


class _RowInput(torch.autograd.Function):
    """Keeps the operator's input for the weight gradient.

    It is a node of its own, and the last in a layer to save a tensor. So the recomputation of a
    whole layer stops here, and repeats neither the GEMM nor the reduce-scatter after it: their
    result would not be used.
    """

    @staticmethod
    def forward(
        ctx: Any, tracked: torch.Tensor, x: Operand, weight_sum: _WeightSum, gathered: _Gathered
    ) -> torch.Tensor:
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(*weight_sum.arithmetic.keep(x))
        ctx.weight_sum = weight_sum
        ctx.gathered = gathered
        return tracked.view_as(tracked)

    @staticmethod
    def backward(ctx: Any, d_x: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        weight_sum: _WeightSum = ctx.weight_sum
        d_y = ctx.gathered.gradient
        ctx.gathered.gradient = None
        weight_sum.add(weight_sum.arithmetic.kept(ctx.saved_tensors), d_y.over_rows())
        return d_x, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tracked: torch.Tensor,
        leaf: torch.Tensor,
        x: Factor,
        weight: Operand,
        gathered: _Gathered,
        arithmetic: Arithmetic[Any, Any],
    ) -> torch.Tensor:
        # Save nothing here: recomputation would have to run up to this node (see _RowInput).
        ctx.weight = weight
        ctx.gathered = gathered
        ctx.arithmetic = arithmetic
        return arithmetic.matmul_reduce_scatter(x, weight.over_rows(), "row", tracked.shape[1])

    @staticmethod
    def backward(
        ctx: Any, d_part: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None, None, None]:
        arithmetic: Arithmetic[Any, Any] = ctx.arithmetic
        alone = arithmetic.size == 1  # no gather comes before the transposed copy
        part = arithmetic.gradient(d_part, gathered=True, transposed=alone)
        d_x, gathered = arithmetic.all_gather_matmul(
            part, ctx.weight.over_columns(), "input_gradient", d_part.shape[1]
        )
        # The weight gradient needs the gathered gradient too: _RowInput's backward, which runs
        # next, takes it from here instead of gathering again.
        ctx.gathered.gradient = arithmetic.ready_for_rows(gathered)
        return d_x, None, None, None, None, None


class _Whole(torch.autograd.Function):
    """A product in float32, without communication; gradients are multiplied in the input's dtype.

    Every rank adds the gradient of its own tokens: the sum over the ranks comes with that of the
    other replicated weights.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        value: torch.Tensor,
        main_grad: torch.Tensor,
        weight_gradients: WeightGradients,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.value = value.detach()
        ctx.main_grad = main_grad
        ctx.weight_gradients = weight_gradients
        return compat.matmul_in_float32(x, ctx.value.t())

    @staticmethod
    def backward(ctx: Any, d_y: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        d = d_y.to(x.dtype)
        ctx.weight_gradients.run(partial(compat.accumulate_matmul, ctx.main_grad, d.t(), x))
        return d @ ctx.value, None, None, None

"""Tensor parallelism as the model sees it: linear operators, collectives, this rank's share.

The model communicates only through these protocols and imports nothing of
:mod:`megascale_trainer.parallel`. TensorParallel in
:mod:`megascale_trainer.parallel.tensor.sharding` implements those of tensor parallelism, and
ExpertParallel in :mod:`megascale_trainer.parallel.expert.experts` that of experts; a pipeline stage
passes them to its embedding, layers and head. With one rank every collective is the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from megascale_kernels.expert_rows import RowPlan
from megascale_kernels.router import RouterSettings, Routing
from megascale_trainer.weights import Weight

# The input of a linear operator: a tensor, or in FP8 a
# :class:`megascale_kernels.fp8_activation.Fp8Activation`.
Input_contra = TypeVar("Input_contra", contravariant=True)


class LayerSharding(Protocol[Input_contra]):
    """The two linear operators around a layer's attention and its FFN."""

    @property
    def size(self) -> int:
        """Number of tp ranks that the heads and the FFN columns are split over."""
        ...

    def column_parallel(self, x: Input_contra, weight: Weight) -> torch.Tensor:
        """[S / tp, B, in] times ``weight`` [out / tp, in]: this rank's columns [S, B, out / tp]."""
        ...

    def row_parallel(self, x: Input_contra, weight: Weight) -> torch.Tensor:
        """[S, B, in / tp] times ``weight`` [in / tp, out], summed over tp: [S / tp, B, out]."""
        ...


class ExpertSharding(Protocol):
    """The experts of a layer, split over the ep group, and what their router needs."""

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        plan: RowPlan,
        into: Weight,
        out_of: Weight,
        *,
        keep_rows: bool,
    ) -> torch.Tensor:
        """The weighted sum [tokens, hidden] of the experts of each token in ``x``.

        Args:
            plan: the rows of ``routing.chosen``.
            into: this rank's experts, [experts / ep, 2 width, hidden]: gate, then up.
            out_of: [experts / ep, hidden, width].
            keep_rows: keep the rows of experts for backward; else they are made again.
        """
        ...

    def route(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None,
        sequences: int,
        settings: RouterSettings,
        *,
        by_turn: bool,
    ) -> Routing:
        """The routing of this rank's tokens ``x`` [tokens, hidden], with gradients.

        Args:
            weight: [experts, hidden], which every rank holds whole.
            bias, sequences, settings: see :func:`megascale_kernels.router.route`.
            by_turn: see :func:`megascale_kernels.router.by_turn`.
        """
        ...

    def sum_over_sequence(self, counts: torch.Tensor) -> torch.Tensor:
        """The sum of ``counts`` over the ranks that have parts of the same sequences; no grad."""
        ...


class EmbeddingSharding(Protocol):
    """The embedding's rows of the vocabulary, and the way to this rank's part of S."""

    @property
    def index(self) -> int:
        """This rank's number in tp, whose ranks hold consecutive rows of the vocabulary."""
        ...

    def reduce_scatter_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums [S, ...] of each rank to this rank's part [S / tp, ...]; differentiable."""
        ...

    def sequence_part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part [S / tp, ...] of a tensor [S, ...] that every rank has."""
        ...


class HeadSharding(Protocol):
    """The head's columns of the vocabulary, and the reductions over all columns."""

    @property
    def size(self) -> int:
        """Number of tp ranks."""
        ...

    @property
    def index(self) -> int:
        """This rank's number in tp, whose ranks hold consecutive columns of the logits."""
        ...

    def column_parallel(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """See :meth:`LayerSharding.column_parallel`."""
        ...

    def column_parallel_both_ways(
        self,
        x: torch.Tensor,
        weight: Weight,
        gradient: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Forward and backward of :meth:`column_parallel` in one, without autograd.

        ``gradient`` makes the gradient of the columns from them, and may write it over them. That
        of the weight is added to its ``main_grad``; returns that of ``x``.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the tp ranks, in place."""
        ...

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Maximum of ``tensor`` over the tp ranks, in place."""
        ...

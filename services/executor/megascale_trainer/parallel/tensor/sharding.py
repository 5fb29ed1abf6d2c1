"""The tp group as the model is given it: linear operators, collectives and this rank's place."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.tensor import linear, matmul
from megascale_trainer.parallel.tensor.matmul import PlainMatmuls, SequenceMatmuls
from megascale_trainer.weights import Weight, WeightGradients


@dataclass(frozen=True)
class TensorParallel:
    """A tp group, how its matmuls communicate, and when its weight gradients are computed.

    It implements the protocols of :mod:`megascale_trainer.model.sharding`.
    """

    group: Group
    matmuls: SequenceMatmuls
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    @property
    def index(self) -> int:
        """This rank's place among them."""
        return self.group.index

    def column_parallel(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """See :func:`megascale_trainer.parallel.tensor.linear.column_parallel`."""
        return linear.column_parallel(x, weight, self.matmuls, self.weight_gradients)

    def row_parallel(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """See :func:`megascale_trainer.parallel.tensor.linear.row_parallel`."""
        return linear.row_parallel(x, weight, self.matmuls, self.weight_gradients)

    def reduce_scatter_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """See :func:`megascale_trainer.parallel.tensor.matmul.reduce_scatter_sequence`."""
        return matmul.reduce_scatter_sequence(x, self.group)

    def sequence_part(self, x: torch.Tensor) -> torch.Tensor:
        """See :func:`megascale_trainer.parallel.tensor.matmul.sequence_part`."""
        return matmul.sequence_part(x, self.group)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the ranks, in place."""
        self.group.all_reduce(tensor)

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Maximum of ``tensor`` over the ranks, in place."""
        self.group.all_reduce_max(tensor)


def plain_tensor_parallel(group: Group) -> TensorParallel:
    """``group`` with collectives and matmuls one after the other; with one rank matmuls alone."""
    return TensorParallel(group, PlainMatmuls(group))

"""What the model is given of tensor parallelism: linear operators, collectives, this rank's share.

The model communicates through these protocols alone and imports nothing of
:mod:`megascale_trainer.parallel`. TensorParallel in
:mod:`megascale_trainer.parallel.tensor.sharding` implements all three, and a pipeline stage hands
it to its embedding, layers and head. With one rank every collective is the identity.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from megascale_trainer.weights import Weight

# What a linear operator reads: a tensor, or in FP8 a
# :class:`megascale_kernels.fp8_activation.Fp8Activation`.
Input_contra = TypeVar("Input_contra", contravariant=True)


class LayerSharding(Protocol[Input_contra]):
    """What a layer needs: the two linear operators around its attention and its FFN."""

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


class EmbeddingSharding(Protocol):
    """What the embedding needs: its rows of the vocabulary, and the way to its part of S."""

    @property
    def index(self) -> int:
        """This rank's place among the tp ranks, which hold consecutive rows of the vocabulary."""
        ...

    def reduce_scatter_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums [S, ...] of each rank to this rank's part [S / tp, ...]; differentiable."""
        ...

    def sequence_part(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's part [S / tp, ...] of a tensor [S, ...] that every rank has."""
        ...


class HeadSharding(Protocol):
    """What the head needs: its columns of the vocabulary, and the sums over all of them."""

    @property
    def index(self) -> int:
        """This rank's place among the tp ranks, which hold consecutive columns of the logits."""
        ...

    def column_parallel(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """As :meth:`LayerSharding.column_parallel`."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum ``tensor`` over the tp ranks, in place."""
        ...

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Maximum of ``tensor`` over the tp ranks, in place."""
        ...

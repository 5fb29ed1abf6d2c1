"""The tp group as the model sees it: linear operators, collectives and this rank's number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from megascale_job.config import JobConfig
from megascale_kernels.operators import Operators
from megascale_kernels.overlap.collective_matmul import CollectiveMatmuls
from megascale_kernels.overlap.peer_memory import open_peer_memory, why_unreachable
from megascale_kernels.overlap.row_transfers import region_bytes
from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.tensor import matmul
from megascale_trainer.parallel.tensor.linear import Linears, Unscaled, UnscaledArithmetic
from megascale_trainer.parallel.tensor.matmul import (
    OverlappedMatmuls,
    PlainMatmuls,
    SequenceMatmuls,
)
from megascale_trainer.weights import Weight, WeightGradients

# benchmarks/results/2026-11-22-fp8-overlap-2x-and-4xh200.md
_ONE_STEP_UP_TO = 4


@dataclass(frozen=True)
class TensorParallel:
    """A tp group, its matmuls with their communication, and the schedule of weight gradients.

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
        """This rank's number among them."""
        return self.group.index

    @cached_property
    def _linears(self) -> Linears[torch.Tensor, Unscaled]:
        return Linears(UnscaledArithmetic(self.size, self.matmuls), self.weight_gradients)

    def column_parallel(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """See :class:`megascale_trainer.parallel.tensor.linear.Linears`."""
        return self._linears.column_parallel(x, weight)

    def column_parallel_both_ways(
        self,
        x: torch.Tensor,
        weight: Weight,
        gradient: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """See :class:`megascale_trainer.parallel.tensor.linear.Linears`."""
        return self._linears.column_parallel_both_ways(x, weight, gradient)

    def row_parallel(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """See :class:`megascale_trainer.parallel.tensor.linear.Linears`."""
        return self._linears.row_parallel(x, weight)

    def whole(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """See :class:`megascale_trainer.parallel.tensor.linear.Linears`."""
        return self._linears.whole(x, weight)

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
    """``group`` with collectives and matmuls one after the other; one rank has only matmuls."""
    return TensorParallel(group, PlainMatmuls(group))


def tensor_parallel(
    config: JobConfig,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    operators: Operators,
) -> TensorParallel:
    """The tp ``group`` with the matmuls that ``parallelism.overlap.tp`` asks for.

    All its ranks call this together. If the ranks cannot reach each other's memory, the plain
    matmuls are used and the log says why. Peer memory is allocated once, for the one size that all
    layers and the head communicate: hidden states [S, B, H] in ``dtype``.

    Raises:
        RuntimeError, OSError: there is not enough memory to share.
    """
    if not config.parallelism.overlap.tp or group.handle is None:  # not wanted, or one rank
        return plain_tensor_parallel(group)
    if reason := why_unreachable(group.handle, device):
        print(
            "the tensor-parallel group is not overlapped (trainer.parallelism.overlap.tp): "
            f"{reason}",
            flush=True,
        )
        return plain_tensor_parallel(group)
    model = config.model
    sequences = config.training.micro_batch_size
    length = model.sequence_length // config.parallelism.cp
    whole_bytes = length * sequences * model.hidden_size * dtype.itemsize
    memory = open_peer_memory(
        group.handle,
        region_bytes(whole_bytes),
        device,
        timeout_s=config.recovery.collective_timeout_s,
    )
    kernel = CollectiveMatmuls(memory, chunks(group.size), operators.sum_of_parts)
    return TensorParallel(group, OverlappedMatmuls(group, kernel))


def chunks(size: int) -> int:
    """The number of steps into which the rows of ``size - 1`` peers are cut.

    Few, because a GEMM with few rows does not fill a device. One step is the fastest on 2 and on 4
    H200s: two steps cost a layer 1.5 to 3 % on 4 (30B and 7B, bf16). For 8 ranks GEMMs were timed
    on one H200, with computed transfers: three steps are within 2.2 % of the best of each shape,
    one costs 5 to 16 % more (benchmarks/results/2026-11-27-waterfalls-4xh200.md).
    """
    return 1 if size <= _ONE_STEP_UP_TO else 3

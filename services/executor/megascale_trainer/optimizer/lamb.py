"""LAMB over a flat shard: the trust ratio of every matrix, however it is cut over ranks.

Source: You et al., arXiv 1904.00962, Algorithm 2, with its bias correction; MegaScale uses it to
train at four times the batch (section 3.1). Norms and biases take AdamW's step: ratio 1, no decay.
Every expert has a trust ratio of its own, for each of its matrices: an expert that few tokens reach
has other gradients than its neighbours.

A rank has parts of parameters, cut over tensor, pipeline, data and expert parallel ranks. So the
norms of whole matrices are sums over ranks: see Note [Norms over ranks]. Nothing waits for the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from megascale_job.config import LambConfig
from megascale_job.sizes.parameter_table import (
    DEFAULT_STATES,
    ParameterSlice,
    ParameterTable,
    ShardRange,
    stands_for,
)
from megascale_kernels import lamb
from megascale_kernels.adamw import AdamWUpdate, BiasCorrection
from megascale_kernels.lamb import LambKernel, Segment
from megascale_trainer.optimizer.interface import OptimizerFactory, OptimizerSetup
from megascale_trainer.optimizer.step_control import StepControl

# Note [Norms over ranks]
# ~~~~~~~~~~~~~~~~~~~~~~~
# Each rank adds the squares of its parts to one vector over all parameters of the model, which has
# one entry per matrix: a parameter has one, and experts have one each. One all-reduce over all
# ranks sums the vectors, so that every rank has the norms of all matrices, equal to the last bit:
# ranks that hold the same parameter take the same step, and stay equal.
#
# A parameter that several ranks hold whole (norms, biases over tp, tied embeddings) would count
# several times. One of its holders counts it, and the others add zero, from a column that is always
# zero. The exchange is a single operation of the world, the same on each rank, whatever parameters
# the rank has. Squares are float64: the sum over ranks then rounds far below float32.


class Lamb:
    """See :class:`megascale_trainer.optimizer.interface.Optimizer`."""

    state_names: ClassVar[tuple[str, ...]] = DEFAULT_STATES

    def __init__(self, setup: OptimizerSetup) -> None:
        self._config = setup.config
        self._states = setup.states
        self._all_reduce = setup.all_reduce
        table, device = setup.table, setup.states.device
        kernel = _kernel(setup.kernels)
        held = _parts(table)
        self._runs = [kernel([part.segment for part in bucket], device) for bucket in held]
        self._places = _ranges([owned.stop - owned.start for owned in table.shard_ranges])
        self._columns = _ranges([len(bucket) for bucket in held])
        parts = [part for bucket in held for part in bucket]
        # The last column is always zero: see Note [Norms over ranks].
        self._sums = torch.zeros((2, len(parts) + 1), dtype=torch.float64, device=device)
        firsts, entries = dict[str, int](), 0
        for name, matrices in setup.parameters.items():
            firsts[name] = entries
            entries += matrices
        to_here = [firsts[part.piece.name] + part.matrix for part in parts]
        from_here = [len(parts)] * entries
        for column, (part, entry) in enumerate(zip(parts, to_here, strict=True)):
            if stands_for(table.at, part.piece.replicated_over):
                from_here[entry] = column
        self._from_here = torch.tensor(from_here, device=device)
        self._to_here = torch.tensor(to_here, dtype=torch.int64, device=device)
        decays = [part.piece.decay for part in parts]
        self._trusts = torch.tensor(decays, dtype=torch.bool, device=device)

    def update(
        self,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        control: StepControl,
        learning_rate: float,
        number: int,
    ) -> None:
        config = self._config
        numbers = AdamWUpdate(
            learning_rate=learning_rate,
            epsilon=config.epsilon,
            weight_decay=config.weight_decay,
            bias=BiasCorrection(config.beta1, config.beta2, number, control.skipped),
        )
        for bucket, run in enumerate(self._runs):
            run.direction(
                self._of_bucket(bucket),
                gradients[bucket],
                control.scale,
                control.apply,
                numbers,
                self._sums[:, self._columns[bucket]],
            )
        ratios = self._ratios()
        for bucket, run in enumerate(self._runs):
            run.apply(
                self._of_bucket(bucket),
                gradients[bucket],
                parameters[bucket],
                ratios[self._columns[bucket]],
                control.apply,
                learning_rate,
            )

    def _ratios(self) -> torch.Tensor:
        """float32 trust ratios of this rank's parts, from the norms of whole matrices."""
        squares = self._sums.index_select(1, self._from_here)
        self._all_reduce(squares)
        weight, change = squares.sqrt().unbind()
        ratios = trust_ratios(weight, change, self._config.lamb).index_select(0, self._to_here)
        return torch.where(self._trusts, ratios, 1.0).float()

    def _of_bucket(self, bucket: int) -> torch.Tensor:
        return self._states[:, self._places[bucket]]


def trust_ratios(weight: torch.Tensor, change: torch.Tensor, bounds: LambConfig) -> torch.Tensor:
    """phi(``weight``) / ``change`` of norms of the same shape; 1 if one of the two is 0."""
    # A parameter that is all zeros would stay zero at ratio 0: at ratio 1 it takes AdamW's step.
    bounded = weight.clamp(bounds.min_weight_norm, bounds.max_weight_norm or None)
    usable = (bounded > 0) & (change > 0)
    return torch.where(usable, bounded / change, 1.0)


@dataclass(frozen=True, slots=True)
class _Part:
    """``start:stop`` of a bucket's shard, all of the matrix ``matrix`` of the parameter."""

    piece: ParameterSlice
    matrix: int
    start: int
    stop: int

    @property
    def segment(self) -> Segment:
        return Segment(self.start, self.stop, self.piece.decay)


def _parts(table: ParameterTable) -> list[list[_Part]]:
    """The parts of matrices in each range of the shard; a shard has at most one of a matrix."""
    found: dict[ShardRange, list[_Part]] = {owned: [] for owned in table.shard_ranges}
    counted = {plan.name for plan in table.buffers if plan.counted}
    for owned, piece, start, stop in table.overlaps():
        if owned.buffer not in counted:
            found[owned] += _matrices(piece, owned, start, stop)
    return list(found.values())


def _matrices(piece: ParameterSlice, owned: ShardRange, start: int, stop: int) -> Iterator[_Part]:
    """``start:stop`` of the buffer, cut where a matrix of the slice ends."""
    while start < stop:
        matrix = (start - piece.offset) // piece.matrix_elements
        end = min(stop, piece.offset + (matrix + 1) * piece.matrix_elements)
        # Of experts the first dimension counts matrices; other parameters are one.
        first = piece.start[0] if len(piece.global_shape) > 2 else 0
        yield _Part(piece, first + matrix, start - owned.start, end - owned.start)
        start = end


def _ranges(sizes: Sequence[int]) -> list[slice]:
    """Consecutive ranges of the given sizes."""
    return [slice(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(len(sizes))]


def _kernel(
    kernels: Literal["torch", "triton"],
) -> Callable[[Sequence[Segment], torch.device], LambKernel]:
    if kernels == "torch":
        return lamb.LambRuns
    from megascale_kernels.fused import lamb as fused  # needs Triton

    return fused.LambRuns


OPTIMIZER: OptimizerFactory = Lamb

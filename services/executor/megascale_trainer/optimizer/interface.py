"""The interface of optimizers, so that installed packages can add their own.

A rank owns a flat shard of the parameters, cut bucket by bucket (ZeRO-2). The trainer allocates the
shard's states, copies them into snapshots and restores them; an optimizer only declares their names
and updates them. One that updates every value by itself can treat its shard as a few runs of equal
weight decay (:func:`decay_runs`). The state of routers also has a place in the shard, in a buffer
that is ``counted``: an optimizer leaves it as it is. docs/how-to/add-an-optimizer.md shows a whole
optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megascale_job.config import OptimizerConfig
from megascale_job.sizes.parameter_table import ParameterTable, ShardRange
from megascale_trainer.optimizer.step_control import StepControl


@dataclass(frozen=True, slots=True)
class OptimizerSetup:
    """The arguments of an optimizer.

    Args:
        table: the place of each parameter in the shard.
        states: float32 [number of names, shard elements], one row per declared name. Row 0 is the
            master parameters, the others are zero at first. The optimizer keeps this tensor and
            updates it in place: it is the byte image that a snapshot copies.
        kernels: "triton" if fused Triton kernels run on this device.
        parameters: number of matrices of each logical parameter of the whole model by its name, the
            same on every rank in the same order. It is 1, or of experts the number of experts: the
            first dimension counts them.
        all_reduce: sums a tensor over all ranks in place, without waiting for the device, and
            leaves the same bits on all of them. Every rank calls it equally often.
    """

    config: OptimizerConfig
    table: ParameterTable
    states: torch.Tensor
    kernels: Literal["torch", "triton"]
    parameters: Mapping[str, int]
    all_reduce: Callable[[torch.Tensor], None]


class Optimizer(Protocol):
    """Updates one rank's shard, the same way on every rank that holds the same values."""

    def update(
        self,
        gradients: Sequence[torch.Tensor],
        parameters: Sequence[torch.Tensor],
        control: StepControl,
        learning_rate: float,
        number: int,
    ) -> None:
        """Apply update ``number`` (from 1, skipped ones included) without waiting for the device.

        If ``control.apply`` is 0, no bit of states and parameters may change. The decision is a
        tensor on the device: choose with :func:`torch.where`, because gradients can be NaN then.

        Args:
            gradients: float32 shard of each bucket, summed over the global batch; may be
                overwritten.
            parameters: shard of each bucket in the compute dtype, which takes the rounded master.
            control: scale of the gradients, the apply flag, and the number of updates before this
                one that were skipped. A count of applied updates subtracts it on the device.
        """
        ...


class OptimizerFactory(Protocol):
    """Makes optimizers; ``optimizer.name`` names one. A class with ``state_names`` is a factory."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the rows of ``OptimizerSetup.states``; the first is ``master``."""
        ...

    def __call__(self, setup: OptimizerSetup) -> Optimizer:
        """Make the optimizer of one rank.

        Raises:
            ValueError: this optimizer has no such option; names ``optimizer.options``.
        """
        ...


@dataclass(frozen=True, slots=True)
class DecayRun:
    """``start:stop`` of the shard of bucket ``bucket``; its parameters all decay, or none does."""

    bucket: int
    start: int
    stop: int
    shard_start: int
    decay: bool

    def of_states(self, states: torch.Tensor) -> torch.Tensor:
        """The run's columns of ``states`` [names, shard elements]; a view."""
        return states[:, self.shard_start : self.shard_start + self.stop - self.start]

    def of_buckets(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The run's part of its bucket's shard, of gradients or of parameters; a view."""
        return shards[self.bucket][self.start : self.stop]


def decay_runs(table: ParameterTable) -> Iterator[DecayRun]:
    """The runs of a rank's shard, in its order, without the state of routers.

    Padding belongs to the run before it, and stays zero.
    """
    counted = {plan.name for plan in table.buffers if plan.counted}
    numbers = {owned: number for number, owned in enumerate(table.shard_ranges)}
    marks: dict[ShardRange, list[tuple[int, bool]]] = {owned: [] for owned in numbers}
    for owned, piece, start, _ in table.overlaps():
        if owned.buffer not in counted:
            marks[owned].append((start - owned.start, piece.decay))
    for owned, pieces in marks.items():
        changes = [
            mark
            for index, mark in enumerate(pieces)
            if index == 0 or mark[1] != pieces[index - 1][1]
        ]  # empty for a shard that is all padding
        stops = [start for start, _ in changes[1:]] + [owned.stop - owned.start]
        for (start, decay), stop in zip(changes, stops, strict=False):
            yield DecayRun(numbers[owned], start, stop, owned.shard_offset + start, decay)

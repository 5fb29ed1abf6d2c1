"""What an optimizer is to the trainer, so that installed packages can add their own.

A rank owns a flat shard of the parameters, cut bucket by bucket (ZeRO-2). The trainer allocates the
shard's states, copies them into snapshots and restores them; an optimizer only declares their names
and updates them. One that updates every value by itself can treat its shard as a few runs of equal
weight decay (:func:`decay_runs`). docs/how-to/add-an-optimizer.md shows a whole optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megascale_job.config import OptimizerConfig
from megascale_job.sizes.parameter_table import ParameterTable, ShardRange
from megascale_trainer.optimizer.step_control import StepControl


@dataclass(frozen=True, slots=True)
class OptimizerSetup:
    """What an optimizer is made from.

    ``states`` is float32 [number of names, shard elements], one row per declared name; row 0 is the
    master parameters, the others are zero at first. The optimizer keeps it and updates it in place:
    the tensor is the byte image that a snapshot copies. ``table`` holds which parameter lies where
    in the shard. ``kernels``: whether fused Triton kernels run on this device. ``parameters`` names
    the logical parameters of the whole model, the same on every rank. ``all_reduce`` sums a tensor
    over all ranks in place, without waiting for the device, and leaves the same bits on all of
    them; every rank calls it, equally often.
    """

    config: OptimizerConfig
    table: ParameterTable
    states: torch.Tensor
    kernels: Literal["torch", "triton"]
    parameters: tuple[str, ...]
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

        Where ``control.apply`` is 0 no bit of states and parameters may change. The decision is a
        tensor on the device: choose with :func:`torch.where`, because gradients may be NaN then.

        Args:
            gradients: float32 shard of each bucket, summed over the global batch; may be
                overwritten.
            parameters: shard of each bucket in the compute dtype, which takes the rounded master.
            control: scale of the gradients, the apply flag, and how many of the updates before
                this one were skipped: what counts applied updates subtracts them on the device.
        """
        ...


class OptimizerFactory(Protocol):
    """What a name of ``optimizer.name`` stands for; a class with ``state_names`` is one."""

    @property
    def state_names(self) -> tuple[str, ...]:
        """Names of the rows of ``OptimizerSetup.states``; the first is ``master``."""
        ...

    def __call__(self, setup: OptimizerSetup) -> Optimizer:
        """Make the optimizer of one rank.

        Raises:
            ValueError: an option is not one of this optimizer's; names ``optimizer.options``.
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
    """The runs of a rank's shard, in its order.

    Padding inside a run goes with what stands before it, and stays zero.
    """
    numbers = {owned: number for number, owned in enumerate(table.shard_ranges)}
    marks: dict[ShardRange, list[tuple[int, bool]]] = {owned: [] for owned in numbers}
    for owned, piece, start, _ in table.overlaps():
        marks[owned].append((start - owned.start, piece.decay))
    for owned, pieces in marks.items():
        changes = [
            mark
            for index, mark in enumerate(pieces)
            if index == 0 or mark[1] != pieces[index - 1][1]
        ]  # a shard of nothing but padding has none
        stops = [start for start, _ in changes[1:]] + [owned.stop - owned.start]
        for (start, decay), stop in zip(changes, stops, strict=False):
            yield DecayRun(numbers[owned], start, stop, owned.shard_offset + start, decay)

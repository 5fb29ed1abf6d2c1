"""A shard as few runs of equal decay: for optimizers that update every value by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megascale_job.sizes.parameter_table import ParameterTable, ShardRange


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

"""The cp group as a stage sees it: this rank's part of the sequences, and attention over all."""

from __future__ import annotations

from dataclasses import dataclass

from megascale_kernels.attention import attention
from megascale_kernels.block_inner import Attend
from megascale_trainer.batch import MicroBatch
from megascale_trainer.parallel.context.ulysses import Ulysses
from megascale_trainer.parallel.groups import Group


@dataclass(frozen=True)
class ContextParallel:
    """The cp ranks hold consecutive parts of every sequence; one rank holds all of it."""

    group: Group

    @property
    def attend(self) -> Attend:
        """The attention of this rank's part of the sequence under a mask of the whole."""
        return attention if self.group.size == 1 else Ulysses(self.group)

    def part(self, batch: MicroBatch) -> MicroBatch:
        """This rank's part of a micro-batch: the one place where a sequence is cut over cp."""
        return batch.part(self.group.index, self.group.size)

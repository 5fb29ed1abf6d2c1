"""Runs what a step is going to launch once before it, while nothing is on its way between stages.

CUDA loads a kernel at its first launch, and the host may wait for all work on its device then. With
a receive posted, that is the end of two ranks: each waits for a message that the other's kernel has
to come before. So whatever would be launched for the first time is launched in time, as NVIDIA asks
of programs whose kernels wait for each other (CUDA C++ Programming Guide, lazy loading). The
collectives of tensor parallelism run along: its ranks rehearse together, and none is ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from megascale_trainer.batch import MicroBatch
from megascale_trainer.parallel.pipeline.given_gradient import given_gradient
from megascale_trainer.parallel.pipeline.graphs import GraphedStage
from megascale_trainer.parallel.pipeline.schedule import Action, split_chunks
from megascale_trainer.parallel.pipeline.stage import Stage
from megascale_trainer.parallel.weight_gradients import WeightGradients, run_all


class Rehearsal:
    """The rehearsals of one rank.

    Args:
        chunks: the rank's virtual stages.
        program: of a training step; where it splits a backward, a rehearsal does.
        weight_gradients: those of the chunks' operators.
        empty_hidden: makes an uninitialised [S / tp, B, H].
        forget: takes back what a backward has added to the buffers, and that there was one.
    """

    def __init__(
        self,
        chunks: Sequence[Stage | GraphedStage],
        program: Sequence[Action],
        weight_gradients: WeightGradients,
        empty_hidden: Callable[[], torch.Tensor],
        forget: Callable[[], None],
    ) -> None:
        self._chunks, self._weight_gradients = chunks, weight_gradients
        self._empty_hidden, self._forget = empty_hidden, forget
        self._split = split_chunks(program)
        self._seen: set[Hashable] = set()

    def before(self, batches: Sequence[MicroBatch]) -> None:
        """Rehearse what ``batches`` need and none before did; without gradients forwards alone.

        A single micro-batch needs nothing: no receive is posted ahead of a computation.
        """
        if len(batches) == 1:
            return
        for batch in batches:
            for chunk, stage in enumerate(self._chunks):
                kind = (torch.is_grad_enabled(), chunk, stage.kernels(batch))
                if kind not in self._seen:
                    self._seen.add(kind)
                    self._run(stage, batch, split=chunk in self._split)

    def _run(self, stage: Stage | GraphedStage, batch: MicroBatch, *, split: bool) -> None:
        outputs = [stage.run(self._received(stage), batch)[0] for _ in range(stage.at_once)]
        if not torch.is_grad_enabled():
            return
        for output in outputs:
            begin = output if stage.last else given_gradient(output, torch.zeros_like(output))
            if split:
                with self._weight_gradients.collected() as works:
                    torch.autograd.backward(begin)
                run_all(works)
            else:
                torch.autograd.backward(begin)
            # After each one: the last of a step's backwards would have gradients leave.
            self._forget()

    def _received(self, stage: Stage | GraphedStage) -> torch.Tensor | None:
        if stage.first:
            return None
        return self._empty_hidden().zero_().requires_grad_(torch.is_grad_enabled())

"""Programs of ranks that train with and without rehearsals, on CPUs too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.training import _groups, device_of, micro_batches

from megascale_job.loading import from_accepted
from megascale_trainer.parallel.pipeline.runtime import Rehearsal
from megascale_trainer.process.bootstrap import destroy_groups
from megascale_trainer.trainer import Trainer


def with_and_without(
    rank: int, world_size: int, folder: Path, *, job: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Program of one rank: steps, with an evaluation before the last one, in both ways.

    Returns the records and evaluation of both, exact to the last bit, and up to the end of each
    step how many kinds of micro-batches there were and how many rehearsals; ``new``: how many
    of the kinds were new in each step.
    """
    config = from_accepted(job)
    groups, device = _groups(config, rank, folder), device_of(rank)
    found: dict[str, Any] = {"kinds": [], "new": [], "rehearsed": []}
    kinds = set[int]()
    for name in ("without", "with"):
        trainer = Trainer(config, rank, groups, device)
        trainer.initialise()
        rehearsal = _rehearsal(trainer)
        trainer._pipeline._rehearsal = rehearsal if name == "with" else None
        lines = []
        for number in range(steps):
            dp = config.layout.coordinates(rank).dp
            batches = micro_batches(config, number, dp, device)
            if number == steps - 1:
                lines.append(repr(trainer.evaluate([batches])))
            lines.append(repr(trainer.train_step(batches).read()))
            if name == "with":
                before = len(kinds)
                kinds |= {batch.documents.kernels for batch in batches}
                found["new"].append(len(kinds) - before)
                found["kinds"].append(len(kinds))
                found["rehearsed"].append(len(rehearsal._seen))
        trainer.settle()
        found[name] = lines
    destroy_groups()
    return found


def _rehearsal(trainer: Trainer) -> Rehearsal:
    """As the trainer makes one on CUDA."""
    pipeline = trainer._pipeline
    return Rehearsal(
        *(pipeline.chunks, trainer._program, pipeline._weight_gradients),
        *(pipeline._empty_hidden, trainer._buffers.zero_gradients),
    )

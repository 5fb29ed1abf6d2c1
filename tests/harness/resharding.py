"""Programs for ranks that write a training state, or resume from one of another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.harness.training import start, step

from megascale_checkpoint import restore
from megascale_common.job.config import from_accepted
from megascale_trainer.process.bootstrap import destroy_groups

FURTHER_STEPS = 2


def train_and_keep(
    rank: int, world_size: int, folder: Path, *, job: dict[str, Any], kept_step: int
) -> dict[str, Any]:
    """Program of one rank: write the slot image of ``kept_step`` to a file, and train on.

    Returns:
        The losses of FURTHER_STEPS more steps.
    """
    trainer = start(from_accepted(job), rank, world_size, folder)
    for _ in range(kept_step):
        step(trainer, rank)
    slot = torch.zeros(trainer.shard_layout().slot_bytes, dtype=torch.uint8)
    trainer.state_copy_to(slot)
    (folder / f"image-{rank}").write_bytes(slot.numpy().tobytes())
    losses = [step(trainer, rank).read().loss for _ in range(FURTHER_STEPS)]
    destroy_groups()
    return {"losses": losses}


def load_and_train(
    rank: int,
    world_size: int,
    folder: Path,
    *,
    job: dict[str, Any],
    manifests: dict[str, str],
    kept_step: int,
) -> dict[str, list[float]]:
    """Program of one rank: load each named checkpoint, of any layout, and train on.

    Returns:
        By checkpoint, the losses of FURTHER_STEPS steps.
    """
    trainer = start(from_accepted(job), rank, world_size, folder)
    layout = trainer.shard_layout()
    losses = {}
    for name, uri in manifests.items():
        image = bytearray(layout.slot_bytes)
        restore.fill(uri, kept_step, rank, layout, memoryview(image))
        trainer.load_from(torch.frombuffer(image, dtype=torch.uint8))
        trainer.finish_load(kept_step)
        losses[name] = [step(trainer, rank).read().loss for _ in range(FURTHER_STEPS)]
    destroy_groups()
    return losses

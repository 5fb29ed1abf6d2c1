"""Programs for ranks that write a training state, or resume from one of another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.harness.training import CPU, GROUP_TIMEOUT_S, start, step
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_job.loading import from_accepted
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_trainer.process.bootstrap import destroy_groups
from megascale_trainer.save.daemon_link import DaemonLink, RankRegistration
from megascale_trainer.save.restore import restore

FURTHER_STEPS = 2
ROUTER_STATE = ".router.bias", ".router.load"


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
    slot = torch.zeros(trainer.state.shard_layout().slot_bytes, dtype=torch.uint8)
    trainer.state.state_copy_to(slot)
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
    daemon_socket: str,
) -> dict[str, Any]:
    """Program of one rank: load each named checkpoint, of any layout, and train on.

    The ranks restore together through one daemon, as those of a node do.

    Returns:
        By checkpoint, the losses of FURTHER_STEPS steps, the bytes that this rank read, and the
        state of its routers by name before those steps.
    """
    config = from_accepted(job)
    trainer = start(config, rank, world_size, folder)
    # Of the groups that the trainer made, only its world is needed here.
    world = trainer._groups.world
    sizes = {"tp": 1, "cp": 1, "dp": 1, "pp": 1}
    who = RankRegistration(folder.name, 1, rank, world_size, "", "", 2, sizes=sizes)
    link = DaemonLink(
        daemon_socket, who, trainer.state.shard_layout(), CPU, collective_timeout_s=GROUP_TIMEOUT_S
    )
    link.connect(CALL_TIMEOUT_S)
    losses, read_bytes, routers = {}, {}, {}
    for name, uri in manifests.items():
        plan = RestorePlan(RestoreSource.STORAGE, kept_step, 0, uri)
        restored = restore(link, plan, trainer.state, CPU, world)
        assert restored.source is RestoreSource.STORAGE
        trainer.finish_load(kept_step)
        routers[name] = {
            tensor: value.tolist()
            for tensor, value in trainer._buffers.values.items()
            if tensor.endswith(ROUTER_STATE)
        }
        losses[name] = [step(trainer, rank).read().loss for _ in range(FURTHER_STEPS)]
        read_bytes[name] = restored.read_bytes
    link.close()
    destroy_groups()
    return {"losses": losses, "read_bytes": read_bytes, "routers": routers}

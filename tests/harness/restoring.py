"""Ranks that only restore: a state of the trainer's layout, without a model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.harness.checkpoint_node import DaemonProcess, WorkerClient
from tests.harness.planned_restore import trainer_layouts
from tests.harness.waiting import CALL_TIMEOUT_S
from torch._C._distributed_c10d import FileStore

from megascale_job.restore import RestorePlan
from megascale_job.sizes.checkpoint_layout import ShardLayout
from megascale_trainer.parallel.groups import Group
from megascale_trainer.save.daemon_link import DaemonLink, RankRegistration
from megascale_trainer.save.restore import RestoreRefused, restore

CPU = torch.device("cpu")


class PlainState:
    """A slot image as a training state."""

    def __init__(self, layout: ShardLayout) -> None:
        self._layout = layout
        self.image = torch.full((layout.slot_bytes,), 255, dtype=torch.uint8)

    def shard_layout(self) -> ShardLayout:
        """How it lies in a slot."""
        return self._layout

    def state_image(self) -> torch.Tensor:
        """All of it."""
        return self.image

    def load_from(
        self, slot: torch.Tensor, ready: Callable[[int], object] = lambda stop: None
    ) -> None:
        """Take it from a slot."""
        self.image.copy_(slot[: self.image.numel()])


def restore_rank(
    rank: int,
    world_size: int,
    folder: Path,
    *,
    model: dict[str, Any],
    parallelism: dict[str, int],
    sockets: list[str],
    plan: dict[str, Any],
    attempt: int,
    uri: str = "",
    committer: str = "",
) -> dict[str, Any]:
    """Program of one rank: register and restore ``plan`` together with the others.

    Returns:
        ``kind`` "restored", or that of the refusal with its text as ``problem``; the source, the
        bytes read and the digest of the state.
    """
    store = FileStore(str(folder / "store"), world_size)
    timeout = timedelta(seconds=CALL_TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    world = Group("world", tuple(range(world_size)), rank, dist.group.WORLD, None)
    layout = trainer_layouts(model, parallelism)[rank]
    sizes = {"tp": 1, "cp": 1, "dp": world_size, "pp": 1}
    who = RankRegistration("job", attempt, rank, world_size, uri, committer, 2, sizes=sizes)
    state = PlainState(layout)
    link = DaemonLink(sockets[rank], who, layout, CPU, collective_timeout_s=CALL_TIMEOUT_S)
    link.connect(CALL_TIMEOUT_S)
    try:
        found = restore(link, RestorePlan.from_mapping(plan), state, CPU, world)
    except RestoreRefused as refused:
        return {"kind": refused.kind, "problem": str(refused), "file": refused.file}
    finally:
        link.close()
        dist.destroy_process_group()
    return {
        "kind": "restored",
        "source": str(found.source),
        "read_bytes": found.read_bytes,
        "small_state": found.small_state,
        "digest": digest(bytes(state.image.numpy())),
        "timeline": found.timeline.seconds,
        "step": found.plan.step,
        "passed_over": list(found.passed_over),
    }


def seal_image(
    worker: WorkerClient,
    step: int,
    image: bytearray,
    small_state: dict[str, Any],
    **fields: Any,
) -> None:
    """Seal a slot that holds ``image``; ``fields`` are further ones of the message."""
    acquired = worker.ask("acquire", step=step)
    assert acquired["kind"] == "acquired"
    slot = worker.slots[acquired["slot"]].view("u1")
    slot[: len(image)] = bytearray(image)
    sealed = worker.ask(
        "seal", slot=acquired["slot"], step=step, small_state=small_state, finite=True, **fields
    )
    assert sealed["kind"] == "sealed", sealed


def registered(
    daemon: DaemonProcess, layout: ShardLayout, rank: int, world_size: int, **given: Any
) -> WorkerClient:
    """A worker's connection."""
    worker = WorkerClient(daemon)
    answer = worker.register(rank=rank, world_size=world_size, layout=layout, slots=2, **given)
    assert answer["kind"] == "registered", answer
    return worker


def digest(image: bytes | bytearray) -> str:
    """Of a state."""
    return hashlib.sha256(image).hexdigest()

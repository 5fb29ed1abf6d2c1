"""What one rank of a benchmark does, for tests: a measurement, and steps without any peer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import measure
from benchmarks.options import entry_of
from benchmarks.session import Session
from benchmarks.silence import silence
from tests.harness.training import device_of
from torch._C._distributed_c10d import FileStore


def measured(
    rank: int, world_size: int, folder: Path, *, arguments: list[str], deadline: float = 0.0
) -> dict[str, Any]:
    """Program of one rank: the result of a measurement."""
    session = Session(
        rank, world_size, FileStore(str(folder / "store"), world_size), device_of(rank), deadline
    )
    result = measure(session, entry_of(arguments), folder)
    session.close()
    return result


def steps_without_peers(
    rank: int, world_size: int, folder: Path, *, arguments: list[str]
) -> dict[str, Any]:
    """Program of one rank: a leg of all ranks together; then each rank by itself.

    The others do nothing meanwhile: a single operation that still communicated would wait for a
    peer until the groups' timeout.
    """
    session = Session(
        rank, world_size, FileStore(str(folder / "store"), world_size), device_of(rank), 0.0
    )
    run = entry_of(arguments).run
    session.leg(run)
    groups, trainer = session._groups, session._trainers[run].trainer
    assert groups is not None
    handle = groups.world._handle
    losses: list[float] = []
    for alone in range(world_size):
        if rank == alone:
            with silence(groups, session._silent, ("all",)):
                session.steps(run, 2)
                losses.append(
                    trainer.train_step(session._trainers[run].batches.step(0)).read().loss
                )
        session.meet()
    assert groups.world._handle is handle
    masters = trainer.states()["master"]
    at = trainer.config.layout.coordinates(rank)
    computes_the_loss = at.tp == 0 and at.pp == trainer.config.parallelism.pp - 1
    return {
        "copied": session._silent.copied_bytes if session._silent else 0,
        "finite": bool(torch.isfinite(masters).all())
        and (math.isfinite(losses[0]) or not computes_the_loss),
    }

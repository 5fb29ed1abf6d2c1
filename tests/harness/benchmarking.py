"""What one rank of a benchmark does, for tests: a measurement, and steps without any peer."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from benchmarks.measure import measure
from benchmarks.options import entry_of
from benchmarks.session import Session
from benchmarks.silence import silence
from tests.harness.training import device_of
from torch._C._distributed_c10d import FileStore

from megascale_common.node.status_page import read_status_page
from megascale_trainer.launch.place import Place
from megascale_trainer.parallel.data.overlapped_buffers import OverlappedBuffers


def _session(rank: int, world_size: int, folder: Path, deadline: float) -> Session:
    place = Place(rank, world_size, rank, world_size)
    store = FileStore(str(folder / "store"), world_size)
    return Session(place, store, device_of(rank), folder, deadline)


def measured(
    rank: int, world_size: int, folder: Path, *, arguments: list[str], deadline: float = 0.0
) -> dict[str, Any]:
    """Program of one rank: the result of a measurement."""
    session = _session(rank, world_size, folder, deadline)
    result = measure(session, entry_of(arguments), folder)
    session.close()
    return result


def losses_of_both_loops(
    rank: int, world_size: int, folder: Path, *, arguments: list[str]
) -> dict[str, Any]:
    """Program of one rank: the losses of the same new trainer in the product's loop and bare."""
    session = _session(rank, world_size, folder, 0.0)
    found: dict[str, Any] = {}
    for loop in ("product", "bare"):
        run = entry_of([*arguments, "--initial", "exact", "--loop", loop]).run
        before = _tp_operations(folder, rank)
        found[loop] = session.leg(run, whole=True).losses
        found[f"{loop} operations"] = _tp_operations(folder, rank) - before
        session.forget()
    session.close()
    return found


def freed(rank: int, world_size: int, folder: Path, *, arguments: list[str]) -> dict[str, Any]:
    """Program of one rank: what is left of a trainer that was freed.

    Operations that nobody waits for, and bytes on the device, before there is a trainer, after its
    leg, and after it was freed; on CUDA, which lines of code allocated what was then left. Another
    trainer comes before all, and leaves what a process keeps.
    """
    session = _session(rank, world_size, folder, 0.0)
    run = entry_of([*arguments, "--loop", "bare"]).run
    session.leg(run)
    session.forget()
    if torch.cuda.is_available():
        torch.cuda.memory._record_memory_history("state", stacks="python")
    waiting, allocated = [0], [_allocated(session.device)]
    session.leg(run)
    [resident] = session._trainers.values()
    buffers = resident.trainer._buffers
    assert isinstance(buffers, OverlappedBuffers)
    gathers, trainer = buffers._gathers, weakref.ref(resident.trainer)
    waiting.append(len(gathers))
    allocated.append(_allocated(session.device))
    del resident, buffers
    session.forget()
    waiting.append(len(gathers))
    allocated.append(_allocated(session.device))
    left = _left(session.device)
    session.close()
    gone = trainer() is None
    return {"waiting": waiting, "allocated": allocated, "left": left, "gone": gone}


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _left(device: torch.device) -> dict[str, int]:
    """Bytes that are allocated, by the innermost lines of ours that asked for them; five."""
    if device.type != "cuda":
        return {}
    found: Counter[str] = Counter()
    for segment in torch.cuda.memory._snapshot(device)["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found[_asked_by(block.get("frames", []))] += block["size"]
    torch.cuda.memory._record_memory_history(None)
    return dict(found.most_common(5))


def _asked_by(frames: list[dict[str, Any]]) -> str:
    """The four innermost lines outside of torch, of a block's ``frames``."""
    ours = [each for each in frames if "torch" not in Path(each["filename"]).parts]
    return " < ".join(f"{Path(each['filename']).name}:{each['line']}" for each in ours[:4])


def _tp_operations(folder: Path, rank: int) -> int:
    """Of the status page; 0 before there is one."""
    page = read_status_page(folder / f"status-1-rank-{rank}")
    return 0 if page is None else sum(row.entered for row in page.rows if row.name == "tp")


def steps_without_peers(
    rank: int, world_size: int, folder: Path, *, arguments: list[str]
) -> dict[str, Any]:
    """Program of one rank: a leg of all ranks together; then each rank by itself.

    The others do nothing meanwhile: a single operation that still communicated would wait for a
    peer until the groups' timeout.
    """
    session = _session(rank, world_size, folder, 0.0)
    run = entry_of([*arguments, "--loop", "bare"]).run
    session.leg(run)
    [resident] = session._trainers.values()
    groups, trainer = session._groups, resident.trainer
    assert groups is not None
    handle = groups.world._handle
    losses: list[float] = []
    for alone in range(world_size):
        if rank == alone:
            with silence(groups, session._silent, ("all",)):
                session.steps(run, 2)
                assert resident.batches is not None
                losses.append(trainer.train_step(resident.batches.step(0)).read().loss)
        session.meet()
    assert groups.world._handle is handle
    masters = trainer.state.states()["master"]
    at = trainer.config.layout.coordinates(rank)
    computes_the_loss = at.tp == 0 and at.pp == trainer.config.parallelism.pp - 1
    return {
        "copied": session._silent.copied_bytes if session._silent else 0,
        "finite": bool(torch.isfinite(masters).all())
        and (math.isfinite(losses[0]) or not computes_the_loss),
    }

"""Time from the last byte of a copy to its seal, with checksums that follow the bytes and without.

    python benchmarks/seal_lag.py --mib 2048 --repeats 7

A thread copies a state into a slot of the checkpoint daemon's code in parts of 256 MiB, as a
trainer on a CPU does. It notes each part (`following`) or none (`behind`), in turn. `lag_s` is the
time from the end of the copy to the seal, `copy_s` that of the copy.

The last line of stdout is one JSON object: least, middle and largest of each figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from megascale_checkpoint.concurrency import Pools, Signal
from megascale_checkpoint.memory.registration import RegisteredRank
from megascale_checkpoint.memory.staging import SlotMemory, StagingFolder
from megascale_checkpoint.save.committer_client import CommitterClient
from megascale_checkpoint.save.rank_snapshots import RankSnapshots
from megascale_checkpoint.serve.jobs import JobCheckpoints
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece
from megascale_trainer.save.host_copy import parts

PIECE_MIB = 32
LEGS = ("following", "behind")


def layout_of(mib: int) -> ShardLayout:
    """Pieces of 32 MiB each, one after the other."""
    size = PIECE_MIB * 2**20 // 4
    pieces = tuple(
        ShardPiece(
            f"layers.{number}.q.weight", "master", "float32",
            (size,), (0,), (size,), 0, size, 4 * size * number, primary=True,
        )
        for number in range(mib // PIECE_MIB)
    )  # fmt: skip
    return ShardLayout(pieces, 4 * size * len(pieces))


def copy(state: torch.Tensor, memory: SlotMemory, *, notes: bool) -> float:
    """Copy the state into a slot; returns the seconds that it took."""
    slot = torch.frombuffer(memory.view, dtype=torch.uint8)
    began_s = time.perf_counter()
    for start, stop in parts(0, state.numel()):
        slot[start:stop].copy_(state[start:stop])
        if notes:
            memory.landed_bytes = stop
    return time.perf_counter() - began_s


async def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both legs in turn."""
    layout, pools = layout_of(options.mib), Pools()
    staging = StagingFolder(folder, "benchmark", "n0", "i1")
    registration = RegisteredRank(
        "job", 1, 0, 1, "", "", 2, layout=layout, digest=layout.digest(), layout_info={}
    )
    job = JobCheckpoints("job", Signal())
    snapshots = await RankSnapshots.create(
        registration, job, staging, pools, CommitterClient("token")
    )
    state = torch.ones(layout.slot_bytes, dtype=torch.uint8)
    found: dict[str, list[tuple[float, float]]] = {leg: [] for leg in LEGS}
    for step in range(1, 2 * (options.repeats + 1) + 1):
        leg = LEGS[step % 2]
        index = snapshots.acquire(step)
        assert index is not None
        memory = snapshots.memories[index]
        copy_s = await asyncio.to_thread(copy, state, memory, notes=leg == "following")
        began_s = time.perf_counter()
        snapshots.seal(index, step, {}, finite=True, persist=False)
        await snapshots.sealed()
        found[leg].append((copy_s, time.perf_counter() - began_s))
    await snapshots.stop(0.0)
    staging.free(snapshots.memories)
    pools.close()
    return {leg: spread(each[1:]) for leg, each in found.items()}  # the first one warms up


def spread(found: list[tuple[float, float]]) -> dict[str, list[float]]:
    """Least, middle and largest of both times."""
    columns = zip(("copy_s", "lag_s"), zip(*found, strict=True), strict=True)
    return {name: [round(f(each), 5) for f in (min, median, max)] for name, each in columns}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048, help="size of the state")
    parser.add_argument("--repeats", type=int, default=7, help="of each leg")
    options = parser.parse_args()
    if options.mib < PIECE_MIB or options.repeats < 1:
        parser.error(f"--mib is at least {PIECE_MIB}, --repeats at least 1")
    with tempfile.TemporaryDirectory(prefix="megascale-lag-", dir="/dev/shm") as folder:
        figures = asyncio.run(measure(options, Path(folder)))
    facts = {"mib": options.mib, "repeats": options.repeats, "cores": os.cpu_count()}
    print(json.dumps({**facts, "load": os.getloadavg()[0], "legs": figures}))


if __name__ == "__main__":
    main()

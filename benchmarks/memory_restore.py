"""What it takes to bring a state back from the daemon's memory: each part, and all of it.

    python benchmarks/memory_restore.py --gigabytes 6.4
    python benchmarks/memory_restore.py --device cpu --gigabytes 0.25

One state of a rank lies sealed in the slots of a real checkpoint daemon. A new process for each
line of the report then restores it, as a worker does that follows a killed one: it registers, asks
for the state, and loads it while the daemon compares the checksums.

- at_once: registered and restored at once;
- ahead: with --ahead-s between the two, in which a worker meets the others and builds its trainer;
- verify, map, pin, copy: the parts one after the other, each alone.

The last line of stdout is one JSON object: seconds and GB/s of each, beside the copy from memory
that is pinned already (the limit) and the share of it. Exit status: 0, 1 where a restore failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.checkpoint_dcp import Daemon

from megascale_checkpoint.checksums import checksum
from megascale_common.node.process import arm_parent_death, child_environment
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece
from megascale_trainer.save.daemon_link import DaemonLink, RankRegistration
from megascale_trainer.save.host_copy import Landed, parts
from megascale_trainer.save.mapped_slots import _pin, _populate
from megascale_trainer.save.restore import MemoryLook, restore
from megascale_trainer.save.snapshot import Snapshotter

PIECES, STEP, LIMIT_S = 96, 5, 300.0
THREADS = (1, 4, 8)  # of the checksums
ROUNDS = 3


def layout_of(size_bytes: int) -> ShardLayout:
    """So many pieces of equal size."""
    each = size_bytes // PIECES // 4096 * 1024
    pieces = tuple(
        ShardPiece(
            f"v{n}", "master", "float32", (PIECES * each,), (n * each,), ((n + 1) * each,),
            0, each, n * each * 4, primary=True,
        )
        for n in range(PIECES)
    )  # fmt: skip
    return ShardLayout(pieces, PIECES * each * 4)


class State:
    """One flat buffer on the device."""

    def __init__(self, layout: ShardLayout, device: torch.device) -> None:
        self._layout = layout
        self._image = torch.zeros(layout.slot_bytes, dtype=torch.uint8, device=device)

    def shard_layout(self) -> ShardLayout:
        """See Trainer."""
        return self._layout

    def state_image(self) -> torch.Tensor:
        """See Trainer."""
        return self._image

    def state_copy_to(self, slot: torch.Tensor, landed: Landed = lambda stop: None) -> None:
        """See Trainer."""
        for start, stop in parts(0, self._image.numel()):
            slot[start:stop].copy_(self._image[start:stop], non_blocking=True)
            landed(stop)

    def load_from(
        self, slot: torch.Tensor, ready: Callable[[int], object] = lambda stop: None
    ) -> None:
        """See Trainer."""
        for start, stop in parts(0, self._image.numel()):
            ready(stop)
            self._image[start:stop].copy_(slot[start:stop], non_blocking=True)


def timed(work: Callable[[], object], device: torch.device) -> float:
    """Seconds until ``work`` has ended on the host and the device."""
    began_s = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began_s


def run_as_worker(task: dict[str, Any]) -> dict[str, Any]:
    """One process: ``seal`` the state, restore it, or time the parts of that."""
    device = torch.device("cuda", 0) if task["device"] == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    layout = layout_of(task["size_bytes"])
    state, attempt = State(layout, device), task["attempt"]
    sizes = {"tp": 1, "cp": 1, "dp": 1, "pp": 1}
    who = RankRegistration("benchmark", attempt, 0, 1, "", "", 2, sizes=sizes)
    began_s = time.perf_counter()
    link = DaemonLink(task["socket"], who, layout, device, collective_timeout_s=LIMIT_S).connect()
    registered_s = time.perf_counter() - began_s
    try:
        if task["name"] == "seal":
            return _seal(link, state, device)
        plan = RestorePlan(RestoreSource.MEMORY, STEP, 1)
        if task["name"] == "parts":
            return _parts(link, state, device)
        look = MemoryLook(link, plan)
        look.poll(task["ahead_s"])
        time.sleep(task["ahead_s"])
        found: list[Any] = []
        spent_s = timed(lambda: found.append(restore(link, plan, state, device, look=look)), device)
        whole = bool(state.state_image()[:: 1 << 20].eq(7).all())
        timeline = {name: round(value, 4) for name, value in found[0].timeline.seconds.items()}
        return {"registered_s": registered_s, "restore_s": spent_s, "whole": whole, **timeline}
    finally:
        link.close()


def _seal(link: DaemonLink, state: State, device: torch.device) -> dict[str, Any]:
    state.state_image().fill_(7)
    link.wait_prepared(LIMIT_S)
    snapshots = Snapshotter(link, state, device)
    if snapshots.reserve(STEP):
        raise RuntimeError("no slot for the state")
    snapshots.take(STEP, {"consumed_samples": 0}, votes=0)
    snapshots.settle(STEP, {}, finite=True)
    snapshots.seal_if_copied(wait=True)
    return {}


def _parts(link: DaemonLink, state: State, device: torch.device) -> dict[str, Any]:
    """Every part alone: of a slot that this process has not touched."""
    slot = link.slot(0)
    image = memoryview(slot.numpy())  # type: ignore[arg-type]
    found: dict[str, Any] = {"map_s": timed(lambda: _populate_all(slot), device)}
    size = state.state_image().numel()
    cuda = device.type == "cuda"
    if cuda:
        state.load_from(slot)
        found["copy_pageable_s"] = timed(lambda: state.load_from(slot), device)
        cut = [slot[start:stop] for start, stop in parts(0, size)]
        found["pin_s"] = timed(lambda: [_pin(part, device) for part in cut], device)
    found["copy_s"] = min(timed(lambda: state.load_from(slot), device) for _ in range(ROUNDS))
    ends = [size * n // PIECES for n in range(PIECES + 1)]
    for threads in THREADS:
        with ThreadPoolExecutor(threads) as pool:
            shares = [image[start:stop] for start, stop in itertools.pairwise(ends)]
            found[f"verify_{threads}_threads_s"] = min(
                timed(lambda pool=pool, shares=shares: list(pool.map(checksum, shares)), device)
                for _ in range(ROUNDS)
            )
    return found


def _populate_all(slot: torch.Tensor) -> None:
    for start, stop in parts(0, slot.numel() // mmap.PAGESIZE * mmap.PAGESIZE):
        _populate(slot[start:stop])


def in_a_process(task: dict[str, Any]) -> dict[str, Any]:
    """What a new process finds."""
    command = [sys.executable, __file__, "--as-worker", json.dumps(task)]
    done = subprocess.run(
        command, env=child_environment(), stdout=subprocess.PIPE, text=True, timeout=LIMIT_S,
        check=True,
    )  # fmt: skip
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory(prefix="memory-restore-") as name, Daemon(Path(name)) as own:
        size_bytes = layout_of(int(options.gigabytes * 1e9)).slot_bytes
        task = {
            "device": options.device, "size_bytes": size_bytes, "socket": str(own.socket),
            "ahead_s": 0.0,
        }  # fmt: skip
        in_a_process({**task, "name": "seal", "attempt": 1})
        lines = [("at_once", 0.0)] * options.rounds + [("ahead", options.ahead_s)] * options.rounds
        runs: dict[str, list[dict[str, Any]]] = {"at_once": [], "ahead": []}
        for attempt, (kind, ahead_s) in enumerate(lines, 2):
            run = {**task, "name": kind, "attempt": attempt, "ahead_s": ahead_s}
            runs[kind].append(in_a_process(run))
        alone = in_a_process({**task, "name": "parts", "attempt": len(lines) + 2})
    rates = {name: round(size_bytes / seconds / 1e9, 2) for name, seconds in alone.items()}
    best = {kind: min(found, key=lambda one: one["restore_s"]) for kind, found in runs.items()}
    return {
        "device": options.device,
        "gigabytes": round(size_bytes / 1e9, 3),
        "limit_gb_per_s": rates["copy_s"],
        "share_of_limit": {
            kind: round(alone["copy_s"] / one["restore_s"], 3) for kind, one in best.items()
        },
        "restores": runs,
        "parts_s": {name: round(seconds, 4) for name, seconds in alone.items()},
        "parts_gb_per_s": rates,
        "whole": all(one["whole"] for found in runs.values() for one in found),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }


def main() -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--gigabytes", type=float, default=6.4, help="of the state")
    parser.add_argument("--ahead-s", type=float, default=1.5, help="a worker's meet and build")
    parser.add_argument("--rounds", type=int, default=3)
    found = measure(parser.parse_args())
    print(json.dumps(found))
    return 0 if found["whole"] else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-worker"]:
        arm_parent_death()
        print(json.dumps(run_as_worker(json.loads(sys.argv[2]))), flush=True)
        raise SystemExit(0)
    raise SystemExit(main())

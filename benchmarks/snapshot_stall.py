"""How long a snapshot holds up the training thread, beside a real checkpoint daemon.

    python benchmarks/snapshot_stall.py --megabytes 336 --steps 60
    python benchmarks/snapshot_stall.py --device cuda --megabytes 12000 --steps 200

One rank whose step is a matrix product of --step-ms and an update that overwrites the state. After
each step, or every --interval of them, a snapshot is taken; with --store it is also persisted to a
folder. Measured is the time inside the calls that the training thread makes for it, per snapshot,
the wait before the update included, and how much of it the thread worked itself. --hung-s stops the
daemon (SIGSTOP) for so long in the middle.
The last line of stdout is one JSON object: times in ms, steps with and without a snapshot.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megascale_common.node.process import child_environment
from megascale_common.node.status_page import StatusPageWriter
from megascale_job.config import CheckpointConfig, JobConfig
from megascale_job.loading import from_accepted
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece
from megascale_job.sizes.memory import snapshots_in_flight
from megascale_trainer.process.snapshot_steps import SnapshotSteps
from megascale_trainer.save.daemon_link import DaemonLink, RankRegistration
from megascale_trainer.save.host_copy import Landed
from megascale_trainer.save.snapshot import Snapshotter

START_TIMEOUT_S = 60.0
PIECES = 64  # a checksum runs over one of them


class State:
    """A training state of ``count`` float32 values: one flat buffer, as a trainer's."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.values = torch.zeros(count, device=device)

    def shard_layout(self) -> ShardLayout:
        """Equal pieces."""
        each = self.values.numel() // PIECES
        pieces = tuple(
            ShardPiece(
                f"p{index}", "master", "float32", (each,), (0,), (each,), 0, each,
                index * each * 4, primary=True,
            )
            for index in range(PIECES)
        )  # fmt: skip
        return ShardLayout(pieces, self.values.numel() * 4)

    def state_image(self) -> torch.Tensor:
        """All bytes."""
        return self.values.view(torch.uint8)

    def state_copy_to(self, slot: torch.Tensor, landed: Landed = lambda stop: None) -> None:
        """Enqueue the copy."""
        image = self.values.view(torch.uint8)
        slot[: image.numel()].copy_(image, non_blocking=True)
        landed(image.numel())


def main() -> None:
    """Measure and print."""
    options = _options()
    with tempfile.TemporaryDirectory() as name, _daemon(Path(name)) as daemon:
        print(json.dumps(_measure(options, Path(name), daemon)))


def _measure(options: argparse.Namespace, folder: Path, daemon: int) -> dict[str, Any]:
    device = torch.device(options.device)
    state = State(options.megabytes * 10**6 // 4 // PIECES * PIECES, device)
    config = _job(options, folder)
    uri = str(folder / "checkpoints") if options.store else ""
    registration = RankRegistration(
        "stall", 1, 0, 1, uri, (folder / "address").read_text().strip() if uri else "",
        options.slots, snapshots_in_flight(options.interval),
        sizes={"tp": 1, "cp": 1, "dp": 1, "pp": 1},
    )  # fmt: skip
    began_s = time.monotonic()
    where = str(folder / "socket"), registration, state.shard_layout(), device
    link = DaemonLink(*where, collective_timeout_s=120.0).connect()
    snapshots = Snapshotter(link, state, device, verified_share=options.verified_share)
    registered_s = time.monotonic() - began_s
    page = StatusPageWriter(folder / "page", rank=0, attempt=1)
    steps = SnapshotSteps(config, page, snapshots)
    product = _Product(device, options.step_ms)
    held = {part: dict[int, float]() for part in ("reserve", "update", "take")}
    cpu_ms: dict[int, float] = {}
    for step in range(1, options.steps + 1):
        if options.hung_s and step == options.steps // 2:
            os.kill(daemon, signal.SIGSTOP)
            threading.Timer(options.hung_s, os.kill, (daemon, signal.SIGCONT)).start()
        began_cpu_s = time.thread_time()
        with _watch(held["reserve"], step):
            vote = steps.vote(step)
            copied = steps.copied
        reserve_cpu_s = time.thread_time() - began_cpu_s
        product.run()
        with _watch(held["update"], step):
            if copied is not None:
                copied.wait()
        state.values.add_(1.0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began_cpu_s = time.thread_time()
        with _watch(held["take"], step):
            steps.settle(step, vote, 0, finite=True)
            steps.after(step, 0)
        cpu_ms[step] = 1000.0 * (time.thread_time() - began_cpu_s + reserve_cpu_s)
    skipped = snapshots.skipped
    snapshots.close()
    measured = range(3, options.steps)  # the last step waits on purpose
    parts = {part: [times[step] for step in measured] for part, times in held.items()}
    return {
        "megabytes": options.megabytes,
        "device": options.device,
        "interval": options.interval,
        "steps": options.steps,
        "skipped": skipped,
        "step_ms": round(product.median_ms(), 1),
        "registration_s": round(registered_s, 3),
        "held_ms": _spread([sum(times) for times in zip(*parts.values(), strict=True)]),
        "parts_ms": {part: _spread(times) for part, times in parts.items()},
        # What the thread itself worked: on a busy host the rest is other processes' time.
        "cpu_ms": _spread([cpu_ms[step] for step in measured]),
        "load": os.getloadavg()[0],
    }


def _spread(times_ms: list[float]) -> dict[str, float]:
    ordered = sorted(times_ms)
    return {
        "p50": round(statistics.median(ordered), 2),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))], 2),
        "max": round(ordered[-1], 2),
    }


@contextmanager
def _watch(times_ms: dict[int, float], step: int) -> Iterator[None]:
    began_s = time.perf_counter()
    yield
    times_ms[step] = 1000.0 * (time.perf_counter() - began_s)


class _Product:
    """Matrix products that take about ``step_ms``."""

    def __init__(self, device: torch.device, step_ms: float) -> None:
        size = 8192 if device.type == "cuda" else 512
        self._values = torch.randn(size, size, device=device)
        self._device, self._times_ms = device, list[float]()
        self._count = 20
        fastest_ms = min(self.run() for _ in range(5))
        self._count = max(1, round(self._count * step_ms / fastest_ms))
        self._times_ms.clear()

    def run(self) -> float:
        """One step's compute; returns its time in ms."""
        began_s = time.perf_counter()
        for _ in range(self._count):
            self._values @ self._values
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._times_ms.append(1000.0 * (time.perf_counter() - began_s))
        return self._times_ms[-1]

    def median_ms(self) -> float:
        """Median time of a step's compute."""
        return statistics.median(self._times_ms)


def _job(options: argparse.Namespace, folder: Path) -> JobConfig:
    checkpoint: dict[str, Any] = {"uri": str(folder), "interval_steps": options.interval}
    if "snapshot_interval_steps" in CheckpointConfig.__dataclass_fields__:
        checkpoint |= {"snapshot_interval_steps": options.interval}
    return from_accepted(
        {
            "name": "stall",
            "model": {
                "layers": 1, "hidden_size": 64, "heads": 1, "vocab_size": 64,
                "sequence_length": 8,
            },
            "training": {"steps": options.steps, "global_batch_size": 1},
            "checkpoint": checkpoint,
        }
    )  # fmt: skip


@contextmanager
def _daemon(folder: Path) -> Iterator[int]:
    (folder / "token").write_text("token-of-the-benchmark")
    command = [
        sys.executable, "-m", "megascale_checkpoint", "--cluster", "stall", "--node", "n0",
        "--incarnation", "i1", "--run-folder", str(folder), "--socket", str(folder / "socket"),
        "--token-file", str(folder / "token"), "--address-file", str(folder / "address"),
        "--staging-folder", f"/dev/shm/megascale-stall-{os.getpid()}",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=child_environment(), stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (folder / "address").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the daemon did not start: {(folder / 'log').read_text()}")
            time.sleep(0.02)
        yield process.pid
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--megabytes", type=int, default=336, help="size of the state")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--step-ms", type=float, default=150.0, help="compute of one step")
    parser.add_argument("--interval", type=int, default=1, help="steps between two snapshots")
    parser.add_argument("--slots", type=int, default=0, help="0: as many as the daemon chooses")
    parser.add_argument("--verified-share", type=float, default=0.01, help="see verify_d2h")
    parser.add_argument("--store", action="store_true", help="persist to a temporary folder")
    parser.add_argument("--hung-s", type=float, default=0.0, help="stop the daemon for so long")
    return parser.parse_args()


if __name__ == "__main__":
    main()

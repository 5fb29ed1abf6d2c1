"""Step times of the real trainer with a snapshot after every step, and without, in one run.

    python benchmarks/snapshot_steps.py --preset 7b --layers 4 --global-batch 32
    python benchmarks/snapshot_steps.py --device cpu --ranks 2 --preset tiny --block-steps 8

Ranks train with a real checkpoint daemon beside them, in blocks of --block-steps: without
snapshots (A), with one into memory after each step (B), A, B, A, then as B with persistence as
often as a store of --store-mib-per-s can (C), for --store-steps. In each block the first steps are
not counted.

The last line of stdout is one JSON object: times of A, B and C, by how much B is slower than the
blocks of A beside it, what the training thread was held in the calls for snapshots (ms, over all
ranks), the rate of the copies (GB/s), snapshots skipped, what was persisted (GB/s). Exit status: 0,
1 if a snapshot was skipped in B, or B is more than --most-slower slower than A.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.batches import Batches
from benchmarks.checkpoint_dcp import Daemon
from benchmarks.presets import Run, job
from benchmarks.timing import StepClock
from torch._C._distributed_c10d import FileStore

from megascale.v1 import checkpoint_pb2, checkpoint_pb2_grpc
from megascale_common.node.messages import ReplicaOrders
from megascale_common.node.process import arm_parent_death, child_environment
from megascale_common.node.status_page import StatusPageWriter
from megascale_common.service.channel import open_channel
from megascale_job.config import JobConfig
from megascale_job.sizes.checkpoint_layout import ShardLayout
from megascale_job.sizes.memory import snapshots_in_flight
from megascale_trainer.process.bootstrap import Rendezvous, create_groups, destroy_groups
from megascale_trainer.process.snapshot_steps import SnapshotSteps
from megascale_trainer.process.step_loop import STEP_POLL_S
from megascale_trainer.save.daemon_link import DaemonLink, RankRegistration
from megascale_trainer.save.host_copy import Landed
from megascale_trainer.save.snapshot import Snapshotter
from megascale_trainer.trainer import StepResult, Trainer

BLOCKS = "ABABAC"
UNCOUNTED_STEPS = 4  # of each block: the snapshots of the block before may still be on their way
PREPARE_TIMEOUT_S, GROUP_TIMEOUT_S = 240.0, 300.0
NEVER_STEPS = 10**9


@dataclass(frozen=True, slots=True)
class Options:
    """What the parent gives a rank."""

    rank: int
    ranks: int
    device: str
    preset: str
    layers: int
    global_batch: int
    tp: int
    blocks: str
    block_steps: int
    store_steps: int
    store_mib_per_s: float
    verified_share: float
    slots: int
    folder: str
    socket: str
    address: str
    token: str
    peer: str


class TimedState:
    """A trainer's state whose copies are timed on their own stream."""

    def __init__(self, trainer: Trainer, device: torch.device) -> None:
        self._trainer, self._cuda = trainer, device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._times_s: list[float] = []

    def shard_layout(self) -> ShardLayout:
        """See Trainer."""
        return self._trainer.state.shard_layout()

    def state_image(self) -> torch.Tensor:
        """See Trainer."""
        return self._trainer.state.state_image()

    def state_copy_to(self, slot: torch.Tensor, landed: Landed = lambda stop: None) -> None:
        """See Trainer."""
        if not self._cuda:
            began_s = time.perf_counter()
            self._trainer.state.state_copy_to(slot, landed)
            self._times_s.append(time.perf_counter() - began_s)
            return
        pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        pair[0].record()
        self._trainer.state.state_copy_to(slot, landed)
        pair[1].record()
        self._events.append((pair[0], pair[1]))

    def rates(self) -> list[float]:
        """GB/s of each copy; waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
            self._times_s = [begin.elapsed_time(end) / 1e3 for begin, end in self._events]
        size = self.state_image().numel()
        return [size / seconds / 1e9 for seconds in self._times_s]


class Rank:
    """The steps of one rank."""

    def __init__(self, options: Options) -> None:
        self.options = options
        cuda = options.device == "cuda"
        self.device = torch.device("cuda", options.rank) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        run = Run(
            preset=options.preset, layers=options.layers, tp=options.tp,
            global_batch=options.global_batch, kernels="auto" if cuda else "torch",
            overlap=("tp", "pp", "dp") if cuda else (), steps=10,
        )  # fmt: skip
        self.config = job(run, options.ranks, cuda=cuda)
        store = FileStore(str(Path(options.folder) / "meet"), options.ranks)
        self.groups = create_groups(
            self.config.layout, options.rank, Rendezvous(store, self.device, GROUP_TIMEOUT_S)
        )
        self.page = StatusPageWriter(
            Path(options.folder) / f"page-{options.rank}", rank=options.rank, attempt=1
        )
        self.trainer = Trainer(self.config, options.rank, self.groups, self.device, self.page)
        states = self.trainer.state.states()
        for name, values in states.items():
            if name == "master":
                values.normal_(0.0, 0.01)
        self.trainer.finish_load(0)
        self.batches = Batches(self.config, options.rank, self.device)
        self.state = TimedState(self.trainer, self.device)
        self._open_attempt()
        began_s = time.monotonic()
        self.snapshots = self._snapshotter()
        self.snapshots.link.wait_prepared(PREPARE_TIMEOUT_S)
        self.prepared_s = time.monotonic() - began_s
        self.step = 0

    def measure(self) -> dict[str, Any]:
        """All blocks."""
        blocks = []
        for kind in self.options.blocks:
            steps = self.options.store_steps if kind == "C" else self.options.block_steps
            skipped = self.snapshots.skipped
            began, before = time.monotonic(), self._committed()
            times_s, held_ms = self._block(kind, steps)
            blocks.append(
                {
                    "kind": kind,
                    "times_s": times_s,
                    "held_ms": held_ms,
                    "skipped": self.snapshots.skipped - skipped,
                    "seconds": time.monotonic() - began,
                    "committed": self._committed() - before,
                }
            )
        rates = self.state.rates()
        self.snapshots.close()
        return {
            "blocks": blocks,
            "rates": rates,
            "replicas": self.snapshots.replicas.count,
            "prepared_s": self.prepared_s,
            "state_bytes": self.state.state_image().numel(),
        }

    def _block(self, kind: str, count: int) -> tuple[list[float], list[float]]:
        steps = None if kind == "A" else self._steps(persist=kind == "C")
        held_ms: list[float] = []
        previous: tuple[int, StepResult] | None = None
        self._meet()
        clock = StepClock(self.device)
        for _ in range(count):
            self.step += 1
            began_s = time.perf_counter()
            vote = steps.vote(self.step) if steps else 0
            copied = steps.copied if steps else None
            if copied is not None:
                self.trainer.state.wait_before_update(copied)
            held_s = time.perf_counter() - began_s
            result = self.trainer.train_step(self.batches.step(self.step), vote=vote)
            clock.lap()
            votes = self._read(previous, steps)
            began_s = time.perf_counter()
            if steps is not None:
                if previous is not None:
                    steps.settle(previous[0], votes, 0, finite=True)
                steps.after(self.step, 0)
                # As the step loop: the answer says whether the copy to the peer has ended.
                self.snapshots.report_time(self.step, 0.0)
            held_ms.append(1e3 * (held_s + time.perf_counter() - began_s))
            previous = self.step, result
        times_s = clock.times_s()
        if steps is not None:
            self._end(steps, previous)
        return times_s[UNCOUNTED_STEPS:], held_ms[UNCOUNTED_STEPS:]

    def _end(self, steps: SnapshotSteps, previous: tuple[int, StepResult] | None) -> None:
        """One more step, which takes the snapshot that was voted for; then none is on its way."""
        assert previous is not None
        self.step += 1
        copied = steps.copied
        if copied is not None:
            self.trainer.state.wait_before_update(copied)
        result = self.trainer.train_step(self.batches.step(self.step))
        steps.settle(previous[0], self._read(previous, steps), 0, finite=True)
        steps.after(self.step, 0)
        self._read((self.step, result), steps)
        self.snapshots.settle(self.step, {}, finite=True)
        self.snapshots.seal_if_copied(wait=True)

    @staticmethod
    def _read(launched: tuple[int, StepResult] | None, steps: SnapshotSteps | None) -> int:
        """The votes, once the device is done with the step, as the step loop waits for it."""
        if launched is None:
            return 0
        while not launched[1].ready():
            if steps is not None:
                steps.poll()
            time.sleep(STEP_POLL_S)
        return launched[1].read().votes

    def _steps(self, *, persist: bool) -> SnapshotSteps:
        checkpoint = replace(
            self.config.checkpoint,
            uri=self._uri,
            snapshot_interval_steps=1,
            interval_steps=1 if persist else NEVER_STEPS,
        )
        training = replace(self.config.training, steps=NEVER_STEPS)
        config: JobConfig = replace(self.config, checkpoint=checkpoint, training=training)
        return SnapshotSteps(config, self.page, self.snapshots, self.step)

    def _snapshotter(self) -> Snapshotter:
        options, sizes = self.options, self.config.parallelism
        registration = RankRegistration(
            job="benchmark",
            attempt=1,
            rank=options.rank,
            world_size=options.ranks,
            uri=self._uri,
            committer_endpoint=options.address,
            slots=options.slots,
            sizes={"tp": sizes.tp, "cp": sizes.cp, "dp": sizes.dp, "pp": sizes.pp, "vpp": 1},
            in_flight=snapshots_in_flight(1),
            local_ranks=1 if options.peer else options.ranks,
            max_write_mib_per_s=options.store_mib_per_s,
            replicas=ReplicaOrders(target=options.peer, source="", bytes_per_s=0),
        )
        where = options.socket, registration, self.state.shard_layout(), self.device
        link = DaemonLink(*where, collective_timeout_s=GROUP_TIMEOUT_S).connect()
        how = {"verified_share": options.verified_share, "replicas": bool(options.peer)}
        return Snapshotter(link, self.state, self.device, **how)

    @property
    def _uri(self) -> str:
        return str(Path(self.options.folder) / "checkpoints")

    def _committed(self) -> int:
        return len(list(Path(self._uri, "commits").glob("*.json")))

    def _meet(self) -> None:
        self.groups.world.all_reduce(torch.zeros(1, device=self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _open_attempt(self) -> None:
        """Rank 0 has it opened, as the driver does."""
        options = self.options

        async def call() -> None:
            async with open_channel(options.address, options.token) as channel:
                stub: Any = checkpoint_pb2_grpc.CheckpointServiceStub(channel)
                request = checkpoint_pb2.OpenAttemptRequest(
                    job="benchmark", uri=self._uri, attempt=1, world_size=options.ranks,
                    keep_latest=1,
                )  # fmt: skip
                await stub.OpenAttempt(request)

        if options.rank == 0:
            asyncio.run(call())
        self._meet()


def summary(options: argparse.Namespace, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The ranks' figures as one: a step waits for its slowest rank."""
    blocks = found[0]["blocks"]
    slowest = [
        [
            max(times)
            for times in zip(*(rank["blocks"][at]["times_s"] for rank in found), strict=True)
        ]
        for at in range(len(blocks))
    ]
    medians = [statistics.median(times) for times in slowest]
    kinds = [block["kind"] for block in blocks]
    slower = [
        medians[at] / statistics.mean((medians[at - 1], medians[at + 1])) - 1.0
        for at in range(1, len(kinds) - 1)
        if kinds[at] == "B" and kinds[at - 1] == kinds[at + 1] == "A"
    ]
    plain = statistics.median(medians[at] for at in range(len(kinds)) if kinds[at] == "A")
    held = {
        kind: sorted(
            value
            for rank in found
            for block in rank["blocks"]
            if block["kind"] == kind
            for value in block["held_ms"]
        )
        for kind in set(kinds) - {"A"}
    }
    stored = [block for block in blocks if block["kind"] == "C"]
    state_bytes = sum(rank["state_bytes"] for rank in found)
    rates = [rank["rates"] for rank in found]
    return {
        "arguments": {key: str(value) for key, value in vars(options).items()},
        "state_gb": [round(rank["state_bytes"] / 1e9, 3) for rank in found],
        "prepared_s": [round(rank["prepared_s"], 2) for rank in found],
        "blocks": [
            {"kind": kind, "median_s": round(median, 5), "max_s": round(max(times), 5)}
            for kind, median, times in zip(kinds, medians, slowest, strict=True)
        ],
        "slower_with_snapshots": [round(value, 5) for value in slower],
        "slower_with_persistence": [
            round(medians[at] / plain - 1.0, 5) for at, kind in enumerate(kinds) if kind == "C"
        ],
        "held_ms": {
            kind: {
                "p50": round(statistics.median(values), 3),
                "p99": round(values[int(0.99 * (len(values) - 1))], 3),
                "max": round(values[-1], 3),
                "count": len(values),
            }
            for kind, values in held.items()
        },
        "copy_gb_per_s_each": [round(statistics.median(values), 2) for values in rates],
        "copy_gb_per_s_sum": round(sum(statistics.median(values) for values in rates), 2),
        "snapshots": len(rates[0]),
        "skipped": {
            kind: sum(block["skipped"] for block in blocks if block["kind"] == kind)
            for kind in set(kinds) - {"A"}
        },
        "steps_with_replicas": found[0]["replicas"],
        "persisted_gb_per_s": [
            round(block["committed"] * state_bytes / block["seconds"] / 1e9, 3) for block in stored
        ],
        "committed": [block["committed"] for block in stored],
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }


def main() -> int:
    """Measure and print; returns the exit status."""
    options = _options()
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="snapshot-steps-") as name:
        folder = Path(name)
        with ExitStack() as stack:
            daemons = [stack.enter_context(Daemon(folder / "n0"))]
            for rank in range(1, options.ranks if options.replicas else 1):
                node = Daemon(folder / f"n{rank}", f"n{rank}", daemons[0].token)
                daemons.append(stack.enter_context(node))
            found = _run(options, folder, daemons)
    result = summary(options, found)
    print(json.dumps(result))
    slower = result["slower_with_snapshots"]
    slow = bool(slower) and statistics.median(slower) > options.most_slower
    return int(slow or result["skipped"].get("B", 0) > 0)


def _run(
    options: argparse.Namespace, folder: Path, daemons: Sequence[Daemon]
) -> list[dict[str, Any]]:
    processes = []
    for rank in range(options.ranks):
        own, peer = (daemons[(rank + ahead) % len(daemons)] for ahead in (0, 1))
        given = Options(
            rank=rank,
            folder=str(folder),
            socket=str(own.socket),
            address=daemons[0].address,
            token=own.token,
            peer=peer.replica_endpoint if peer is not own else "",
            **{
                name: getattr(options, name)
                for name in Options.__dataclass_fields__
                if hasattr(options, name) and name != "folder"
            },
        )
        command = [sys.executable, str(Path(__file__).resolve()), "--as-rank"]
        processes.append(
            subprocess.Popen(
                [*command, json.dumps(asdict(given))],
                stdout=subprocess.PIPE,
                stderr=None if rank == 0 else subprocess.DEVNULL,
                text=True,
                env=child_environment(),
            )
        )
    try:
        outputs = [process.communicate(timeout=options.limit_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        for daemon in daemons:
            print((daemon.folder / "daemon.log").read_text()[-4000:], file=sys.stderr)
        raise SystemExit("a rank failed: see stderr above")
    for rank, output in enumerate(outputs):
        for line in output.splitlines()[:-1]:
            if "snapshot started" not in line:
                print(f"rank {rank}: {line}", file=sys.stderr)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--ranks", type=int, default=0, help="default: one for each device")
    parser.add_argument("--preset", default="7b", help="width of the model")
    parser.add_argument("--layers", type=int, default=0, help="default: the preset's")
    parser.add_argument("--global-batch", type=int, default=0, help="sequences in a step")
    parser.add_argument("--tp", type=int, default=1, help="the other ranks are data parallel")
    parser.add_argument("--blocks", default=BLOCKS)
    parser.add_argument("--block-steps", type=int, default=40)
    parser.add_argument("--store-steps", type=int, default=60, help="steps of a block C")
    parser.add_argument("--store-mib-per-s", type=float, default=1907.3, help="2 GB/s")
    parser.add_argument("--verified-share", type=float, default=0.01, help="see verify_d2h")
    parser.add_argument("--slots", type=int, default=0, help="0: as many as the daemon chooses")
    parser.add_argument(
        "--replicas", action="store_true", help="a daemon for each rank, and copies to the next one"
    )
    parser.add_argument("--folder", type=Path, help="of the store; default: $TMPDIR")
    parser.add_argument("--most-slower", type=float, default=0.01)
    parser.add_argument("--limit-s", type=float, default=500.0)
    options = parser.parse_args()
    if set(options.blocks) - set("ABC"):
        parser.error(f"--blocks {options.blocks}: choose of A, B and C")
    if min(options.block_steps, options.store_steps) <= UNCOUNTED_STEPS:
        parser.error(f"--block-steps, --store-steps: more than {UNCOUNTED_STEPS}")
    options.ranks = options.ranks or max(1, torch.cuda.device_count())
    return options


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-rank"]:
        arm_parent_death()
        found_here = Rank(Options(**json.loads(sys.argv[2]))).measure()
        print(json.dumps(found_here), flush=True)
        destroy_groups()
        raise SystemExit(0)
    raise SystemExit(main())

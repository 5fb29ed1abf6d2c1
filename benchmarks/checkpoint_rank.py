"""One rank of benchmarks/checkpoint_dcp.py: saves or a restore, by us or by torch's DCP.

    python benchmarks/checkpoint_rank.py '{"phase": "save", "leg": "megascale", "rank": 0, ...}'

All legs have the same state (float32 parameters and two optimizer states, cut over the ranks by
rows), the same work between saves and the same disk. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch._C._distributed_c10d import FileStore
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megascale.v1 import checkpoint_pb2, checkpoint_pb2_grpc
from megascale_common.service.channel import open_channel
from megascale_job.layout import RankLayout
from megascale_job.restore import RestorePlan
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece
from megascale_job.wire import restore as wire
from megascale_trainer.parallel.groups import Group
from megascale_trainer.process.bootstrap import Rendezvous, create_groups, destroy_groups
from megascale_trainer.save.daemon_link import DaemonLink, RankRegistration
from megascale_trainer.save.host_copy import Landed
from megascale_trainer.save.host_copy import parts as cut
from megascale_trainer.save.restore import restore
from megascale_trainer.save.snapshot import Snapshotter

CPU = torch.device("cpu")
STATES = ("master", "exp_avg", "exp_avg_sq")
ROWS, COLUMNS = 1024, 1024  # of a rank's part of one parameter: 4 MiB
POLL_S = 0.002
# By leg; the others have async_save's own.
STAGERS = {
    "dcp-staged": StagingOptions(False, False, True, False),
    "dcp-process": StagingOptions(False, True, True, False),
    "dcp-pinned": StagingOptions(True, False, True, True),
}
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Options:
    """What the parent gives a rank."""

    phase: str
    leg: str
    rank: int
    ranks: int
    parameters: int
    saves: int
    work_s: float
    folder: str
    socket: str
    address: str
    token: str


class State:
    """Three states of each parameter, float32 [ROWS, COLUMNS]: a rank's optimizer shard.

    One flat buffer, as the trainer has it; ``apart`` makes each its own tensor, because DCP's
    stager cannot copy DTensors that share memory.
    """

    def __init__(self, options: Options, *, apart: bool) -> None:
        self.options = options
        shape = (len(STATES), options.parameters, ROWS, COLUMNS)
        self.values = torch.empty(0) if apart else torch.zeros(shape)
        self.parts = (
            [[torch.zeros(shape[2:]) for _ in range(shape[1])] for _ in STATES]
            if apart
            else [list(each) for each in self.values]
        )

    def change(self, number: float, *, add: bool = False) -> None:
        """Set all values to ``number``, or add it."""
        for part in (part for parts in self.parts for part in parts):
            part.mul_(float(add)).add_(number)

    def wrong(self, number: float) -> int:
        """How many values are not ``number``."""
        return sum(int((part != number).sum()) for parts in self.parts for part in parts)

    @property
    def size_bytes(self) -> int:
        """Bytes of all values."""
        return sum(part.nbytes for parts in self.parts for part in parts)

    def shard_layout(self) -> ShardLayout:
        """See Trainer."""
        rank, size = self.options.rank, ROWS * COLUMNS
        box = ((rank * ROWS, 0), ((rank + 1) * ROWS, COLUMNS), 0, size)
        shape = (ROWS * self.options.ranks, COLUMNS)
        pieces = tuple(
            ShardPiece(
                f"layers.{number}.q.weight",
                state,
                "float32",
                shape,
                *box,
                4 * size * (index * self.options.parameters + number),
                primary=True,
            )
            for index, state in enumerate(STATES)
            for number in range(self.options.parameters)
        )
        return ShardLayout(pieces, self.size_bytes)

    def state_image(self) -> torch.Tensor:
        """See Trainer."""
        return self.values.view(-1).view(torch.uint8)

    def state_copy_to(self, slot: torch.Tensor, landed: Landed = lambda stop: None) -> None:
        """See Trainer."""
        image = self.state_image()
        for start, stop in cut(0, image.numel()):
            slot[start:stop].copy_(image[start:stop])
            landed(stop)

    def load_from(
        self, slot: torch.Tensor, ready: Callable[[int], object] = lambda stop: None
    ) -> None:
        """See Trainer."""
        self.state_image().copy_(slot[: self.state_image().numel()])


@dataclass
class Save:
    """Figures of one save; ``durable_at`` is set by a thread that looks at the disk."""

    began_at: float
    stall_s: float = 0.0
    durable_at: float = 0.0
    work_s: float = 0.0


def stalled(save: Save, call: Callable[[], Any]) -> Any:
    """Call something that training waits for."""
    began = time.perf_counter()
    result = call()
    save.stall_s += time.perf_counter() - began
    return result


class Work:
    """Matrix products of about ``seconds``, the same number each time."""

    def __init__(self, seconds: float) -> None:
        self._a = torch.randn(384, 384)
        self._count = 1
        while seconds and self.run() < seconds / 4:
            self._count *= 2
        self._count = max(1, round(self._count * seconds / max(self.run(), 1e-9)))

    def run(self) -> float:
        """Seconds that it took."""
        began = time.perf_counter()
        for _ in range(self._count):
            self._a @ self._a
        return time.perf_counter() - began


class OurSaves:
    """Snapshots into the daemon's memory, which persists and commits them."""

    def __init__(self, state: State, world: Group, attempt: int) -> None:
        options = state.options
        self._state, self._world = state, world
        self.plan = self._open_attempt(attempt)
        sizes = {"tp": 1, "cp": 1, "dp": options.ranks, "pp": 1}
        registration = RankRegistration(
            "benchmark", attempt, options.rank, options.ranks, options.folder, options.address, 2,
            sizes=sizes,
        )  # fmt: skip
        layout = state.shard_layout()
        link = DaemonLink(
            options.socket, registration, layout, CPU, collective_timeout_s=TIMEOUT_S
        ).connect()
        self.snapshots = Snapshotter(link, state, CPU)

    def begin(self, step: int, save: Save) -> None:
        """Start a save, as a step loop does."""
        small_state = {"skipped_updates": 0, "consumed_samples": 0}
        if stalled(save, lambda: self.snapshots.reserve(step)):
            raise RuntimeError(f"no slot for step {step}: the save before it is not durable")
        stalled(save, lambda: self.snapshots.take(step, small_state, votes=0))
        stalled(save, lambda: self.snapshots.settle(step, {}, finite=True))

    def before_update(self, save: Save) -> None:
        """Wait until the state may be changed."""
        copied = self.snapshots.copied
        if copied is not None:
            stalled(save, copied.synchronize)
        stalled(save, self.snapshots.seal_if_copied)

    def finish(self, step: int) -> None:
        """Wait until the step is durable; no part of the stall."""
        self.snapshots.seal_if_copied(wait=True)
        problem = self.snapshots.drain(step, TIMEOUT_S).problem
        if problem:
            raise RuntimeError(problem)

    def done(self, step: int) -> bool:
        """Whether the COMMIT stands on the disk: one record for each save behind the OPEN."""
        return len(list(Path(self._state.options.folder, "commits").glob("*.json"))) > step

    def restore(self, step: int) -> None:
        """Read the newest committed state, which is ``step``, from storage."""
        assert (self.plan.step, bool(self.plan.manifest_uri)) == (step, True), self.plan
        restore(self.snapshots.link, self.plan, self._state, CPU, self._world)

    def _open_attempt(self, attempt: int) -> RestorePlan:
        """Rank 0 has it opened, as the driver does; the others are given the plan."""
        options = self._state.options

        async def call() -> RestorePlan:
            async with open_channel(options.address, options.token) as channel:
                request = checkpoint_pb2.OpenAttemptRequest(
                    job="benchmark",
                    uri=options.folder,
                    attempt=attempt,
                    world_size=options.ranks,
                )
                stub: Any = checkpoint_pb2_grpc.CheckpointServiceStub(channel)
                return wire.from_proto((await stub.OpenAttempt(request)).restore)

        plans: list[Any] = [asyncio.run(call()).to_mapping() if options.rank == 0 else None]
        torch.distributed.broadcast_object_list(plans)
        return RestorePlan.from_mapping(plans[0])


class DcpSaves:
    """torch.distributed.checkpoint.async_save with the stager of a leg."""

    def __init__(self, state: State, leg: str) -> None:
        options = state.options
        self._folder = Path(options.folder)
        mesh = init_device_mesh("cpu", (options.ranks,))
        parts = {
            name: {
                f"layers.{number}.q.weight": DTensor.from_local(part, mesh, [Shard(0)])
                for number, part in enumerate(state.parts[index])
            }
            for index, name in enumerate(STATES)
        }
        self._state = {"model": parts.pop("master"), "optimizer": parts}
        # Kept from save to save, so that its memory is used again.
        self._stager = DefaultStager(STAGERS[leg]) if leg in STAGERS else None
        of_process = leg == "dcp-process"
        self._kind = AsyncCheckpointerType.PROCESS if of_process else AsyncCheckpointerType.THREAD
        self._response: Any = None

    def _at(self, step: int) -> Path:
        return self._folder / f"step-{step}"

    def begin(self, step: int, save: Save) -> None:
        """Start a save."""
        self._response = stalled(
            save,
            lambda: async_save(
                self._state,
                checkpoint_id=self._at(step),
                async_stager=self._stager,
                async_checkpointer_type=self._kind,
            ),
        )

    def before_update(self, save: Save) -> None:
        """Wait until the state may be changed."""
        if isinstance(self._response, AsyncSaveResponse):
            stalled(save, self._response.staging_completion.result)

    def finish(self, step: int) -> None:
        """Wait until the step is durable."""
        response = self._response
        future = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        future.result(TIMEOUT_S)

    def done(self, step: int) -> bool:
        """Whether the metadata stand on the disk."""
        return (self._at(step) / ".metadata").exists()

    def restore(self, step: int) -> None:
        """Read the state of ``step``."""
        load(self._state, checkpoint_id=self._at(step))


def measure(options: Options) -> dict[str, Any]:
    """All saves of one leg, or the restore of the newest one."""
    meeting = Path(options.folder).parent / f"meet-to-{options.phase}"
    store = FileStore(str(meeting), options.ranks)
    layout = RankLayout(tp=1, cp=1, dp=options.ranks, pp=1)
    world = create_groups(layout, options.rank, Rendezvous(store, CPU, TIMEOUT_S)).world
    ours, saving = options.leg == "megascale", options.phase == "save"
    state = State(options, apart=not ours)
    saves: OurSaves | DcpSaves = (
        OurSaves(state, world, attempt=1 if saving else 2) if ours else DcpSaves(state, options.leg)
    )
    try:
        return _save(options, state, saves) if saving else _restore(options, state, saves)
    finally:
        destroy_groups()


def _save(options: Options, state: State, saves: OurSaves | DcpSaves) -> dict[str, Any]:
    work = Work(options.work_s)
    state.change(1.0)
    figures, idle = [], []
    for step in range(1, options.saves + 1):
        torch.distributed.barrier()
        idle.append(work.run())
        torch.distributed.barrier()
        figures.append(one_save(saves, step, work))
        state.change(1.0, add=True)
    return {
        "stall_s": [each.stall_s for each in figures],
        "durable_s": [each.durable_at - each.began_at for each in figures],
        "work_idle_s": median(idle),
        "work_saving_s": [each.work_s for each in figures],
        "state_bytes": state.size_bytes,
    }


def _restore(options: Options, state: State, saves: OurSaves | DcpSaves) -> dict[str, Any]:
    drop_caches(Path(options.folder))
    read_before = bytes_read()
    torch.distributed.barrier()
    began = time.perf_counter()
    saves.restore(options.saves)
    torch.distributed.barrier()
    return {
        "restore_s": time.perf_counter() - began,
        "read_bytes": bytes_read() - read_before,
        "wrong_values": state.wrong(float(options.saves)),
    }


def one_save(saves: OurSaves | DcpSaves, step: int, work: Work) -> Save:
    """A save, and the work of a step beside it."""
    save = Save(time.perf_counter())

    def watch() -> None:
        while not saves.done(step):
            time.sleep(POLL_S)
        save.durable_at = time.perf_counter()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    saves.begin(step, save)
    save.work_s = work.run()
    saves.before_update(save)
    saves.finish(step)
    watcher.join(TIMEOUT_S)
    return save


def drop_caches(folder: Path) -> None:
    """Have the next reader read the disk, as after the loss of a node."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def bytes_read(pid: int | str = "self") -> int:
    """What a process has read with read calls so far."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("rchar")))


if __name__ == "__main__":
    print(json.dumps(measure(Options(**json.loads(sys.argv[1])))), flush=True)

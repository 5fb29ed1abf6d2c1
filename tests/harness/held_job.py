"""A job of 16 ranks in one process that a test can hold at any point of any rank.

The trainer's own step loop, schedule, groups and status pages run (:mod:`tests.harness.lockstep`);
data and snapshots stand in. What the driver sees goes its real way: page, agent's message,
heartbeat, rank status.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.harness.lockstep import Ranks, installed
from tests.harness.training import CPU, micro_batches, tiny_job

from megascale.v1 import link_pb2
from megascale_common.node.status_page import Phase, StatusPageWriter, read_status_page
from megascale_driver.analysis.progress import RankStatus
from megascale_driver.presence import reports
from megascale_executor.agent.workers.worker_status import worker_status
from megascale_executor.agent.workers.workers import Worker
from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_trainer.batch import MicroBatch
from megascale_trainer.process import step_loop
from megascale_trainer.process.bootstrap import Rendezvous, create_groups
from megascale_trainer.process.snapshot_steps import SnapshotSteps
from megascale_trainer.process.step_loop import LeaveOrder, StepLoop
from megascale_trainer.process.step_records import StepRecords
from megascale_trainer.telemetry.profiling import StepProfiler
from megascale_trainer.trainer import Trainer

STEPS = 10_000  # more than any test takes
EVALUATE_EVERY = 2
STILL_S = 1_000.0  # for which pages show nothing new: longer than any phase may take


@dataclass(frozen=True, slots=True)
class Point:
    """Where a rank is: ``what`` it is about to do, and ``inside`` of which part of the step."""

    what: str
    inside: str


Match = Callable[[Point], bool]


@dataclass(eq=False)
class HeldJob:
    """The job; :meth:`hold` says which rank stops where, :meth:`go_on` lets it go on."""

    config: JobConfig
    folder: Path
    ranks: Ranks
    step: dict[int, int] = field(default_factory=dict)
    held: Point | None = None
    _culprit: int = -1
    _match: Match = lambda point: False
    _inside: dict[int, str] = field(default_factory=dict)

    def hold(self, rank: int, match: Match) -> None:
        """From now on ``rank`` stops at each point that matches."""
        self._culprit, self._match = rank, match

    def until_held(self) -> Point:
        """Let the ranks run until one is held and none can go on."""
        self.ranks.until_still()
        assert self.held is not None, f"rank {self._culprit} never came to that point"
        return self.held

    def go_on(self) -> None:
        """The held rank may go on to its next point; the ranks run with :meth:`until_held`."""
        self.held = None

    def statuses(self) -> dict[int, RankStatus]:
        """What the driver has of each rank after STILL_S: through pages and a heartbeat."""
        workers = []
        for rank in range(self.config.layout.world_size):
            page = self._page(rank)
            status = read_status_page(page)
            assert status is not None
            worker = Worker(rank, cast(Any, None), self.folder / "log", page)
            workers.append(worker_status(worker, status.updated_ns + round(STILL_S * 1e9)))
        found = reports.pages(link_pb2.Heartbeat(workers=workers))
        return {status.rank: status for status in found}

    def at(self, what: str) -> None:
        """Of the rank that runs: it is about to do ``what``, and stops there if it is held."""
        rank = self.ranks.here.number
        point = Point(what, self._inside.get(rank, ""))
        if rank == self._culprit and self._match(point):
            self.held = point
            self.ranks.block(lambda: self.held is not point)

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Of the rank that runs: the body is this part of the step."""
        rank = self.ranks.here.number
        before, self._inside[rank] = self._inside.get(rank, ""), part
        yield
        self._inside[rank] = before

    def program(self, rank: int) -> None:
        """A rank's whole life."""
        page = _Page(self, self._page(rank), rank)
        config = self.config
        groups = create_groups(
            config.layout,
            rank,
            Rendezvous(cast(Any, self.ranks), CPU, 60.0, page),  # the ranks are their store
            ring=config.parallelism.virtual_stages > 1,
        )
        trainer = Trainer(config, rank, groups, CPU, page)
        trainer.initialise()
        self._watch(trainer)
        agent, other = socket.socketpair()
        assignment: Any = SimpleNamespace(
            reports=False, attempt=1, rank=rank, run_folder=str(self.folder)
        )
        with agent, other:
            page.update(phase=Phase.WARMUP)
            StepLoop(
                trainer=trainer,
                device=CPU,
                groups=groups,
                status=page,
                data=cast(Any, _Data(self, rank, "data")),
                held_out=cast(Any, _Data(self, rank, "held_out data")),
                snapshots=_Snapshots(self, config, page),
                records=StepRecords(agent, assignment, config, CPU),
                profiler=_BetweenSteps(self, agent),
                leave=LeaveOrder(rank, lambda message: None),
                skipped=0,
            ).run(0)

    def _page(self, rank: int) -> Path:
        return self.folder / f"status-{rank}"

    def _watch(self, trainer: Trainer) -> None:
        """Points around the parts of a step that the trainer computes."""
        job, pipeline = self, trainer._pipeline

        def inside(part: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def watched(*args: Any, **kwargs: Any) -> Any:
                with job.within(part):
                    job.at(part)
                    return run(*args, **kwargs)

            return watched

        for kind, run in list(pipeline._actions.items()):
            pipeline._actions[kind] = inside(kind.value, run)
        buffers = trainer._buffers
        for owner, name in (
            (trainer._optimizer, "update"),
            (buffers, "reduce_gradients"),
            (buffers, "gather_parameters"),
        ):
            setattr(owner, name, inside(name, getattr(owner, name)))


class _Page(StatusPageWriter):
    """Each write is a point: before an operation is entered, after the others."""

    def __init__(self, job: HeldJob, path: Path, rank: int) -> None:
        self._job, self._rows = job, list[str]()
        super().__init__(path, rank=rank, attempt=1)

    def row(self, name: str) -> int:
        self._rows.append(name)
        return super().row(name)

    def enter(self, row: int) -> None:
        self._job.at(f"enter {self._rows[row]}")
        super().enter(row)

    def complete(self, row: int, *, unfinished: int = 0) -> None:
        super().complete(row, unfinished=unfinished)
        self._job.at(f"completed {self._rows[row]}")


@dataclass(eq=False)
class _Data:
    job: HeldJob
    rank: int
    name: str

    def take(self) -> list[MicroBatch]:
        self.job.at(self.name)
        dp_rank = self.job.config.layout.coordinates(self.rank).dp
        return micro_batches(self.job.config, 0, dp_rank)

    def prefetch(self) -> None:
        self.job.at("prefetch")


class _Snapshots(SnapshotSteps):
    """Without a daemon; its points are those at which the step loop calls one."""

    def __init__(self, job: HeldJob, config: JobConfig, status: StatusPageWriter) -> None:
        super().__init__(config, status, None)
        self._job = job

    @property
    def copied(self) -> Any:
        return SimpleNamespace(wait=lambda: self._job.at("copy of a snapshot"))

    def vote(self, step: int) -> int:
        self._job.at("slot of a snapshot")
        return super().vote(step)

    def after(self, step: int, skipped_updates: int) -> None:
        self._job.at("snapshot")
        super().after(step, skipped_updates)


class _BetweenSteps(StepProfiler):
    def __init__(self, job: HeldJob, agent: socket.socket) -> None:
        super().__init__(agent, CPU, lambda message: None, lambda: None)
        self._job = job

    def before(self, step: int) -> None:
        self._job.step[self._job.ranks.here.number] = step
        self._job.at("between steps")


def config_of(*, hidden: bool) -> JobConfig:
    """TP2 PP4 DP2, plain, or with interleaved stages and transfers and reductions overlapped."""
    overlap = {"virtual_stages": 2, "overlap": {"pp": True, "dp": True}} if hidden else {}
    return from_accepted(
        tiny_job(
            model={
                "layers": 8 if hidden else 4,
                "hidden_size": 16,
                "heads": 2,
                "vocab_size": 32,
                "sequence_length": 8,
            },
            parallelism={"tp": 2, "pp": 4, "dp": 2, **overlap},
            training={"steps": STEPS, "global_batch_size": 8, "micro_batch_size": 1},
            evaluation={
                "interval_steps": EVALUATE_EVERY,
                "batches": 1,
                "sources": [{"prefix": "x"}],
            },
        )
    )


@contextmanager
def held_job(folder: Path, *, hidden: bool) -> Iterator[HeldJob]:
    """The job, with a garbage collection after each step, before its first instruction."""
    config = config_of(hidden=hidden)
    ranks = Ranks(config.layout.world_size)
    job = HeldJob(config, folder, ranks)
    with pytest.MonkeyPatch.context() as patch, installed(ranks):
        patch.setattr(step_loop, "COLLECT_EVERY_STEPS", 1)
        collect = SimpleNamespace(collect=lambda: job.at("garbage collection"))
        patch.setattr(step_loop, "gc", collect)
        ranks.start(job.program)
        yield job

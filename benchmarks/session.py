"""One rank of a benchmark, whose processes start once for a whole sweep.

Groups are made once per layout. Trainers stay in memory while it suffices, so that configurations
can be measured in turn (A B A B) without building them anew; all ranks decide by the same estimate
and so decide alike.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.options import Run, job
from benchmarks.product_loop import (
    Batches,
    ProductLoop,
    TimedTrainer,
    unwatched,
)
from benchmarks.timing import Sensors, StepClock, sensor_summary, shared
from torch._C._distributed_c10d import PrefixStore, Store

from megascale_common.node.status_page import StatusPageWriter
from megascale_job.config import JobConfig
from megascale_job.sizes.memory import largest_rank_memory
from megascale_job.sizes.parameter_table import parameter_table
from megascale_trainer.launch.place import Place
from megascale_trainer.parallel.groups import Groups
from megascale_trainer.process.bootstrap import Rendezvous, create_groups, destroy_groups
from megascale_trainer.trainer import StepResult, set_determinism

# Steps that are not timed: of a configuration that runs for the first time, of one whose trainer is
# made again, of a trainer that is still there (its first step finds the allocator's cache as the
# others left it).
WARMUP_STEPS = 3
_AGAIN_STEPS = 2
_RESIDENT_STEPS = 1
_GROUP_TIMEOUT_S = 120.0
_MAX_TRAINERS = 3
# The share of the device: the estimate of a job leaves out workspaces and fragmentation.
_USABLE_MEMORY = 0.85
_SEED = 1234


@dataclass(frozen=True, slots=True)
class Leg:
    """Some steps of one configuration.

    Args:
        times_s: seconds of each timed step on the slowest rank.
        losses: of all steps.
        memory_bytes: the most that this trainer had allocated on any rank.
        sensors: of the timed steps (:func:`benchmarks.timing.summary`), None without any.
    """

    times_s: list[float]
    losses: list[float]
    memory_bytes: int
    sensors: dict[str, Any] | None


@dataclass(slots=True)
class _Resident:
    trainer: TimedTrainer
    allocated_before: int
    batches: Batches | None = None
    product: ProductLoop | None = None
    new: bool = True

    def end(self) -> None:
        """Let go of what others wait for.

        No step waits for the last step's all-gathers of parameters. NCCL's group keeps the
        memory of such operations until its next call (torch, ProcessGroupNCCL: shelvesToUnstash_),
        and so until after the next trainer's memory is counted from here.
        """
        self.trainer.settle()
        if self.product is not None:
            self.product.close()


class Session:
    """The state of a rank between measurements; all ranks call every method together.

    Args:
        place: this rank's place among the ranks and hosts.
        store: where the ranks meet; fresh.
        folder: of this rank, for what the product's loop writes.
        deadline: time.time() after which :meth:`out_of_time` is true; 0: never.
        on_step: called after every step whose result was read.
    """

    def __init__(
        self,
        place: Place,
        store: Store,
        device: torch.device,
        folder: Path,
        deadline: float,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank, self.world_size, self.device = place.rank, place.world_size, device
        self._place, self._folder = place, folder
        self._store, self._deadline, self._on_step = store, deadline, on_step
        self._layout: object = None
        self._layouts = self._loops = 0
        self._status: StatusPageWriter | None = None
        self._groups: Groups | None = None
        self._trainers: dict[Run, _Resident] = {}
        self._seen: set[Run] = set()

    def config(self, run: Run) -> JobConfig:
        """The job of ``run`` on this session's ranks."""
        return job(run, self.world_size, cuda=self.device.type == "cuda")

    def leg(self, run: Run) -> Leg:
        """Train ``run.steps`` steps; fewer where less has to warm up."""
        resident = self._resident(run)
        trainer = resident.trainer
        warmup = _RESIDENT_STEPS
        if resident.new:
            warmup = _AGAIN_STEPS if run in self._seen else WARMUP_STEPS
        steps = run.steps - WARMUP_STEPS + warmup
        resident.new = False
        self._seen.add(run)
        # A setting of the process in torch, not of a trainer.
        set_determinism(trainer.config, self.device)
        gc.collect()
        gc.disable()
        self.meet()
        with Sensors(self.device) as sensors:
            times, losses = self._steps(resident, run, steps)
            seen = sensors.over(sum(times[warmup:]))
        gc.enable()
        peak = (
            torch.cuda.max_memory_allocated(self.device) - resident.allocated_before
            if self._cuda
            else 0
        )
        timed = steps - warmup
        found = self.maximum(
            *times[warmup:], float(peak), *shared(seen, self.rank, self.world_size)
        )
        training, length = trainer.config.training, trainer.config.model.sequence_length
        tokens = timed * training.global_batch_size * length
        sensed = sensor_summary(found[timed + 1 :], self.world_size, tokens)
        return Leg(found[:timed], losses, int(found[timed]), sensed)

    def steps(self, run: Run, count: int) -> None:
        """``count`` more steps of ``run``; waits for the device."""
        self._steps(self._resident(run), run, count)

    def maximum(self, *values: float) -> list[float]:
        """The largest of each value over the ranks; waits for the device."""
        assert self._groups is not None
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        self._groups.world.all_reduce_max(found)
        return [float(value) for value in found.tolist()]

    def meet(self) -> None:
        """Wait for the device and for the other ranks; nothing before there are groups."""
        if self._groups is not None:
            self.maximum(0.0)

    def out_of_time(self, ahead_s: float = 0.0) -> bool:
        """Whether on any rank the time is up, or will be in ``ahead_s``; the same on all ranks.

        False before the first leg.
        """
        if not self._deadline or self._groups is None:
            return False
        return self.maximum(float(time.time() + ahead_s > self._deadline))[0] > 0

    def forget(self, run: Run | None = None) -> None:
        """Free the trainer of ``run``, or all of them."""
        for key in list(self._trainers) if run is None else [_of_trainer(run)]:
            if key in self._trainers:
                self._trainers.pop(key).end()
        self._empty_cache()

    def close(self) -> None:
        """Free everything and leave the groups."""
        self.forget()
        self._groups, self._layout = None, None
        destroy_groups()

    def _empty_cache(self) -> None:
        gc.collect()
        if self._cuda:
            if not self._trainers:
                # cuBLAS keeps 32 MiB for each stream that it has run on, and the captures of each
                # trainer have one of their own. Graphs that are alive use theirs.
                torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"

    def _steps(self, resident: _Resident, run: Run, steps: int) -> tuple[list[float], list[float]]:
        """Times and losses of ``steps`` steps in the loop that ``run`` asks for."""
        groups, trainer = self._groups, resident.trainer
        assert groups is not None
        if run.loop == "bare":
            if resident.batches is None:
                resident.batches = Batches(trainer.config, self.rank, self.device)
            with unwatched(groups, trainer):
                return self._bare_steps(trainer, resident.batches, steps)
        if resident.product is None:
            resident.product = self._product_loop(trainer, groups)
        return resident.product.steps(trainer, steps, self._on_step)

    def _product_loop(self, trainer: TimedTrainer, groups: Groups) -> ProductLoop:
        assert self._status is not None
        self._loops += 1
        key, host = f"loader-{self._loops}", str(self._place.host)
        store = PrefixStore(key, self._store)

        def exchange(path: str | None) -> str:
            if path is not None:
                store.set(host, path)
            return str(store.get(host).decode())

        folder = self._folder / f"{key}-rank-{self.rank}"
        folder.mkdir()
        first = trainer.step * trainer.config.training.global_batch_size
        here = (self._status, self.device, folder)
        return ProductLoop(trainer.config, self._place, groups, *here, first, exchange)

    def _bare_steps(
        self, trainer: TimedTrainer, batches: Batches, steps: int
    ) -> tuple[list[float], list[float]]:
        """As in training: a step's result is read after the next one has been launched."""
        losses: list[float] = []
        previous: StepResult | None = None
        clock = StepClock(self.device)
        for _ in range(steps):
            result = trainer.train_step(batches.step(trainer.step))
            clock.lap()
            if previous is not None:
                losses.append(previous.read().loss)
                self._on_step()
            previous = result
        assert previous is not None
        losses.append(previous.read().loss)
        self._on_step()
        return clock.times_s(), losses

    def _resident(self, run: Run) -> _Resident:
        key = _of_trainer(run)
        if key not in self._trainers:
            config = self.config(run)
            groups = self._meet(config)
            self._make_room(config)
            # Peer memory and communicators allocate from the device what the cache may hold.
            self._empty_cache()
            before = torch.cuda.memory_allocated(self.device) if self._cuda else 0
            if self._cuda:
                torch.cuda.reset_peak_memory_stats(self.device)
            trainer = TimedTrainer(config, self.rank, groups, self.device, self._status)
            self._initialise(trainer)
            self._trainers[key] = _Resident(trainer, before)
        return self._trainers[key]

    def _meet(self, config: JobConfig) -> Groups:
        kinds = {
            "ring": config.parallelism.virtual_stages > 1,
            "tied": config.model.tie_embeddings,
            "experts": config.model.experts.count > 0,
        }
        if self._groups is None or self._layout != (config.layout, kinds):
            self.close()
            self._layouts += 1
            store = PrefixStore(f"layout-{self._layouts}", self._store)
            page = self._folder / f"status-{self._layouts}-rank-{self.rank}"
            self._status = StatusPageWriter(page, rank=self.rank, attempt=1)
            self._groups = create_groups(
                config.layout,
                self.rank,
                Rendezvous(store, self.device, _GROUP_TIMEOUT_S, self._status),
                **kinds,
            )
            self._layout = (config.layout, kinds)
        return self._groups

    def _make_room(self, config: JobConfig) -> None:
        """Free the other trainers if ``config`` might not fit with them."""
        kept = sum(_state_bytes(resident.trainer.config) for resident in self._trainers.values())
        room = (
            self._cuda
            and _USABLE_MEMORY * torch.cuda.get_device_properties(self.device).total_memory
        )
        crowded = bool(room) and kept + largest_rank_memory(config).total_bytes > room
        if crowded or len(self._trainers) >= _MAX_TRAINERS:
            self.forget()

    def _initialise(self, trainer: TimedTrainer) -> None:
        # Drawn on the device: a host would take many seconds for each new trainer's billions of
        # values.
        generator = torch.Generator(self.device).manual_seed(_SEED + self.rank)
        master = trainer.state.states()["master"]
        for owned, piece, start, stop in parameter_table(trainer.config, self.rank).overlaps():
            part = master[
                owned.shard_offset + start - owned.start : owned.shard_offset + stop - owned.start
            ]
            if piece.initial == "normal":
                part.normal_(0.0, piece.std, generator=generator)
            else:
                part.fill_(1.0 if piece.initial == "ones" else 0.0)
        trainer.finish_load(0)


def _of_trainer(run: Run) -> Run:
    """What ``run`` asks of its trainer: both loops use the same one."""
    return replace(run, loop="product")


def _state_bytes(config: JobConfig) -> int:
    need = largest_rank_memory(config)
    return need.total_bytes - need.activations_bytes

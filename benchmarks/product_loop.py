"""The product's step loop for a benchmark, and the micro-batches of a bare step.

The loop has all parts of a job's: the loader process with its ring, the copy of batches to the
device, the status page, step records with figures and log lines, the socket to the agent, and the
thread that replaces the agent in a run by hand (:mod:`megascale_trainer.launch`). Snapshots and
evaluations have benchmarks of their own.

Random steps of the bare loop lie on the device and repeat after a number of steps that is the same
in all layouts. With the same step again and again a model would learn it by heart within minutes,
and its device would then draw less power than one that trains on a corpus.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from benchmarks.timing import StepClock

from megascale_common.node import framing
from megascale_common.node.messages import Assignment
from megascale_common.node.status_page import StatusPageWriter
from megascale_job.config import DataSource, JobConfig
from megascale_job.layout import readers_of
from megascale_trainer.batch import MicroBatch
from megascale_trainer.data.client import LoaderClient, RingRequest
from megascale_trainer.data.device_batches import step_batches
from megascale_trainer.data.indexed import IndexedWriter, token_dtype
from megascale_trainer.data.packing import Arrays, SampleStream, sample_numbers
from megascale_trainer.launch.display import Display
from megascale_trainer.launch.host_services import HostServices
from megascale_trainer.launch.local_agent import LocalAgent, Outlets, Watched
from megascale_trainer.launch.meeting import Meeting
from megascale_trainer.launch.place import Place
from megascale_trainer.parallel.groups import Group, Groups
from megascale_trainer.process.snapshot_steps import SnapshotSteps
from megascale_trainer.process.step_loop import LeaveOrder, StepLoop
from megascale_trainer.process.step_records import StepRecords
from megascale_trainer.telemetry.profiling import StepProfiler
from megascale_trainer.trainer import StepResult, Trainer

# The loop reads the first step of a run at once, and waits for its device before the last one: the
# step behind the first and the last itself begin on an idle device, once in a run.
EDGE_STEPS = 2
_RANDOM_TOKENS = 1 << 22
_RANDOM_SEED = 1234
_LOADER_TIMEOUT_S = 120.0


class TimedTrainer(Trainer):
    """A trainer that marks the end of each step on ``clock``, where there is one."""

    clock: StepClock | None = None

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, vote: int = 0, wish: int = 0
    ) -> StepResult:
        result = super().train_step(micro_batches, vote=vote, wish=wish)
        if self.clock is not None:
            self.clock.lap()
        return result


class ProductLoop:
    """The loop of one rank for one job; all ranks make it and call its methods together.

    Args:
        folder: of this rank, for its log, random tokens.
        first_sample: of the stream of samples.
        exchange: gives what the host's first rank passes to it (others pass None).
    """

    def __init__(
        self,
        config: JobConfig,
        place: Place,
        groups: Groups,
        status: StatusPageWriter,
        device: torch.device,
        folder: Path,
        first_sample: int,
        exchange: Callable[[str | None], str],
    ) -> None:
        self._config, self._place, self._groups = config, place, groups
        self._status, self._device = status, device
        self._folder = folder
        self._services = self._loader() if place.local_rank == 0 else None
        services = self._services
        path = exchange(None if services is None else str(services.loader_socket))
        reader, readers = readers_of(place.ranks_here, config.layout)[place.rank]
        ring = RingRequest(config.layout.coordinates(place.rank).dp, reader, readers, first_sample)
        self._data = step_batches(LoaderClient(path, config, ring, _LOADER_TIMEOUT_S), self._device)

    def steps(
        self, trainer: TimedTrainer, count: int, on_step: Callable[[], None]
    ) -> tuple[list[float], list[float]]:
        """Train ``count`` steps and those at the edges.

        Returns:
            Seconds by the device's clock of the steps between the edges, and the first losses.
        """
        rank, done = self._place.rank, trainer.step
        ours, theirs = socket.socketpair()
        with (
            (self._folder / "log").open("a") as log,
            contextlib.redirect_stdout(log),
            open(os.devnull, "w") as nowhere,
        ):
            # As a run by hand: rank 0 shows what it gets; the output is thrown away.
            display = Display(nowhere if rank == 0 else None, done + count + EDGE_STEPS)
            agent = LocalAgent(
                ours,
                rank,
                Meeting(Place()),
                Outlets(display=display, report=display.event, give_up=print),
                Watched(),
            )
            agent.start()
            records = _Records(theirs, self._assignment(), self._config, self._device, on_step)
            trainer.clock = StepClock(self._device)
            self._loop(trainer, theirs, records, done + count + EDGE_STEPS).run(done)
            clock, trainer.clock = trainer.clock, None
            records.close()
            theirs.close()
            agent.join()
        ours.close()
        return clock.times_s()[1:-1], records.losses[:-EDGE_STEPS]

    def close(self) -> None:
        """Leave the loader, and end it on the rank that started it."""
        self._data.close()
        if self._services is not None:
            self._services.stop()

    def _loop(
        self, trainer: Trainer, agent: socket.socket, records: StepRecords, last: int
    ) -> StepLoop:
        training = replace(self._config.training, steps=last)
        leave = LeaveOrder(self._place.rank, lambda message: framing.send(agent, message))
        return StepLoop(
            trainer=trainer,
            device=self._device,
            groups=self._groups,
            status=self._status,
            data=self._data,
            held_out=None,
            snapshots=SnapshotSteps(
                replace(self._config, training=training), self._status, None, trainer.step
            ),
            records=records,
            profiler=StepProfiler(agent, self._device, leave.take, trainer.await_parameters),
            leave=leave,
            skipped=0,
        )

    def _assignment(self) -> Assignment:
        """The part of an assignment that step records need."""
        needed = SimpleNamespace(
            rank=self._place.rank,
            attempt=1,
            reports=self._place.rank == 0,
            run_folder=str(self._folder / "attempt-1"),
        )
        return cast(Assignment, needed)

    def _loader(self) -> HostServices:
        config = self._config
        if not config.data.sources:
            prefix = self._folder / "random"
            write_random_tokens(prefix, config.model.vocab_size)
            sources = (DataSource(prefix=str(prefix)),)
            config = replace(config, data=replace(config.data, sources=sources))
        services = HostServices(config, self._folder, self._place.host)
        services.start_loader()
        return services


class _Records(StepRecords):
    """Keeps the losses, and reports progress."""

    def __init__(self, *arguments: Any) -> None:
        *own, self._on_step = arguments
        super().__init__(*own)
        self.losses: list[float] = []

    def send(self, values: dict[str, Any]) -> None:
        super().send(values)
        self.losses.append(values["loss"])
        self._on_step()


@contextlib.contextmanager
def unwatched(groups: Groups, trainer: Trainer) -> Iterator[None]:
    """Leave the status page out of ``trainer`` and its ``groups`` while the body runs.

    It changes the inside of both, so that the bare step is that of the same trainer, in the same
    memory.
    """
    watched: list[Any] = [trainer, *_all_groups(groups)]
    pages = [one._status for one in watched]
    for one in watched:
        one._status = None
    try:
        yield
    finally:
        for one, page in zip(watched, pages, strict=True):
            one._status = page


def write_random_tokens(prefix: Path, vocabulary: int) -> None:
    """A corpus of random documents, the same for each ``vocabulary``."""
    random = np.random.default_rng(_RANDOM_SEED)
    dtype = token_dtype(vocabulary)
    with IndexedWriter(prefix, dtype) as writer:
        while writer.tokens < _RANDOM_TOKENS:
            length = 1 + int(random.exponential(DOCUMENT_TOKENS))
            writer.add_document(random.integers(0, vocabulary, length).astype(dtype))


DOCUMENT_TOKENS = 512  # mean length of random documents
_MOST_RANDOM_STEPS = 64
_BATCH_TOKENS = 1 << 23  # of all random steps and ranks together, 32 bytes each


class Batches:
    """The micro-batches of one rank's replica.

    Raises:
        DataError: the corpus is missing, damaged, or of another vocabulary.
    """

    def __init__(self, config: JobConfig, rank: int, device: torch.device) -> None:
        self._config, self._device = config, device
        self._dp_rank = config.layout.coordinates(rank).dp
        self._stream = SampleStream.open(config) if config.data.sources else None
        self._random = [] if self._stream else self._random_steps()

    def step(self, number: int) -> list[MicroBatch]:
        """The micro-batches of the step after ``number`` completed ones, on the device.

        It never waits for the device.
        """
        if self._stream is None:
            return self._random[number % len(self._random)]
        first = number * self._config.training.global_batch_size
        rows = [[self._stream.sample(sample) for sample in row] for row in self._numbers(first)]
        return [self._to_device(_stack(samples)) for samples in rows]

    def _random_steps(self) -> list[list[MicroBatch]]:
        samples = self._config.training.global_batch_size
        tokens = samples * self._config.model.sequence_length
        steps = max(1, min(_MOST_RANDOM_STEPS, _BATCH_TOKENS // tokens))
        return [self._random_step(step * samples) for step in range(steps)]

    def _random_step(self, first: int) -> list[MicroBatch]:
        rows = [
            [_random_sample(self._config, number) for number in row] for row in self._numbers(first)
        ]
        return [self._to_device(_stack(samples)) for samples in rows]

    def _numbers(self, first: int) -> list[list[int]]:
        """The samples of this replica, by micro-batch, in the step that starts at sample ``first``.

        The step has the same samples for any dp.
        """
        config, size = self._config, self._config.training.micro_batch_size
        found = sample_numbers(
            first, config.micro_batches, size, config.parallelism.dp, self._dp_rank
        )
        return [[int(number) for number in row] for row in found]

    def _to_device(self, arrays: Arrays) -> MicroBatch:
        batch = MicroBatch.from_numpy(arrays)
        return batch.pin().to(self._device) if self._device.type == "cuda" else batch


def _stack(samples: list[Arrays]) -> Arrays:
    return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def _random_sample(config: JobConfig, number: int) -> Arrays:
    length, generator = config.model.sequence_length, np.random.default_rng(number)
    tokens = generator.integers(0, config.model.vocab_size, length + 1)
    start = np.zeros(length, np.int64)
    if config.data.document_attention:
        begins = np.flatnonzero(generator.random(length) < 1 / DOCUMENT_TOKENS)
        start[begins] = begins
        np.maximum.accumulate(start, out=start)
    return {
        "tokens": tokens[:-1],
        "targets": tokens[1:],
        "loss_weight": np.ones(length, np.float32),
        "position": np.arange(length) - start,
        "document_start": start,
    }


def _all_groups(groups: Groups) -> list[Group]:
    """Every group of a rank, once."""
    found = [*groups.named.values(), *vars(groups.edges).values(), groups.ends]
    return [group for group in dict.fromkeys(found) if group is not None]

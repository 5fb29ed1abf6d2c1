"""One soak: a twin without faults, then jobs under faults until the time is over."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.harness.corpus import random_documents, write_corpus
from tests.harness.paced import paced
from tests.harness.waiting import Standstill, eventually
from tests.soak.clusters import (
    CHECKPOINT_MIB,
    RUN_MIB,
    SoakCluster,
    SupervisedCluster,
    UpCluster,
    small_disk,
)
from tests.soak.faults import REASON, Faults
from tests.soak.follow import Followed
from tests.soak.measure import WINDOW_S, Measurements

from megascale.v1 import job_pb2
from megascale_checkpoint.memory.staging import default_base
from megascale_client import AsyncClient, MegascaleError, parse_job

PACE_S = 0.12  # a step sleeps so long: faults hit a job in each of its states
ROUND_S = (25.0, 45.0, 70.0)  # faults begin for so long
PAUSES_S = (0.0, 0.05, 0.3, 1.0, 2.0, 4.0, 8.0)  # up to one of these between two faults
# After the last fault a job makes progress within this time, back-offs included.
STANDSTILL_S = 240.0
GONE_S = 30.0  # after its end no process of a job is left
# The last minutes of a long soak stop services and kill none, so that their growth can be measured.
_LONG_S = 1.5 * WINDOW_S


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What to run."""

    minutes: float
    seed: int
    drivers: int = 1
    tls: bool = False
    disks: bool = True
    steps: int = 150
    folder: Path | None = None


@dataclass(slots=True)
class Result:
    """What came out of a soak; ``broken`` are the promises that did not hold."""

    seed: int
    tls: bool
    drivers: int
    minutes: float = 0.0
    rounds: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    attempts: list[int] = field(default_factory=list)
    losses_compared: int = 0
    broken: list[str] = field(default_factory=list)
    slopes: dict[str, dict[str, float]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """For the last line of the output."""
        return {**asdict(self), "faults_in_all": sum(self.faults.values())}


def say(*words: object) -> None:
    """Report progress."""
    print(time.strftime("%H:%M:%S"), *words, file=sys.stderr, flush=True)


async def soak(options: Options) -> Result:
    """Run a soak; its folder stays where a promise was broken."""
    result = Result(options.seed, options.tls, options.drivers)
    began_s = time.monotonic()
    with _surroundings(options) as folder:
        cluster: SoakCluster = (
            UpCluster(folder, tls=options.tls)
            if options.drivers == 1
            else SupervisedCluster(folder, options.drivers, tls=options.tls)
        )
        say(f"seed {options.seed}; cluster {cluster.name} in {folder}")
        try:
            await cluster.start()
            run = _Run(cluster, options, result, began_s)
            await run.carry_out()
        except Exception as error:
            result.broken.append(f"the soak ended early: {error!r}"[:2000])
        finally:
            if problem := await cluster.stop():
                result.broken.append(problem)
        left = await _left(cluster)
        result.broken += [f"left behind, {kind}: {what}" for kind, what in left.items() if what]
        shutil.rmtree(default_base() / cluster.name, ignore_errors=True)
        result.minutes = round((time.monotonic() - began_s) / 60, 1)
        if result.broken:
            _keep_logs(cluster, folder)
    return result


@contextlib.contextmanager
def _surroundings(options: Options) -> Iterator[Path]:
    """A folder with its small disks, and a runtime folder of its own."""
    folder = options.folder or Path(tempfile.mkdtemp(prefix="megascale-soak-"))
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    runtime = Path(
        tempfile.mkdtemp(prefix="ms-", dir="/tmp")
    )  # short: paths of sockets are bounded
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    try:
        with contextlib.ExitStack() as stack:
            if options.disks:
                stack.enter_context(small_disk(folder / "run", RUN_MIB))
                stack.enter_context(small_disk(folder / "checkpoints", CHECKPOINT_MIB))
            else:
                (folder / "run").mkdir(mode=0o700, exist_ok=True)
                (folder / "checkpoints").mkdir(exist_ok=True)
            yield folder
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before
        shutil.rmtree(runtime, ignore_errors=True)


async def _left(cluster: SoakCluster) -> dict[str, list[str]]:
    """What is left of a stopped cluster after it had time to go."""
    with contextlib.suppress(Standstill):
        await eventually(lambda: not any(cluster.left().values()), "nothing left", limit_s=GONE_S)
    return cluster.left()


def _keep_logs(cluster: SoakCluster, folder: Path) -> None:
    """Copy the logs from the disk that goes."""
    for path in cluster.run.rglob("*.log"):
        to = folder / "logs" / path.relative_to(cluster.run)
        to.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):
            shutil.copyfile(path, to)
    say(f"logs are kept in {folder / 'logs'}")


class _Run:
    """The jobs of one soak on a cluster that is up."""

    def __init__(
        self, cluster: SoakCluster, options: Options, result: Result, began_s: float
    ) -> None:
        self._cluster, self._options, self._result = cluster, options, result
        self._end_s = began_s + 60 * options.minutes
        self._random = random.Random(options.seed)
        self._corpus = write_corpus(
            cluster.folder / "corpus", random_documents(seed=7, count=200, longest=200)
        )

    async def carry_out(self) -> None:
        """The twin, then one job after the other until the time is over."""
        measurements = Measurements(self._cluster)
        measuring = asyncio.create_task(measurements.run())
        try:
            async with self._cluster.client() as client:
                twin = await self._twin(client)
                faults = Faults(self._cluster, client, self._random, self._options.disks)
                while time.monotonic() < self._end_s and not self._result.broken:
                    await self._round(client, faults, twin)
                    self._result.faults = dict(faults.counts)
                    self._result.broken += faults.problems
                    if reason := self._cluster.failed():
                        self._result.broken.append(reason)
        finally:
            measuring.cancel()
            await asyncio.gather(measuring, return_exceptions=True)
            self._result.slopes = measurements.slopes(time.monotonic())

    async def _twin(self, client: AsyncClient) -> dict[int, float]:
        twin = Followed(self._spec("twin", replicas=0))
        await client.submit(twin.spec)
        following = asyncio.create_task(twin.follow(client))
        await self._until_ended(client, twin, following)
        if sorted(twin.losses) != list(range(1, self._options.steps + 1)):
            raise RuntimeError(f"the twin is {twin.phase} with {len(twin.losses)} losses")
        say(f"the twin trained {len(twin.losses)} steps")
        await self._forget(client, twin)
        return twin.losses

    async def _round(self, client: AsyncClient, faults: Faults, twin: dict[int, float]) -> None:
        number = self._result.rounds = self._result.rounds + 1
        spec = self._spec(f"job-{number}", replicas=1 if number % 3 else 0)
        job = Followed(spec, twin)
        say(f"round {number}: {job.name}")
        await client.submit(spec)
        following = asyncio.create_task(job.follow(client))
        now_s = time.monotonic()
        until_s = min(now_s + self._random.choice(ROUND_S), max(self._end_s, now_s + ROUND_S[0]))
        long = 60 * self._options.minutes >= _LONG_S
        while time.monotonic() < until_s and not following.done():
            faults.spares_services = long and time.monotonic() > self._end_s - WINDOW_S
            await asyncio.sleep(self._random.choice(PAUSES_S) * self._random.random())
            faults.strike(job)
            await faults.revive()
        ending = asyncio.create_task(faults.end(job))
        try:
            await self._until_ended(client, job, following, faults)
        finally:
            await ending
        await self._check(client, job)

    async def _until_ended(
        self,
        client: AsyncClient,
        job: Followed,
        following: asyncio.Task[None],
        faults: Faults | None = None,
    ) -> None:
        """Wait for the job's end; a job that stands still is cancelled, and breaks a promise."""
        job.moved_s = time.monotonic()
        while not following.done():
            await asyncio.sleep(0.5)
            if faults is not None:
                await faults.revive()
            if job.suspended:  # an order to suspend came last
                with contextlib.suppress(MegascaleError):
                    await client.resume(job.name, REASON)
            if time.monotonic() - job.moved_s > STANDSTILL_S:
                explained = ""
                with contextlib.suppress(MegascaleError):
                    explained = (await client.explain(job.name)).explanation
                self._result.broken.append(
                    f"{job.name} stands still for {STANDSTILL_S:g} s: {job.state}; {explained}"
                )
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                return
        await following

    async def _check(self, client: AsyncClient, job: Followed) -> None:
        """The promises of one job."""
        broken = self._result.broken
        broken += job.broken
        if job.phase != "SUCCEEDED":
            broken.append(f"{job.name} did not succeed: {job.state}")
        self._result.losses_compared += len(job.losses)
        self._result.attempts.append(job.job.attempt if job.job is not None else 0)
        with contextlib.suppress(Standstill):
            await eventually(lambda: not self._workers_of(job), "no worker", limit_s=GONE_S)
        if left := self._workers_of(job):
            broken.append(f"{job.name} has ended, and these run on: {left}")
        say(f"{job.name} {job.state}; {len(job.losses)} losses")
        if broken:
            for line in job.events[-60:]:
                say("  ", line)
        else:
            await self._forget(client, job)

    def _workers_of(self, job: Followed) -> list[str]:
        mark = f"of job {job.name} "
        return [one.command for one in self._cluster.processes() if mark in one.command]

    async def _forget(self, client: AsyncClient, job: Followed) -> None:
        """Remove the job and its checkpoints: the disk is small."""
        with contextlib.suppress(MegascaleError):
            await client.delete(job.name, REASON)
        shutil.rmtree(self._cluster.checkpoints / job.name, ignore_errors=True)

    def _spec(self, name: str, *, replicas: int) -> job_pb2.JobSpec:
        return parse_job(
            {
                "name": name,
                "trainer": {
                    "model": {"layers": 4, "hidden_size": 32, "heads": 2, "vocab_size": 257,
                              "sequence_length": 16},
                    "parallelism": {"tp": 2, "pp": 2},
                    "training": {"steps": self._options.steps, "global_batch_size": 4,
                                 "precision": "fp32"},
                    "optimizer": paced(PACE_S),
                    "data": {"sources": [{"prefix": str(self._corpus)}]},
                },
                "checkpoint": {"uri": str(self._cluster.checkpoints / name), "interval_steps": 5,
                               "snapshot_interval_steps": 1, "replicas": replicas,
                               "final_timeout_s": 60, "keep_latest": 6},
                "recovery": {"collective_timeout_s": 30, "max_restarts": 60,
                             "max_restarts_without_progress": 12},
            }
        )  # fmt: skip

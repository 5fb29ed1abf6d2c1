"""A storage that hangs: it is reported, other jobs are not held up, and the daemon can end."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.checkpoint_files import image_of, registration_of
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale_checkpoint.concurrency import Pools
from megascale_checkpoint.memory.staging import StagingFolder
from megascale_checkpoint.save import rank_snapshots
from megascale_checkpoint.save.committer_client import CommitterClient
from megascale_checkpoint.save.persist import Progress
from megascale_checkpoint.save.rank_snapshots import RankSnapshots
from megascale_checkpoint.serve.jobs import Jobs
from megascale_checkpoint.storage import SCHEMES, FileStorage
from megascale_checkpoint.storage.disk import SystemDisk
from megascale_common.service.errors import RequestError
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece

VALUES = {"vector": np.arange(64, dtype=np.float32)}
PIECE = ShardPiece("vector", "master", "float32", (64,), (0,), (64,), 0, 64, 0, primary=True)
LAYOUT = ShardLayout((PIECE,), 256)


class HungDisk(SystemDisk):
    """A disk whose writes wait for ``answers``."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.answers = threading.Event(), threading.Event()

    def write(self, descriptor: int, data: memoryview) -> int:
        self.asked.set()
        self.answers.wait()
        return super().write(descriptor, data)


@pytest.fixture
def silent_in_the_disk(disk: HungDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread counts as silent from its write on: one that is given up before is not left."""

    def still_s(progress: Progress) -> float:
        return time.monotonic() - progress.moved_s if disk.asked.is_set() else 0.0

    monkeypatch.setattr(Progress, "still_s", property(still_s))


class Owner:
    """A worker's connection; ``serial`` counts them in the order in which they were accepted."""

    def __init__(self, serial: int = 1) -> None:
        self.serial, self.ended = serial, False

    def end(self) -> set[int]:
        self.ended = True
        return set()


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    hung = HungDisk()
    monkeypatch.setitem(
        SCHEMES, "hung", lambda uri: FileStorage(Path(uri.removeprefix("hung://")), hung, uri)
    )
    yield hung
    hung.answers.set()


@pytest.fixture
async def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Jobs]:
    monkeypatch.setattr(rank_snapshots, "STOP_S", CALL_TIMEOUT_S)
    pools, staging = Pools(), StagingFolder(tmp_path / "staging", "c", "n", "i1")
    yield Jobs(staging, pools, CommitterClient("token"))
    pools.close()
    staging.remove()


async def register(jobs: Jobs, job: str, uri: str, rank: int = 0) -> RankSnapshots:
    given = registration_of(uri, rank, 64, LAYOUT, job=job, committer="127.0.0.1:1")
    return await jobs.register(given, Owner())


def seal(snapshots: RankSnapshots, step: int) -> None:
    index = snapshots.acquire(step)
    assert index is not None
    image = image_of(LAYOUT, VALUES)
    snapshots.memories[index].view[: len(image)] = image
    snapshots.seal(index, step, {}, finite=True)


async def test_a_storage_that_does_not_answer_is_reported_while_it_hangs(
    jobs: Jobs, disk: HungDisk, tmp_path: Path
) -> None:
    snapshots = await register(jobs, "job", f"hung://{tmp_path}/checkpoints")
    snapshots.store_silent_s = 0.05
    seal(snapshots, 10)
    job = jobs.job("job")
    await eventually(lambda: job.failure is not None, "the report of the hung storage")
    assert job.failure is not None and "has not answered for" in job.failure.error
    assert (job.failure.step, job.failure.rank) == (10, 0)
    disk.answers.set()
    await eventually(lambda: job.persists.count == 1, "the file")
    assert await jobs.close(0.0)


async def test_a_hung_storage_of_one_job_does_not_hold_up_another(
    jobs: Jobs, disk: HungDisk, tmp_path: Path
) -> None:
    ranks = [await register(jobs, "hung", f"hung://{tmp_path}/a", rank) for rank in range(16)]
    for rank in ranks:  # more than the threads of a pool
        seal(rank, 10)
    other = await register(jobs, "other", str(tmp_path / "b"))
    seal(other, 10)
    await eventually(lambda: jobs.job("other").persists.count == 1, "the other job's file")
    assert jobs.job("hung").persists.count == 0
    disk.answers.set()
    assert await jobs.close(0.0)


async def test_closing_does_not_wait_for_a_hung_storage(
    jobs: Jobs, disk: HungDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_snapshots, "STOP_S", 0.1)
    snapshots = await register(jobs, "job", f"hung://{tmp_path}/a")
    seal(snapshots, 10)
    await eventually(disk.asked.is_set, "the write")
    async with asyncio.timeout(CALL_TIMEOUT_S):
        assert not await jobs.close(0.0), "a thread is still in the storage"
    assert bytes(snapshots.memories[0].view[:4]) == bytes(4), "its slot is still mapped"


@pytest.mark.usefixtures("silent_in_the_disk")
async def test_a_slot_that_a_storage_holds_is_given_back(
    jobs: Jobs, disk: HungDisk, tmp_path: Path
) -> None:
    """Without it both slots stay lost, and every snapshot from then on is skipped."""
    snapshots = await register(jobs, "job", f"hung://{tmp_path}/checkpoints")
    snapshots.given_up_s = 0.1
    job = jobs.job("job")
    for step in (10, 20):
        disk.asked.clear()
        seal(snapshots, step)
        await eventually(
            lambda step=step: job.failure is not None and job.failure.step == step,
            "the step is given up",
        )
    assert job.failure is not None
    assert "is given up, and its slot is free" in job.failure.error
    assert not any(slot.busy for slot in snapshots.table.slots)
    # Two threads are left alone at most: the third write waits for the storage.
    seal(snapshots, 30)
    await asyncio.sleep(2 * snapshots.given_up_s)
    assert job.failure.step == 20 and snapshots.persisting is not None
    snapshots.given_up_s = 60.0
    disk.answers.set()
    await eventually(lambda: job.persists.count == 1, "the storage has answered")
    seal(snapshots, 40)
    await eventually(lambda: job.persists.count == 2, "and takes the next step")
    await eventually(lambda: not snapshots._left_alone, "the threads that were given up have ended")
    assert await jobs.close(0.0)


@pytest.mark.usefixtures("silent_in_the_disk")
async def test_memory_that_a_storage_holds_is_free_for_another_job(
    jobs: Jobs, disk: HungDisk, tmp_path: Path
) -> None:
    snapshots = await register(jobs, "job", f"hung://{tmp_path}/a")
    snapshots.given_up_s = 0.05
    seal(snapshots, 10)
    held = snapshots.memories[0].view[:4]
    await eventually(lambda: jobs.job("job").failure is not None, "the step is given up")
    snapshots.owner = None
    before = jobs._staging.used_bytes
    other = await register(jobs, "other", str(tmp_path / "b"))
    assert not jobs.job("job").ranks and len(other.memories) > 0
    assert jobs._staging.used_bytes == before, "as much as the other job's, and no more"
    assert bytes(held) == bytes(4), "its pages are gone, whoever maps them"
    disk.answers.set()
    assert await jobs.close(0.0)


def open_slots(base: Path) -> int:
    """Descriptors of slots below a folder, also of those whose file is removed."""
    names = (os.path.realpath(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd"))
    return sum(name.startswith(f"{base}/") and "/slot-" in name for name in names)


async def test_the_memory_of_jobs_that_ended_unsaved_is_free_for_the_next(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Another rank's part was not written: what waits for the commit holds no memory."""
    held = []
    for number in range(3):
        job = f"job{number}"
        snapshots = await register(jobs, job, str(tmp_path / job))
        held.append((jobs._staging.used_bytes, open_slots(tmp_path)))
        seal(snapshots, 10)
        await eventually(lambda job=job: jobs.job(job).persists.count == 1, "the file")
        snapshots.owner = None
    assert held[0] == held[1] == held[2] and held[0][1] > 0
    assert await jobs.close(0.0)


async def test_slots_of_failed_writes_leave_no_descriptor(jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "full").write_text("no folder can be made here")
    gc.disable()
    try:
        for number in range(4):
            job = f"job{number}"
            snapshots = await register(jobs, job, f"{tmp_path}/full/{number}")
            expected = len(snapshots.memories)
            assert open_slots(tmp_path) == expected
            for step in (1, 2):
                seal(snapshots, step)
            await eventually(lambda job=job: jobs.job(job).failures >= 2, "failed writes")
            snapshots.owner = None
    finally:
        gc.enable()
    assert await jobs.close(0.0)


async def test_a_report_outlives_the_memory_of_its_job(
    jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of its last step are durable: the commit is noted when it comes."""
    complete = asyncio.Event()

    async def report_prepared(*_: object) -> str:
        await complete.wait()
        return "manifest"

    monkeypatch.setattr(jobs._committer, "report_prepared", report_prepared)
    snapshots = await register(jobs, "job", str(tmp_path / "a"))
    seal(snapshots, 10)
    await eventually(lambda: snapshots.is_reported(10), "the report")
    snapshots.owner = None
    await register(jobs, "other", str(tmp_path / "b"))
    job = jobs.job("job")
    assert not job.ranks and job.committed.step == 0
    asyncio.get_running_loop().call_later(0.05, complete.set)
    assert await jobs.close(CALL_TIMEOUT_S)
    assert job.committed.step == 10, "also a daemon that ends waits for it"


class Blocked:
    """Keeps all threads of the memory pool busy until released."""

    def __init__(self, jobs: Jobs) -> None:
        self.event = threading.Event()
        pool = jobs._pools.memory
        for _ in range(pool._max_workers):
            pool.submit(self.event.wait)


@pytest.mark.parametrize(("attempts", "serials"), [((1, 1), (1, 2)), ((1, 2), (2, 1))])
async def test_a_stale_registration_does_not_take_the_place_of_a_live_one(
    jobs: Jobs, attempts: tuple[int, int], serials: tuple[int, int]
) -> None:
    """The stale one frees another job's memory first, and is overtaken meanwhile."""
    before = await register(jobs, "before", "")
    before.owner = None
    blocked = Blocked(jobs)
    stale, live = map(Owner, serials)

    def registering(owner: Owner, attempt: int) -> asyncio.Task[RankSnapshots]:
        given = registration_of("", 0, 1, LAYOUT, attempt=attempt)
        return asyncio.create_task(jobs.register(given, owner))

    first = registering(stale, attempts[0])
    await asyncio.sleep(0.05)
    second = registering(live, attempts[1])
    await asyncio.sleep(0.05)
    blocked.event.set()
    snapshots = await second
    with pytest.raises(RequestError, match="superseded"):
        await first
    assert snapshots.owner is live and not live.ended
    assert await jobs.close(0.0)

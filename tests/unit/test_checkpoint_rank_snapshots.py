"""A rank's snapshots: a slot is never given to another while a thread still works on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.checkpoint_files import image_of, registration_of, write_checkpoint
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_checkpoint.checksums import piece_checksums
from megascale_checkpoint.concurrency import Cancellation, Pools, Signal
from megascale_checkpoint.memory.slots import SlotPhase, SlotSeal
from megascale_checkpoint.memory.staging import StagingFolder
from megascale_checkpoint.restore.rank_restore import MemoryProblem
from megascale_checkpoint.save.committer_client import CommitterClient
from megascale_checkpoint.save.persist import write_rank_file
from megascale_checkpoint.save.rank_snapshots import RankSnapshots
from megascale_checkpoint.serve.jobs import JobCheckpoints
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece

VALUES = {"vector": np.arange(64, dtype=np.float32)}
PIECE = ShardPiece("vector", "master", "float32", (64,), (0,), (64,), 0, 64, 0, primary=True)
LAYOUT = ShardLayout((PIECE,), 256)


@pytest.fixture
async def snapshots(tmp_path: Path) -> AsyncIterator[RankSnapshots]:
    pools = Pools()
    staging = StagingFolder(tmp_path / "staging", "c", "n", "i1")
    registration = registration_of("", 0, 1, LAYOUT)
    made = await RankSnapshots.create(
        registration, JobCheckpoints("job", Signal()), staging, pools, CommitterClient("token")
    )
    yield made
    await made.stop(0.0)
    staging.free(made.memories)
    pools.close()


class Blocked:
    """Keeps all threads of a pool busy until released, so that new work waits for a thread."""

    def __init__(self, snapshots: RankSnapshots, name: str) -> None:
        pool = getattr(snapshots._pools, name)
        self.event = threading.Event()
        for _ in range(pool._max_workers):
            pool.submit(self.event.wait)


async def cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def until_idle(snapshots: RankSnapshots) -> None:
    async with asyncio.timeout(CALL_TIMEOUT_S):
        await asyncio.gather(*snapshots.restores._running, return_exceptions=True)
    assert snapshots.idle()


async def test_a_cancelled_restore_keeps_its_slot_until_its_thread_has_ended(
    snapshots: RankSnapshots, tmp_path: Path
) -> None:
    uri = write_checkpoint(tmp_path / "checkpoints", [LAYOUT], VALUES)
    blocked = Blocked(snapshots, "storage")
    first = asyncio.create_task(
        snapshots.restores.restore(RestorePlan(RestoreSource("storage"), 10, 1, uri))
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await cancel(first)
    assert [slot.phase for slot in snapshots.table.slots].count(SlotPhase.RESTORING) == 1
    assert not snapshots.idle(), "its memory must not be freed"
    second = asyncio.create_task(
        snapshots.restores.restore(RestorePlan(RestoreSource("storage"), 10, 1, uri))
    )
    await asyncio.sleep(0.01)
    blocked.event.set()
    found = await second
    assert bytes(snapshots.memories[found.slot].view[:256]) == image_of(LAYOUT, VALUES)[:256]
    assert not snapshots.idle()
    snapshots.release(found.slot)
    await until_idle(snapshots)
    assert [slot.phase for slot in snapshots.table.slots] == [SlotPhase.FREE, SlotPhase.FREE]


async def test_a_cancelled_restore_from_memory_gives_its_slot_back(
    snapshots: RankSnapshots,
) -> None:
    index = snapshots.acquire(5)
    assert index is not None
    snapshots.seal(index, 5, {}, finite=True)
    await snapshots.sealed()
    blocked = Blocked(snapshots, "memory")
    reader = asyncio.create_task(
        snapshots.restores.restore(RestorePlan(RestoreSource("memory"), 5, 1, ""))
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await cancel(reader)
    assert snapshots.table.at(index).busy == 2, "lent to the worker, and to the threads"
    blocked.event.set()
    await until_idle(snapshots)
    assert (
        snapshots.table.at(index).busy == 0 and snapshots.table.at(index).phase is SlotPhase.SEALED
    )


async def test_a_state_that_an_attempt_adopted_is_found_as_its_own(
    snapshots: RankSnapshots,
) -> None:
    index = snapshots.acquire(5)
    assert index is not None
    snapshots.seal(index, 5, {}, finite=True)
    await snapshots.sealed()
    source = RestoreSource("storage")
    other = await snapshots.restores.look_in_memory(RestorePlan(source, 5, 2, "/m"))
    assert isinstance(other, MemoryProblem) and other.damage is None
    snapshots.table.adopt(index, 2)
    found = await snapshots.restores.look_in_memory(RestorePlan(source, 5, 2, "/m"))
    assert not isinstance(found, MemoryProblem) and found.slot == index
    other = await snapshots.restores.look_in_memory(RestorePlan(source, 5, 3, "/m"))
    assert isinstance(other, MemoryProblem)


def test_a_part_that_was_written_before_is_written_beside_it(tmp_path: Path) -> None:
    """As by a daemon that ended before it could report the first file."""
    image = image_of(LAYOUT, VALUES)
    registration = registration_of(str(tmp_path), 0, 1, LAYOUT)
    checksums = piece_checksums(LAYOUT, memoryview(image))
    seal = SlotSeal(1, 20, registration.digest, checksums, {})
    reports = [
        write_rank_file(registration, seal, memoryview(image), Cancellation()) for _ in range(2)
    ]
    names = [report.files[0].path for report in reports]
    assert names == ["rank-00000.safetensors", "rank-00000-2.safetensors"]
    assert reports[0].files[0].xxh3 == reports[1].files[0].xxh3

"""A rank's stage: a slot is never given to another while a thread still works on it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.harness.checkpoint_files import image_of, registration_of, write_checkpoint
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_checkpoint.concurrency import Pools, Signal
from megascale_checkpoint.jobs import Job
from megascale_checkpoint.reporting import Reporter
from megascale_checkpoint.slots import Phase
from megascale_checkpoint.stage import RankStage
from megascale_checkpoint.staging import StagingFolder
from megascale_common.job.restore import RestorePlan, RestoreSource
from megascale_common.sizes.checkpoint_layout import ShardLayout, ShardPiece

VALUES = {"vector": np.arange(64, dtype=np.float32)}
PIECE = ShardPiece("vector", "master", "float32", (64,), (0,), (64,), 0, 64, 0, primary=True)
LAYOUT = ShardLayout((PIECE,), 256)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[RankStage]:
    pools = Pools()
    staging = StagingFolder(tmp_path / "staging", "c", "n", "i1")
    registration = registration_of("", 0, 1, LAYOUT)
    made = await RankStage.create(
        registration, Job("job", Signal()), staging, pools, Reporter("token")
    )
    yield made
    await made.stop(0.0)
    staging.free(made.memories)
    pools.close()


class Blocked:
    """All threads of a pool, busy until released: what is asked of it meanwhile has begun and does
    not end.
    """

    def __init__(self, stage: RankStage, name: str) -> None:
        pool = getattr(stage._pools, name)
        self.event = threading.Event()
        for _ in range(pool._max_workers):
            pool.submit(self.event.wait)


async def cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def until_idle(stage: RankStage) -> None:
    async with asyncio.timeout(CALL_TIMEOUT_S):
        await asyncio.gather(*stage._restores, return_exceptions=True)
    assert stage.idle()


async def test_a_cancelled_restore_keeps_its_slot_until_its_thread_has_ended(
    stage: RankStage, tmp_path: Path
) -> None:
    uri = write_checkpoint(tmp_path / "checkpoints", [LAYOUT], VALUES)
    blocked = Blocked(stage, "storage")
    first = asyncio.create_task(stage.restore(RestorePlan(RestoreSource("storage"), 10, 1, uri)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await cancel(first)
    assert [slot.phase for slot in stage.table.slots].count(Phase.RESTORING) == 1
    assert not stage.idle(), "its memory must not be freed"
    second = asyncio.create_task(stage.restore(RestorePlan(RestoreSource("storage"), 10, 1, uri)))
    await asyncio.sleep(0.01)
    blocked.event.set()
    found = await second
    assert bytes(stage.memories[found.slot].view[:256]) == image_of(LAYOUT, VALUES)[:256]
    assert not stage.idle()
    stage.release(found.slot)
    await until_idle(stage)
    assert [slot.phase for slot in stage.table.slots] == [Phase.FREE, Phase.FREE]


async def test_a_cancelled_restore_from_memory_gives_its_slot_back(stage: RankStage) -> None:
    index = stage.acquire(5)
    assert index is not None
    await stage.seal(index, 5, {}, finite=True)
    blocked = Blocked(stage, "memory")
    reader = asyncio.create_task(stage.restore(RestorePlan(RestoreSource("memory"), 5, 1, "")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await cancel(reader)
    assert stage.table.at(index).busy == 1
    blocked.event.set()
    await until_idle(stage)
    assert stage.table.at(index).busy == 0 and stage.table.at(index).phase is Phase.SEALED

"""Checksums follow the bytes of a copy while it runs; what changes behind them is found damaged."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.harness.checkpoint_files import registration_of
from tests.harness.waiting import eventually

from megascale_checkpoint.checksums import piece_checksums
from megascale_checkpoint.concurrency import Cancellation, Pools, Signal
from megascale_checkpoint.memory import slots as landings
from megascale_checkpoint.memory.slots import Landing
from megascale_checkpoint.memory.staging import SlotMemory, StagingFolder
from megascale_checkpoint.restore.rank_restore import MemoryProblem
from megascale_checkpoint.save.committer_client import CommitterClient
from megascale_checkpoint.save.persist import write_rank_file
from megascale_checkpoint.save.rank_snapshots import RankSnapshots
from megascale_checkpoint.serve.jobs import JobCheckpoints
from megascale_common.service.errors import DamagedError
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece

SIZES = (4000, 70_000, 12, 30_000, 4096)  # elements; some pieces are cut by several parts


def _layout() -> ShardLayout:
    """Pieces of odd sizes with gaps between them, named out of their order in the slot."""
    pieces, at = [], 0
    for number, size in enumerate(SIZES):
        pieces.append(
            ShardPiece(
                f"layers.{number}.q.weight", "master", "float32",
                (size,), (0,), (size,), 0, size, at, primary=True,
            )
        )  # fmt: skip
        at += 4 * size + 64
    return ShardLayout((*pieces[2:], *pieces[:2]), at)


LAYOUT = _layout()


@pytest.fixture
async def snapshots(tmp_path: Path) -> AsyncIterator[RankSnapshots]:
    pools = Pools()
    staging = StagingFolder(tmp_path / "staging", "c", "n", "i1")
    uri = str(tmp_path / "checkpoints")
    made = await RankSnapshots.create(
        registration_of(uri, 0, 1, LAYOUT),
        JobCheckpoints("job", Signal()),
        staging,
        pools,
        CommitterClient("token"),
    )
    yield made
    await made.stop(0.0)
    staging.free(made.memories)
    pools.close()


def land(memory: SlotMemory, values: bytes, stop: int) -> None:
    """Copy what is missing up to ``stop``, as a trainer does."""
    start = memory.landed_bytes
    memory.view[start:stop] = values[start:stop]
    memory.landed_bytes = stop


async def until_followed(landing: Landing, count: int) -> None:
    await eventually(lambda: landing._done >= count, f"the checksums of {count} bytes")


@pytest.mark.parametrize("seed", range(5))
async def test_the_checksums_of_a_copy_in_parts_are_those_of_the_whole(
    snapshots: RankSnapshots, seed: int
) -> None:
    rng = random.Random(seed)
    values = rng.randbytes(LAYOUT.slot_bytes)
    memory, index = snapshots.memories[0], snapshots.acquire(5)
    assert index == 0
    landing = snapshots._landings[0]
    for stop in sorted(rng.sample(range(1, LAYOUT.slot_bytes), 6)):
        land(memory, values, stop)
        if rng.random() < 0.5:
            await until_followed(landing, stop)
    land(memory, values, LAYOUT.slot_bytes)
    snapshots.seal(0, 5, {}, finite=True, persist=False)
    await snapshots.sealed()
    seal = snapshots.table.at(0).seal
    assert seal is not None
    assert seal.checksums == piece_checksums(LAYOUT, memoryview(values))


async def test_a_slot_that_notes_nothing_is_read_at_its_seal(snapshots: RankSnapshots) -> None:
    assert snapshots.acquire(5) == 0
    snapshots.memories[0].view[:3] = b"abc"
    snapshots.seal(0, 5, {}, finite=True, persist=False)
    await snapshots.sealed()
    seal = snapshots.table.at(0).seal
    assert seal is not None
    assert seal.checksums == piece_checksums(LAYOUT, snapshots.memories[0].view)


@pytest.mark.parametrize("said", [LAYOUT.slot_bytes, 2**64 - 1])
async def test_bytes_that_change_behind_their_checksum_are_never_taken_for_the_state(
    snapshots: RankSnapshots, said: int
) -> None:
    """A bit that flips, or a writer that notes its bytes too early, or more than there are."""
    assert snapshots.acquire(5) == 0
    memory = snapshots.memories[0]
    memory.landed_bytes = said
    await until_followed(snapshots._landings[0], LAYOUT.slot_bytes)
    piece = LAYOUT.pieces[1]
    memory.view[piece.slot_offset_bytes] ^= 1
    snapshots.seal(0, 5, {}, finite=True, persist=False)
    await snapshots.sealed()
    seal = snapshots.table.at(0).seal
    assert seal is not None, "it is sealed, and every reader verifies it"
    with pytest.raises(DamagedError, match=piece.name):
        write_rank_file(snapshots.registration, seal, memory.view, Cancellation())
    found = await snapshots.restores.look_in_memory(RestorePlan(RestoreSource.MEMORY, 5, 1))
    assert isinstance(found, MemoryProblem) and piece.name in str(found.damage)


async def test_a_slot_starts_again_at_no_byte(snapshots: RankSnapshots) -> None:
    values = bytes(range(256)) * (LAYOUT.slot_bytes // 256 + 1)
    assert snapshots.acquire(5) == 0
    land(snapshots.memories[0], values, LAYOUT.slot_bytes)
    given_up = snapshots._landings[0]
    snapshots.release(0)
    assert snapshots.acquire(6) == 0
    assert snapshots.memories[0].landed_bytes == 0 and snapshots._landings[0] is not given_up
    await given_up.following
    snapshots.release(0)
    await eventually(snapshots.idle, "the end of what followed the slot")


class Owner:
    """A worker's connection that was writing slot 0."""

    serial = 1

    def end(self) -> set[int]:
        return {0}


async def test_a_slot_whose_writer_is_replaced_is_followed_no_more(
    snapshots: RankSnapshots,
) -> None:
    assert snapshots.acquire(5) == 0
    snapshots.take_over(snapshots.registration, Owner())
    followed, old = snapshots._landings[0], snapshots.memories[0]
    await snapshots.detach_owner()
    assert snapshots.memories[0] is not old, "the old writer maps it still"
    await followed.following
    assert snapshots.acquire(6) == 0
    land(snapshots.memories[0], bytes(range(256)) * 20, 5000)
    await until_followed(snapshots._landings[0], 5000)
    snapshots.release(0)


async def test_a_seal_reads_only_what_landed_last(
    snapshots: RankSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    add = Landing._add

    def counted(self: Landing, parts: list[landings.Part]) -> None:
        read.append(sum(stop - start for _, start, stop in parts))
        add(self, parts)

    monkeypatch.setattr(Landing, "_add", counted)
    values = bytes(LAYOUT.slot_bytes)
    assert snapshots.acquire(5) == 0
    land(snapshots.memories[0], values, LAYOUT.slot_bytes - 4096)
    await until_followed(snapshots._landings[0], LAYOUT.slot_bytes - 4096)
    before = sum(read)
    land(snapshots.memories[0], values, LAYOUT.slot_bytes)
    snapshots.seal(0, 5, {}, finite=True, persist=False)
    await snapshots.sealed()
    assert sum(read) == 4 * sum(SIZES) and 0 < sum(read) - before <= 4096

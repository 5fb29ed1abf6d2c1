"""The plan of a restore: every byte arrives, each is read from storage once, memory is bounded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.checkpoint_files import (
    Values,
    image_of,
    slot_bytes,
    stored_plan,
    write_checkpoint,
)
from tests.harness.piece_layouts import VALUES, Section, layouts, reshardings
from tests.harness.planned_restore import (
    restore_all,
    stored_runs,
    trainer_layouts,
    wanted_runs,
)
from tests.harness.properties import examples

from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.restore.stored_checkpoint import StoredCheckpoint, fill
from megascale_common.service.errors import DamagedError
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece
from megascale_job.sizes.read_plan import (
    SHARE,
    DoesNotFit,
    Rounds,
    check_placed,
    chunk_bytes,
    decode,
    encode,
    join,
    plan_reads,
    runs_of,
)

REPOSITORY = Path(__file__).resolve().parents[2]
MODEL = {
    "layers": 8,
    "hidden_size": 32,
    "heads": 4,
    "vocab_size": 131,
    "sequence_length": 8,
    "positions": "learned",
    "bias": True,
}
# Layouts of a job whose data-parallel size goes from 1 to 64.
GRIDS = [
    {"dp": 1},
    {"dp": 2, "tp": 2},
    {"dp": 4, "pp": 2},
    {"dp": 8},
    {"dp": 16, "tp": 2},
    {"dp": 32},
    {"dp": 64},
    {"tp": 4},
    {"tp": 2, "pp": 2, "virtual_stages": 2},
    {"pp": 4, "dp": 2},
]


def values_of(written: list[ShardLayout]) -> Values:
    shapes = {piece.name: piece.global_shape for layout in written for piece in layout.pieces}
    random = np.random.default_rng(0)
    return {name: random.random(shape, np.float32) for name, shape in shapes.items()}


@examples(80)
@given(layouts(), layouts(), st.data())
def test_any_layout_restores_any_other(
    written: list[ShardLayout], wanted: list[ShardLayout], data: st.DataObject
) -> None:
    files = [image_of(layout, VALUES) for layout in written]
    right = [image_of(layout, VALUES) for layout in wanted]
    chosen = data.draw(st.sets(st.integers(0, len(wanted) - 1)))
    memories = {rank: right[rank] for rank in chosen}
    window_bytes = data.draw(st.sampled_from([4, 12, 64, 4096]))
    done = restore_all(written, files, wanted, memories, window_bytes)
    assert done.images == right
    # The restorer counts each unit's bytes once: whole units, none twice.
    assert sum(done.read_bytes) == sum(done.units_read.values()) == done.plan.storage_bytes.sum()
    assert done.read_bytes == done.plan.storage_bytes.tolist()


@examples(40)
@given(reshardings(), st.data())
def test_any_layout_of_a_job_restores_any_other(
    resharding: tuple[Section, Section, Section], data: st.DataObject
) -> None:
    """Over tp, pp with uneven stages, dp and ep: every value comes back, each byte read once."""
    model, before, after = resharding
    written, wanted = trainer_layouts(model, before), trainer_layouts(model, after)
    values = values_of(written)
    files = [image_of(layout, values) for layout in written]
    right = [image_of(layout, values) for layout in wanted]
    chosen = data.draw(st.sets(st.integers(0, len(wanted) - 1), max_size=2))
    done = restore_all(written, files, wanted, {rank: right[rank] for rank in chosen}, 16384)
    assert done.images == right
    assert sum(done.read_bytes) == sum(done.units_read.values())
    if not chosen:
        everything = sum(p.size_bytes for layout in written for p in layout.pieces if p.primary)
        assert sum(done.read_bytes) == everything


@pytest.mark.parametrize(
    "others",
    [2, pytest.param(len(GRIDS) - 1, marks=pytest.mark.slow)],
    ids=["from two others", "from all others"],
)
@pytest.mark.parametrize("to", GRIDS, ids=str)
def test_each_byte_is_read_once_and_the_reads_are_spread(to: dict[str, int], others: int) -> None:
    wanted = trainer_layouts(MODEL, to)
    at = GRIDS.index(to)
    behind = GRIDS[at + 1 :] + GRIDS[:at]
    chosen = behind[:: -(-len(behind) // others)]
    assert len(chosen) == others
    for grid in chosen:
        written = trainer_layouts(MODEL, grid)
        values = values_of(written)
        files = [image_of(layout, values) for layout in written]
        done = restore_all(written, files, wanted, window_bytes=8192)
        assert done.images == [image_of(layout, values) for layout in wanted], f"from {grid}"
        assert sum(done.read_bytes) <= 1.05 * done.plan.distinct_bytes, f"from {grid}"
        # Even but for the largest piece, which one rank reads.
        largest = int(done.plan.units[:, 2].max())
        mean = sum(done.read_bytes) / len(wanted)
        assert max(done.read_bytes) <= 1.1 * mean + largest, f"from {grid}"
        assert done.most_received <= SHARE * 8192 and done.most_sent <= SHARE * 8192


def test_the_same_layout_moves_nothing_that_only_its_owner_needs() -> None:
    written = trainer_layouts(MODEL, {"dp": 4, "tp": 2})
    plan = plan_reads(stored_runs(written), wanted_runs(written), [False] * 8)
    moved = int(plan.copies[plan.copies[:, 0] != plan.copies[:, 3], 2].sum())
    replicas = sum(p.size_bytes for layout in written for p in layout.pieces if not p.primary)
    assert moved <= 1.25 * replicas


def test_ranks_of_a_lost_node_read_storage_and_take_replicas_from_peers() -> None:
    written = trainer_layouts(MODEL, {"dp": 4, "tp": 2})
    values = values_of(written)
    files = [image_of(layout, values) for layout in written]
    lost = (2, 5)  # each has a tensor-parallel peer in memory
    memories = {rank: files[rank] for rank in range(8) if rank not in lost}
    done = restore_all(written, files, written, memories)
    assert done.images == files
    alone = sum(
        piece.size_bytes
        for rank in lost
        for piece in written[rank].pieces
        if "norm" not in piece.name and "out.bias" not in piece.name
    )
    assert sum(done.read_bytes) <= alone, "what a peer has replicated is not read from storage"
    assert sum(done.read_bytes) == done.plan.distinct_bytes > 0
    assert sum(size > 0 for size in done.read_bytes) == 8, "survivors read for the lost node"
    nothing = restore_all(written, files, written, dict(enumerate(files)))
    assert sum(nothing.read_bytes) == 0 and nothing.plan.copies.size == 0


def test_large_pieces_are_shared_by_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few ranks of many are lost: all others read about the same for them."""
    written = trainer_layouts(MODEL, {"dp": 64})
    values = values_of(written)
    files = [image_of(layout, values) for layout in written]
    memories = {rank: image for rank, image in enumerate(files) if rank not in (5, 40)}

    def reads() -> tuple[list[int], int]:
        done = restore_all(written, files, written, memories, window_bytes=4096)
        assert done.images == files
        assert sum(done.read_bytes) <= 1.05 * done.plan.distinct_bytes
        return done.read_bytes, int(done.plan.units[:, 2].max())

    whole, _ = reads()
    assert max(whole) > 3 * sum(whole) / 64, "as whole pieces"
    monkeypatch.setattr("megascale_job.sizes.read_plan.LEAST_CHUNK_BYTES", 64)
    shared, largest = reads()
    assert sum(shared) == sum(whole) and largest == 64
    assert max(shared) <= 1.1 * sum(shared) / 64 + largest


def test_a_chunk_is_found_damaged_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of large pieces, as the daemon writes it: any layout reads it, each chunk verified."""
    monkeypatch.setattr("megascale_job.sizes.read_plan.LEAST_CHUNK_BYTES", 100)
    monkeypatch.setattr("megascale_job.sizes.read_plan.MOST_CHUNKS", 6)
    written, wanted = trainer_layouts(MODEL, {"dp": 2}), trainer_layouts(MODEL, {"tp": 2})
    values = values_of(written)
    uri = write_checkpoint(tmp_path, written, values)
    for rank, layout in enumerate(wanted):
        image = bytearray(layout.slot_bytes)
        fill(stored_plan(uri), rank, layout, memoryview(image))
        assert image == image_of(layout, values)
    stored = StoredCheckpoint.open(RestorePlan(RestoreSource.STORAGE, 10, 1, uri), Cancellation())
    units = stored.index(0).units
    assert len(units) > stored.piece_count(0) and units[:, 2].max() <= max(
        chunk_bytes(p.size_bytes) for p in written[0].pieces
    )
    assert stored.pieces_within(0, 0, 3) == 1 and stored.pieces_within(
        0, 0, 10**6
    ) == stored.piece_count(0)
    (file,) = tmp_path.rglob("rank-00001.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match="fails its checksum"):
        for rank, layout in enumerate(wanted):
            fill(stored_plan(uri), rank, layout, memoryview(bytearray(layout.slot_bytes)))


def test_one_rank_that_all_others_read_for_receives_no_more_than_its_share() -> None:
    written = trainer_layouts(MODEL, {"dp": 16})
    values = values_of(written)
    files = [image_of(layout, values) for layout in written]
    memories = {rank: image for rank, image in enumerate(files) if rank != 5}
    done = restore_all(written, files, written, memories, window_bytes=256)
    assert done.images == files
    assert sum(size > 0 for size in done.read_bytes) > 2 * SHARE, "its pieces have many readers"
    assert done.most_received <= SHARE * 256 and done.most_sent <= SHARE * 256


def test_a_tables_bytes_are_the_table() -> None:
    table = stored_runs(trainer_layouts(MODEL, {"dp": 2}))
    again = decode(encode(table))
    assert again.parameters == table.parameters
    assert np.array_equal(again.rows, table.rows) and np.array_equal(again.units, table.units)


def test_all_ranks_see_one_plan_whatever_the_order_of_names() -> None:
    written = trainer_layouts(MODEL, {"dp": 2, "tp": 2})
    wanted = trainer_layouts(MODEL, {"dp": 3})
    one = plan_reads(stored_runs(written), wanted_runs(wanted), [False] * 3)
    again = plan_reads(stored_runs(written), wanted_runs(wanted), [False] * 3)
    assert np.array_equal(one.units, again.units) and np.array_equal(one.copies, again.copies)
    rounds = Rounds(one, 4096)
    of_ranks = [list(rounds.of_rank(rank)) for rank in range(3)]
    for number in range(rounds.count):
        for a in range(3):
            for b in range(3):
                sent, got = of_ranks[a][number].send_bytes[b], of_ranks[b][number].receive_bytes[a]
                assert sent == got or a == b


def piece(first: int, last: int, **changes: object) -> ShardPiece:
    whole = ShardPiece(
        "matrix", "master", "float32", (6, 5), (0, 0), (6, 5), first, last, 0, primary=True
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def plan_of(stored: list[ShardPiece], wanted: ShardPiece) -> None:
    tables = [runs_of([of_file], file, ["0" * 32]) for file, of_file in enumerate(stored)]
    plan_reads(join(tables), runs_of([wanted], 0), [False])


def test_what_has_no_place_in_the_job_is_refused_by_field() -> None:
    """It was dropped: an untied checkpoint went on as a tied job, without its trained head."""
    head, moment = piece(0, 30, name="head.weight"), piece(0, 30, state="exp_avg_sq")
    stored = runs_of([piece(0, 30), head, moment], 0, ["0" * 32] * 3)
    all_of_it = runs_of([piece(0, 30), head, moment], 0)
    for weights_alone in (False, True):
        check_placed(stored, all_of_it, weights_alone=weights_alone)
        with pytest.raises(DoesNotFit, match=r"head.weight \(master\) is stored, and has") as tied:
            check_placed(stored, runs_of([piece(0, 30)], 0), weights_alone=weights_alone)
        assert tied.value.refusal("/x").startswith("trainer.model.tie_embeddings: checkpoint /x")
    without = runs_of([piece(0, 30), head], 0)
    check_placed(stored, without, weights_alone=True)
    with pytest.raises(DoesNotFit, match=r"matrix \(exp_avg_sq\) is stored") as optimizer:
        check_placed(stored, without, weights_alone=False)
    assert optimizer.value.field == "trainer.optimizer"
    with pytest.raises(DoesNotFit) as other:
        check_placed(stored, runs_of([head], 0), weights_alone=True)
    assert other.value.field == "trainer.model"


def test_a_bias_of_routers_on_one_side_alone_is_refused_by_its_field() -> None:
    table, bias = piece(0, 30), piece(0, 30, name="layers.1.router.bias")
    stored, wanted = runs_of([table, bias], 0, ["0" * 32] * 2), runs_of([table, bias], 0)
    with pytest.raises(DoesNotFit, match=r"router.bias .* has no place in it") as unplaced:
        check_placed(stored, runs_of([table], 0), weights_alone=False)
    with pytest.raises(DoesNotFit, match=r"router.bias .*nothing is stored") as missing:
        plan_reads(runs_of([table], 0, ["0" * 32]), wanted, [False])
    for refused in (unplaced.value, missing.value):
        assert refused.refusal("/x").startswith("trainer.model.experts.bias_rate: checkpoint /x")


def test_what_does_not_fit_is_refused_by_name() -> None:
    plan_of([piece(0, 30)], piece(0, 30))
    plan_of([piece(0, 15), piece(15, 30)], piece(10, 20))
    with pytest.raises(DoesNotFit, match=r"matrix \(master\) is stored with a gap"):
        plan_of([piece(0, 10), piece(12, 30)], piece(0, 30))
    with pytest.raises(DoesNotFit, match=r"matrix \(master\) is stored with an overlap"):
        plan_of([piece(0, 15), piece(14, 30)], piece(0, 30))
    with pytest.raises(DoesNotFit, match=r"is float32 \(6, 5\) there and float32 \(12, 5\) here"):
        plan_of([piece(0, 30)], piece(0, 30, global_shape=(12, 5)))
    with pytest.raises(DoesNotFit, match=r"gate \(master\): nothing is stored"):
        plan_of([piece(0, 30)], piece(0, 30, name="gate"))


def test_some_of_the_experts_are_one_run() -> None:
    """Experts 2 and 3 of 8, cut by a shard within a matrix at either end."""
    experts = piece(7, 51, global_shape=(8, 6, 5), start=(2, 0, 0), stop=(4, 6, 5))
    runs = runs_of([experts], 0)
    assert runs.rows[:, 1:3].tolist() == [[4 * (60 + 7), 4 * (60 + 51)]]


def test_a_column_of_a_matrix_is_one_run_per_row() -> None:
    column = piece(1, 5, start=(0, 3), stop=(6, 4), slot_offset_bytes=100)
    rows = runs_of([column], 0).rows
    assert rows[:, 1].tolist() == [4 * (5 * row + 3) for row in range(1, 5)]
    assert rows[:, 4].tolist() == [100, 104, 108, 112]
    whole_rows = piece(2, 8, start=(2, 0), stop=(4, 5))
    assert runs_of([whole_rows], 0).rows[:, 1:3].tolist() == [[48, 72]]
    assert slot_bytes([column]) == 4096

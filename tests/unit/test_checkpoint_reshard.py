"""Any layout loads what any other layout wrote, bit for bit, through real files."""

from __future__ import annotations

import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.checkpoint_files import image_of, slot_bytes, stored_plan, write_checkpoint
from tests.harness.piece_layouts import VALUES, layouts, pack
from tests.harness.properties import examples

from megascale_checkpoint.restore import stored_checkpoint as restore
from megascale_checkpoint.restore.reshard import check_coverage, flat_boxes
from megascale_common.service.errors import CoverageError, RequestError
from megascale_job.loading import from_accepted
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece
from megascale_job.sizes.parameter_table import parameter_table, shard_layout


@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_flat_boxes_are_the_flat_range(shape: list[int], data: st.DataObject) -> None:
    size = math.prod(shape)
    first = data.draw(st.integers(0, size))
    last = data.draw(st.integers(first, size))
    whole = np.arange(size).reshape(shape)
    boxes = list(flat_boxes(shape, first, last))
    found = np.concatenate([whole[box].reshape(-1) for box in boxes]) if boxes else np.array([])
    assert found.tolist() == list(range(first, last))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@examples(60)
@given(layouts(), layouts())
def test_any_layout_loads_any_other(written: list[ShardLayout], wanted: list[ShardLayout]) -> None:
    # In tmpfs, where fsync of so many files costs nothing.
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        uri = write_checkpoint(Path(folder), written, VALUES)
        for rank, layout in enumerate(wanted):
            image = bytearray(b"\xff" * layout.slot_bytes)
            filled = restore.fill(stored_plan(uri), rank, layout, memoryview(image))
            assert image == image_of(layout, VALUES)
            assert filled.small_state == {"position": 10}


MODEL = {
    "layers": 4,
    "hidden_size": 16,
    "heads": 4,
    "ffn_size": 21,
    "vocab_size": 37,
    "sequence_length": 8,
    "positions": "learned",
    "bias": True,
}
GRIDS = [(1, 1, 1, 1), (2, 2, 1, 2), (4, 1, 1, 1), (1, 4, 1, 1), (1, 1, 1, 4), (2, 2, 2, 1)]


def _trainer_layouts(tp: int, pp: int, virtual_stages: int, dp: int) -> list[ShardLayout]:
    values = {"name": "t", "model": MODEL, "training": {"steps": 1, "global_batch_size": 4}}
    config = from_accepted(
        {**values, "parallelism": {"tp": tp, "pp": pp, "virtual_stages": virtual_stages, "dp": dp}}
    )
    return [shard_layout(parameter_table(config, rank)) for rank in range(tp * pp * dp)]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "tp{}-pp{}-vpp{}-dp{}".format(*grid))
def test_the_trainers_layouts_load_each_other(grid: tuple[int, int, int]) -> None:
    written = _trainer_layouts(*grid)
    random = np.random.default_rng(0)
    shapes = {piece.name: piece.global_shape for layout in written for piece in layout.pieces}
    values = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        uri = write_checkpoint(Path(folder), written, values)
        for other in GRIDS:
            for rank, layout in enumerate(_trainer_layouts(*other)):
                image = bytearray(layout.slot_bytes)
                filled = restore.fill(stored_plan(uri), rank, layout, memoryview(image))
                assert image == image_of(layout, values), f"rank {rank} of {other}"
                if other == grid:
                    assert filled.bytes_read == sum(piece.size_bytes for piece in layout.pieces)


def test_the_same_layout_reads_only_what_it_needs(tmp_path: Path) -> None:
    halves = [_half(rank) for rank in range(2)]
    uri = write_checkpoint(tmp_path, halves, VALUES)
    # Rank 1 needs its own file and, for the replicated vector, that of rank 0.
    image = bytearray(halves[1].slot_bytes)
    filled = restore.fill(stored_plan(uri), 1, halves[1], memoryview(image))
    assert image == image_of(halves[1], VALUES)
    assert filled.bytes_read == sum(piece.size_bytes for piece in halves[1].pieces)


def _half(rank: int) -> ShardLayout:
    matrix = ShardPiece(
        "matrix",
        "master",
        "float32",
        (6, 5),
        (3 * rank, 0),
        (3 * rank + 3, 5),
        0,
        15,
        0,
        primary=True,
    )
    vector = ShardPiece(
        "vector", "master", "float32", (7,), (0,), (7,), 0, 7, 64, primary=rank == 0
    )
    return ShardLayout((matrix, vector), slot_bytes((matrix, vector)))


def test_a_rank_alone_drops_nothing_that_is_stored(tmp_path: Path) -> None:
    """Also what lies in a file that it needs for nothing else."""
    uri = write_checkpoint(tmp_path, [_half(0), _half(1)], VALUES)
    matrix = [replace(_half(rank).pieces[0], slot_offset_bytes=64 * rank) for rank in range(2)]
    layout = ShardLayout(tuple(matrix), 4096)
    image = memoryview(bytearray(4096))
    for step in (10, 0):
        with pytest.raises(RequestError, match=r"vector \(master\) is stored, and has no place"):
            restore.fill(stored_plan(uri, step), 0, layout, image, alone=True)


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    uri = write_checkpoint(tmp_path, [_half(0), _half(1)], VALUES)
    other = replace(_half(0).pieces[0], global_shape=(12, 5))
    with pytest.raises(
        RequestError, match=r"does not fit this job: matrix \(master\) is float32 \(6, 5\)"
    ):
        restore.fill(stored_plan(uri), 0, ShardLayout((other,), 4096), memoryview(bytearray(4096)))
    missing = replace(_half(0).pieces[0], name="gate")
    with pytest.raises(RequestError, match=r"gate \(master\): nothing is stored"):
        restore.fill(
            stored_plan(uri), 0, ShardLayout((missing,), 4096), memoryview(bytearray(4096))
        )


@pytest.mark.parametrize(
    "ranges",
    [[(0, 10), (12, 30)], [(0, 15), (14, 30)], [(0, 29)], [(1, 30)]],
    ids=["gap", "overlap", "end", "start"],
)
def test_gaps_and_overlaps_are_detected(ranges: list[tuple[int, int]]) -> None:
    whole = ShardPiece(
        "matrix", "master", "float32", (6, 5), (0, 0), (6, 5), 0, 30, 0, primary=True
    )
    check_coverage([whole])
    with pytest.raises(CoverageError):
        check_coverage([replace(whole, flat_start=a, flat_stop=b) for a, b in ranges])
    with pytest.raises(CoverageError, match="not covered once"):
        check_coverage([replace(whole, stop=(5, 5), flat_stop=25)])


def test_small_state_is_the_ranks_own_in_the_same_layout_and_rank_0s_in_another(
    tmp_path: Path,
) -> None:
    halves = [_half(rank) for rank in range(2)]
    uri = write_checkpoint(tmp_path, halves, VALUES, small_states=[{"of": 0}, {"of": 1}])
    whole = pack(
        [
            replace(
                _half(0).pieces[0],
                start=(0, 0),
                stop=VALUES["matrix"].shape,
                flat_stop=VALUES["matrix"].size,
            )
        ],
        0,
    )
    for rank, layout, expected in (
        (0, halves[0], 0),
        (1, halves[1], 1),
        (1, whole, 0),
        (7, whole, 0),
    ):
        image = memoryview(bytearray(layout.slot_bytes))
        assert restore.fill(stored_plan(uri), rank, layout, image).small_state == {"of": expected}

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
from tests.harness.checkpoint_files import (
    STATES,
    image_of,
    slot_bytes,
    stored_plan,
    write_checkpoint,
)
from tests.harness.piece_layouts import VALUES, Section, layouts, pack
from tests.harness.planned_restore import trainer_layouts
from tests.harness.properties import examples

from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.commit.shard_file import MAX_HEADER_BYTES, Origin, encode_header, primary
from megascale_checkpoint.restore import stored_checkpoint as restore
from megascale_checkpoint.restore.reshard import check_coverage, flat_boxes
from megascale_common.service.errors import CoverageError, RequestError
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece
from megascale_job.sizes.read_plan import chunk_bytes


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


def _grid(tp: int, pp: int, virtual_stages: int, dp: int) -> Section:
    return {"tp": tp, "pp": pp, "virtual_stages": virtual_stages, "dp": dp}


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "tp{}-pp{}-vpp{}-dp{}".format(*grid))
def test_the_trainers_layouts_load_each_other(grid: tuple[int, int, int, int]) -> None:
    _load_each_other(MODEL, _grid(*grid), [_grid(*other) for other in GRIDS])


def _load_each_other(model: Section, grid: Section, others: list[Section]) -> None:
    written = trainer_layouts(model, grid)
    random = np.random.default_rng(0)
    shapes = {piece.name: piece.global_shape for layout in written for piece in layout.pieces}
    values = {name: random.random(shape, np.float32) for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        uri = write_checkpoint(Path(folder), written, values)
        for other in others:
            for rank, layout in enumerate(trainer_layouts(model, other)):
                image = bytearray(layout.slot_bytes)
                filled = restore.fill(stored_plan(uri), rank, layout, memoryview(image))
                assert image == image_of(layout, values), f"rank {rank} of {other}"
                if other == grid:
                    assert filled.bytes_read == sum(piece.size_bytes for piece in layout.pieces)


EXPERTS: Section = {
    "layers": 4,
    "hidden_size": 16,
    "heads": 4,
    "vocab_size": 37,
    "sequence_length": 8,
    "block": "serial",
    "mlp": "swiglu",
    "experts": {
        "count": 8,
        "ffn_size": 3,
        "shared_ffn_size": 5,
        "dense_layers": 1,
        "bias_rate": 0.001,
    },
}
EXPERT_GRIDS: list[Section] = [
    {"dp": 4, "ep": 4},
    {"tp": 2, "dp": 2, "ep": 2},
    {"dp": 8, "ep": 8},
    {"tp": 2, "pp": 3, "stage_layers": [1, 1, 2], "dp": 4, "ep": 4},  # the first has none
    {"pp": 2, "virtual_stages": 2},
]


@pytest.mark.parametrize("grid", EXPERT_GRIDS, ids=str)
def test_experts_move_between_layouts(grid: Section) -> None:
    _load_each_other(EXPERTS, grid, EXPERT_GRIDS)


BIG: Section = {  # of the size of Qwen3-30B-A3B
    **EXPERTS,
    "layers": 48,
    "norm": "rmsnorm",
    "hidden_size": 2048,
    "heads": 32,
    "kv_heads": 4,
    "vocab_size": 151936,
    "experts": {"count": 128, "ffn_size": 768, "bias_rate": 0.001},
}


@pytest.mark.parametrize("grid", [{}, {"dp": 16, "ep": 8}, {"tp": 2, "dp": 4, "ep": 8}], ids=str)
def test_a_file_names_at_most_one_piece_of_each_parameter_whatever_the_experts(
    grid: Section,
) -> None:
    layouts = trainer_layouts(BIG, grid)
    names = {piece.name for layout in layouts for piece in layout.pieces}
    assert len(names) == 2 + 1 + 48 * (4 + 2 + 3 + 2), "experts are one parameter per matrix"
    for rank, layout in enumerate(layouts):
        pieces = primary(layout, ("0" * 32,) * len(layout.pieces))
        assert len(pieces) <= len(STATES) * len(names)
        counts = [-(-piece.size_bytes // chunk_bytes(piece.size_bytes)) for piece, _ in pieces]
        chunks = [["0" * 32] * count if count > 1 else [] for count in counts]
        header = encode_header(Origin("job", 1, 10, rank), pieces, chunks)
        # Even a rank that holds all of it, 360 GB, and the checksums of 8 MiB chunks.
        assert len(header) < MAX_HEADER_BYTES // 4


# xxh3-128 of the files of :data:`MODEL` in tp 2, pp 2, dp 2, by rank, as builds before experts have
# written them.
DENSE_FILES = """
c28d43910781b9b06f8aafa1438fb5af
a15058a59e8a312fda1fb36901f78363
2ae152d6bf7f9c22d16c1e0a9b45ee39
286b619308b5b237e724035da91b243e
f2bb4b83b7ef60c6c5cb67c920c8460e
69425e93f51cfe02c6b1429b873120bb
f3c8492666fd70ff6d3283991a3b8ff1
6bc0af6425796326c193801ec862416a
"""


def test_a_dense_model_has_the_files_that_older_builds_wrote(tmp_path: Path) -> None:
    """So a build reads the checkpoints of the other, and shares sealed slots with it."""
    written = trainer_layouts(MODEL, _grid(2, 2, 1, 2))
    shapes = {piece.name: piece.global_shape for layout in written for piece in layout.pieces}
    values = {
        name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
        for name, shape in shapes.items()
    }
    _, manifest = manifests.load(write_checkpoint(tmp_path, written, values))
    assert [file.xxh3 for file in manifest.files] == DENSE_FILES.split()
    for file, layout in zip(manifest.files, written, strict=True):
        assert file.layout_digest == layout.digest()


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

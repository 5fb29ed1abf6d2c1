"""Spans in parquet files: what comes in comes out, damage is counted, limits hold."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import duckdb
import numpy as np
import pytest

from megascale.v1 import link_pb2
from megascale_common.node.spans.record import SPAN, Span, to_columns
from megascale_driver.telemetry import store as stores
from megascale_driver.telemetry.intake import SpanIntake
from megascale_driver.telemetry.store import SpanStore

OFFSET_NS = 1_000_000_000


def batch(
    rank: int = 0, steps: int = 3, attempt: int = 1, job: str = "demo"
) -> link_pb2.ReportSpansRequest:
    """Each step has a forward and an all-reduce of 10 and 20 ms."""
    spans = [
        Span(step * 100, duration * 1_000_000, step, op)
        for step in range(steps)
        for op, duration in ((0, 10), (1, 20))
    ]
    data = b"".join(SPAN.pack(*span) for span in spans)
    found = link_pb2.ReportSpansRequest(
        node=f"n{rank}", job=job, attempt=attempt, rank=rank, count=len(spans),
        columns=zlib.compress(to_columns(data)), unix_offset_ns=OFFSET_NS,
    )  # fmt: skip
    found.operations.add(name="forward", kind="compute")
    found.operations.add(name="all_reduce", kind="collective", group="dp")
    return found


@pytest.fixture
def store(tmp_path: Path) -> SpanStore:
    return SpanStore(tmp_path / "spans", 1 << 30, 1e9)


def test_spans_come_back_by_steps_and_operations(store: SpanStore) -> None:
    counts = store.add([batch(rank) for rank in range(4)])
    assert counts["stored"] == 24 and not counts["damaged"]
    columns, ops = store.read("demo", 1, 1, 2, ["all_reduce"])
    assert sorted(set(columns["rank"])) == [0, 1, 2, 3]
    assert sorted(columns["step"]) == [1] * 4 + [2] * 4
    assert {ops[number].name for number in columns["op"]} == {"all_reduce"}
    assert set(columns["duration_ns"]) == {20_000_000}
    assert set(columns["start_ns"]) == {OFFSET_NS + 100, OFFSET_NS + 200}
    everything, _ = store.read("demo", 1, 0, 10)
    assert len(everything["rank"]) == 24 and everything["op"].dtype == np.uint16
    assert store.newest_step("demo", 1) == 2
    some, _ = store.read("demo", 1, 0, 10, ranks=(1, 3, 9))
    assert sorted(some["rank"]) == [1] * 6 + [3] * 6


def test_people_can_read_the_files_with_duckdb(store: SpanStore, tmp_path: Path) -> None:
    store.add([batch()])
    store.flush()
    folder = tmp_path / "spans/demo/attempt-000001"
    rows = duckdb.execute(
        f"SELECT name, count(*), max(duration_ns) FROM '{folder}/spans-*.parquet' "
        f"JOIN '{folder}/operations.parquet' USING (op) GROUP BY name ORDER BY name"
    ).fetchall()
    assert rows == [("all_reduce", 3, 20_000_000), ("forward", 3, 10_000_000)]


def test_a_new_driver_goes_on_with_the_files_of_the_last(tmp_path: Path) -> None:
    first = SpanStore(tmp_path, 1 << 30, 1e9)
    first.add([batch()])
    first.flush()
    second = SpanStore(tmp_path, 1 << 30, 1e9)
    assert second.newest_step("demo", 1) == 2
    second.add([batch(rank=1)])
    columns, ops = second.read("demo", 1, 0, 2)
    assert len(columns["rank"]) == 12 and len(ops) == 2


def test_an_attempt_that_nobody_measured_is_empty(store: SpanStore) -> None:
    columns, ops = store.read("demo", 7, 0, 10)
    assert not len(columns["rank"]) and ops == () and store.newest_step("demo", 7) == -1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda found: found.ClearField("operations"),
        lambda found: setattr(found, "columns", b"no zlib"),
        lambda found: setattr(found, "columns", zlib.compress(b"\0" * 33)),
        lambda found: setattr(found, "columns", zlib.compress(b"\0" * (1 << 26))),
        lambda found: setattr(found, "columns", zlib.compress(b"\xff" * (6 * SPAN.size))),
        lambda found: setattr(found, "job", "../../etc"),
        lambda found: setattr(found, "count", 7),
    ],
)
def test_a_damaged_batch_is_counted_and_nothing_else(store: SpanStore, spoil: object) -> None:
    damaged = batch()
    assert callable(spoil)
    spoil(damaged)
    counts = store.add([damaged, batch(rank=1)])
    assert counts["damaged"] == damaged.count and counts["stored"] == 6


def test_an_attempt_names_a_bounded_number_of_operations(store: SpanStore) -> None:
    for number in range(stores.MAX_ATTEMPT_OPS // 200 + 2):
        many = batch()
        for name in range(200):
            many.operations.add(name=f"op-{number}-{name}", kind="host")
        store.add([many])
    _, ops = store.read("demo", 1, 0, 2)
    assert len(ops) <= stores.MAX_ATTEMPT_OPS


def test_small_files_become_one(store: SpanStore, tmp_path: Path) -> None:
    for number in range(stores.MERGE_FILES):
        store.add([batch(rank=number)])
        store.flush()
    left = list((tmp_path / "spans/demo/attempt-000001").glob("spans-*.parquet"))
    assert len(left) == 1
    columns, _ = store.read("demo", 1, 0, 2)
    assert len(columns["rank"]) == 6 * stores.MERGE_FILES


def test_the_oldest_files_go_beyond_the_size(tmp_path: Path) -> None:
    store = SpanStore(tmp_path, 1 << 30, 1e9)
    for attempt in (1, 2, 3):
        store.add([batch(attempt=attempt)])
        store.flush()
        for path in (tmp_path / f"demo/attempt-00000{attempt}").glob("spans-*"):
            os.utime(path, (attempt, attempt))
    sizes = sum(path.stat().st_size for path in tmp_path.rglob("*.parquet"))
    SpanStore(tmp_path, sizes - 1, 1e12).trim()
    assert not (tmp_path / "demo/attempt-000001").exists()
    assert (tmp_path / "demo/attempt-000002/operations.parquet").exists()


def test_files_go_when_they_are_too_old(tmp_path: Path) -> None:
    store = SpanStore(tmp_path, 1 << 30, 1e9)
    store.add([batch(), batch(job="other")])
    store.flush()
    for path in (tmp_path / "other").rglob("*.parquet"):
        os.utime(path, (1, 1))
    SpanStore(tmp_path, 1 << 30, 3600.0).trim()
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


async def test_a_full_queue_drops_and_counts(store: SpanStore) -> None:
    intake = SpanIntake(store, limit_bytes=len(batch().columns) + 1)
    assert intake.take(batch()) and not intake.take(batch())
    await intake.store_waiting()
    assert intake.counts == {"stored": 6, "dropped": 6, "damaged": 0}
    assert intake.take(batch())
    await intake.close()
    assert store.newest_step("demo", 1) == 2


async def test_a_folder_that_cannot_be_written_costs_spans_alone(tmp_path: Path) -> None:
    store = SpanStore(tmp_path / "spans", 1 << 30, 1e9)
    (tmp_path / "spans/demo").write_text("a file in the way")
    intake = SpanIntake(store)
    assert intake.take(batch())
    await intake.store_waiting()
    assert intake.counts["dropped"] == 6
    await intake.close()

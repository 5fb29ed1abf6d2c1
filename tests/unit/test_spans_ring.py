"""Spans from a rank to its agent: records, names, the ring, and the table that analysers take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.properties import examples
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_common.node.spans import ops, record
from megascale_common.node.spans.ops import BACKWARD, FORWARD, Op
from megascale_common.node.spans.record import SPAN, Span
from megascale_common.node.spans.ring import SpanRingReader, SpanRingWriter
from megascale_driver.analysis.spans.table import SpanTable
from megascale_job.layout import RankLayout


def spans(data: bytes) -> list[Span]:
    return [Span(*fields) for fields in SPAN.iter_unpack(data)]


def test_a_record_has_32_bytes_and_its_parts_come_back() -> None:
    assert SPAN.size == 32
    aux = record.pack_aux(chunk=5, stream=3, flags=record.DEVICE_TIMED)
    assert (record.chunk_of(aux), record.stream_of(aux), record.flags_of(aux)) == (5, 3, 1)
    with pytest.raises(ValueError, match="chunk 256"):
        record.pack_aux(chunk=256)


@given(st.binary(max_size=512))
def test_columns_are_the_same_records(data: bytes) -> None:
    whole = data[: len(data) // SPAN.size * SPAN.size]
    assert record.from_columns(record.to_columns(whole)) == whole


def test_columns_refuse_a_part_of_a_record() -> None:
    for change in (record.to_columns, record.from_columns):
        with pytest.raises(ValueError, match="33 bytes"):
            change(bytes(33))


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=20))
def test_a_ring_keeps_the_order_and_counts_what_found_no_room(
    tmp_path_factory: pytest.TempPathFactory, rounds: list[tuple[int, int]]
) -> None:
    path = tmp_path_factory.mktemp("ring") / "spans"
    writer = SpanRingWriter(path, rank=3, attempt=2, capacity=8)
    reader = SpanRingReader(path)
    number, dropped = 0, 0
    kept: list[int] = []
    taken: list[int] = []
    for writes, reads in rounds:
        for _ in range(writes):
            fits = len(kept) - len(taken) < 8
            assert writer.add(Span(number, 1, step=number, op=0)) == fits
            kept += [number] if fits else []
            dropped += not fits
            number += 1
        taken += [span.start_ns for span in spans(reader.take(reads))]
        assert taken == kept[: len(taken)]
        assert len(reader) == len(kept) - len(taken)
    assert writer.dropped == reader.dropped == dropped
    assert (reader.rank, reader.attempt) == (3, 2)
    reader.close()
    writer.close()


def test_names_follow_their_numbers(tmp_path: Path) -> None:
    writer = SpanRingWriter(tmp_path / "spans", rank=0, attempt=1)
    reader = SpanRingReader(tmp_path / "spans")
    assert reader.ops() == ()
    gather = Op("all_gather", "collective", "dp")
    numbers = [writer.op(op) for op in (FORWARD, BACKWARD, FORWARD, gather)]
    assert numbers == [0, 1, 0, 2]
    assert reader.ops() == (FORWARD, BACKWARD, gather)
    for name in range(ops.MAX_OPS - 3):
        writer.op(Op(f"{name:03}" * 16, "collective", "activation_out"))
    assert len(reader.ops()) == ops.MAX_OPS
    with pytest.raises(ValueError, match="one too many"):
        writer.op(Op("more", "host"))
    writer.close()
    reader.close()


def test_a_new_ring_leaves_the_old_reader_its_own_file(tmp_path: Path) -> None:
    first = SpanRingWriter(tmp_path / "spans", rank=0, attempt=1, capacity=4)
    first.add(Span(7, 1, step=1, op=0))
    reader = SpanRingReader(tmp_path / "spans")
    second = SpanRingWriter(tmp_path / "spans", rank=0, attempt=2, capacity=2)
    assert [span.start_ns for span in spans(reader.take(10))] == [7]
    assert SpanRingReader(tmp_path / "spans").attempt == 2
    first.close()
    second.close()


def test_a_damaged_ring_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    path.write_bytes(bytes(100))
    with pytest.raises(ValueError, match="100 bytes"):
        SpanRingReader(path)
    SpanRingWriter(path, rank=0, attempt=1, capacity=4).close()
    with path.open("r+b") as file:
        file.seek(8 * 8)
        file.write(b"\xff" * 7)  # the number of records written
    with pytest.raises(ValueError, match="claims to hold"):
        SpanRingReader(path).take(1)


def test_a_ring_that_is_cut_short_under_its_reader_ends_nobody(tmp_path: Path) -> None:
    """In a process of its own, which a mapping of the ring would end by SIGBUS."""
    path = tmp_path / "spans"
    program = f"""
import os
from pathlib import Path
from megascale_common.node.spans.record import Span
from megascale_common.node.spans.ring import SpanRingReader, SpanRingWriter
path = Path({str(path)!r})
SpanRingWriter(path, rank=0, attempt=1, capacity=64).add(Span(7, 1, step=1, op=0))
reader = SpanRingReader(path)
for size in (40_000, 100, 0):
    os.truncate(path, size)
    for read in (lambda: reader.take(10), reader.ops, lambda: reader.dropped):
        try:
            print(size, read())
        except ValueError as error:
            print(size, error)
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-3:] == ["0 a ring of spans was cut short"] * 3


def test_a_reader_beside_a_writing_process_sees_every_record_once(tmp_path: Path) -> None:
    path = tmp_path / "spans"
    SpanRingWriter(path, rank=0, attempt=1).close()
    program = f"""
from pathlib import Path
from megascale_common.node.spans.record import Span
from megascale_common.node.spans.ring import SpanRingWriter
writer = SpanRingWriter(Path({str(path)!r}), rank=0, attempt=5, capacity=64)
print("ready", flush=True)
number = 0
while number < 20000:
    number += writer.add(Span(number, number * 3, step=number % 100, op=0))
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    reader, seen = SpanRingReader(path), 0
    while seen < 20000 and (process.poll() is None or len(reader)):
        for span in spans(reader.take(50)):
            assert (span.start_ns, span.duration_ns) == (seen, seen * 3)
            seen += 1
    assert process.wait(CALL_TIMEOUT_S) == 0
    process.stdout.close()
    assert seen == 20000


def test_ranks_that_number_operations_differently_share_one_table() -> None:
    layout = RankLayout(tp=2)
    table = SpanTable.of_records(
        [
            (0, SPAN.pack(10, 5, 1, 0, 0, 0, 0), (FORWARD,)),
            (1, SPAN.pack(11, 6, 1, 1, 0, 0, 2), (BACKWARD, FORWARD)),
        ],
        layout,
        ("n1", "n1"),
    )
    forwards = table.of_op("forward")
    assert forwards.rank.tolist() == [0, 1] and forwards.duration_ns.tolist() == [5, 6]
    assert forwards.chunk.tolist() == [0, 2] and forwards.along("tp").tolist() == [0, 1]
    assert len(table.of_op("backward")) == 0 and len(table.of_steps(2, 9)) == 0
    with pytest.raises(ValueError, match="not named"):
        SpanTable.of_records([(0, SPAN.pack(1, 1, 1, 1, 0, 0, 0), (FORWARD,))], layout, ("a", "a"))
    with pytest.raises(ValueError, match="names 1 rank,"):
        SpanTable.empty(layout, ("n1",))

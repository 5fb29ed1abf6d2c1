"""Many values as one record: nothing is lost, and what is alike is stored once."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.journal import all_failed, placed

from megascale_common.service.errors import CodecError
from megascale_driver.core.values.attempt import Attempt
from megascale_driver.journal import codec, pieces, records

NAMES = st.one_of(st.just(""), st.from_regex(r"[a-z0-9]([a-z0-9-]{0,6}[a-z0-9])?", fullmatch=True))
TEXTS = st.text(alphabet='n01 9,"\\{}é\0', max_size=12)
VALUES = st.dictionaries(
    TEXTS, st.one_of(TEXTS, st.integers(), st.floats(allow_nan=False), st.lists(TEXTS, max_size=2))
)


@given(st.lists(st.tuples(st.sampled_from(range(3)), NAMES, VALUES), max_size=40))
def test_what_is_packed_comes_back_as_it_was(items: list[tuple[int, str, dict[str, Any]]]) -> None:
    # Few kinds of items, each with many different names and numbers.
    values = [
        {**items[kind % len(items)][2], "about": f"node {name} is dead", "at": number * 1.5}
        for number, (kind, name, _) in enumerate(items)
    ]
    names = [name for _, name, _ in items]
    record = pieces.record_of([codec.text(value).decode() for value in values], names)
    if record is not None:
        again = json.loads(codec.text(record))
        assert pieces.values_of(again, "r") == json.loads(json.dumps(values))


def test_a_record_names_its_nodes_and_keeps_the_order() -> None:
    faults = [
        {"node": f"n{i:03d}", "message": f"node n{i:03d} is {what}", "at_s": 1e9}
        for i in range(50)
        for what in ("dead", "lost")
    ]
    texts = [codec.text(fault).decode() for fault in faults]
    record = pieces.record_of(texts, [fault["node"] for fault in faults])  # type: ignore[misc]
    assert record is not None and len(record[pieces.SHAPES]) == 2
    for shape in record[pieces.SHAPES]:
        assert shape["columns"] == [",".join(f"n{i:03d}" for i in range(50))]
    assert pieces.values_of(record, "r") == faults


def test_texts_that_differ_in_more_are_left_as_they_are() -> None:
    texts = [json.dumps({"a": chr(97 + i) * i}) for i in range(26)]
    assert pieces.record_of(texts, [""] * 26) is None
    assert pieces.record_of(texts[:2] * 2, [""] * 4) is None, "too few"


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"shapes": 1},
        {"shapes": [{"text": ["{"], "columns": [], "places": [[0, 1]]}]},
        {"shapes": [{"text": ["[", 0, "]"], "columns": ["1"], "places": [[0, 2]]}]},
        {"shapes": [{"text": ["[]"], "columns": [], "places": [[1, 2]]}]},
    ],
)
def test_a_record_that_is_none_is_refused(record: Any) -> None:
    with pytest.raises(CodecError, match="jobs/a: not a record"):
        pieces.values_of(record, "jobs/a")


def test_a_list_of_faults_that_grows_is_encoded_as_it_is_anew() -> None:
    """Slices that are full are kept; only the last one is encoded again."""
    job, lines, _, _ = all_failed(placed("a", 6000))
    faults = job.current.faults
    encoder = pieces.PartEncoder()

    def encoded(count: int, by: pieces.PartEncoder) -> pieces.Encoded:
        return by.encode("a", lambda path: "f/", Attempt(faults=faults[:count]))

    for count in (100, 9001, 12_000):
        found = encoded(count, encoder)
        assert found == encoded(count, pieces.PartEncoder())
        fields = pieces.joined(found.values, found.chunks)
        assert codec.build(Attempt, fields).faults == faults[:count]
    assert found.version == codec.SCHEMA_VERSION and len(found.chunks) == 2
    assert sum(map(len, found.chunks.values())) < 100 * 12_000
    stored = list(records.records(lines))
    assert len(stored) == 2 * -(-6000 // records.BLOCK_LINES), "blocks by number, not by size"
    assert tuple(
        line for key, value, _ in stored for line in records.lines_of(value, key)
    ) == tuple(sorted(lines, key=lambda line: (line.log, line.seq)))

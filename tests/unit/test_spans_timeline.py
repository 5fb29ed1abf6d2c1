"""One trace of all ranks: clocks set by what ends together, arrows where the order is sure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness import recorded_spans

from megascale_common.node.spans import ops
from megascale_common.node.spans.record import NO_MICRO_BATCH
from megascale_driver.analysis.spans.__main__ import main
from megascale_driver.analysis.spans.clocks import Clock, Exchange, aligned, clocks
from megascale_driver.analysis.spans.table import COLUMNS, SpanTable
from megascale_driver.analysis.spans.timeline import PATH_PROCESS, merged
from megascale_job.layout import RankLayout

MS = 1_000_000
SEND = ops.Op("send_activation", "p2p", "activation_out")
RECEIVE = ops.Op("receive_activation", "p2p", "activation_in")
REDUCE = ops.Op("all_reduce", "collective", "world")
OPS = (REDUCE, SEND, RECEIVE, ops.FORWARD)
BASE = 10**15


def table(rows: list[tuple[int, ...]], layout: RankLayout, nodes: tuple[str, ...]) -> SpanTable:
    """Rows of rank, step, op, micro-batch, begin in ms, duration in ms, chunk."""
    whole = [
        (r, s, o, m, 0, BASE + round(b * MS), round(d * MS), c) for r, s, o, m, b, d, c in rows
    ]
    columns = np.array(whole, np.int64).T
    typed = {
        name: column.astype(dtype)
        for (name, dtype), column in zip(COLUMNS.items(), columns, strict=True)
    }
    return SpanTable(**typed, ops=OPS, layout=layout, nodes=nodes)


def reduced(ahead_ms: float, steps: int = 10) -> SpanTable:
    """Two ranks whose all-reduce ends together after 1 ms; n2's clock is ahead by so much."""
    rows: list[Any] = []
    for step in range(steps):
        end = 100 * step + 20
        rows.append((0, step, 0, NO_MICRO_BATCH, end - 10, 10, 0))
        rows.append((1, step, 0, NO_MICRO_BATCH, end - 1 + ahead_ms, 1, 0))
    return table(rows, RankLayout(dp=2), ("n1", "n2"))


def arrows(trace: dict[str, Any]) -> list[tuple[int, int]]:
    """From which rank to which."""
    ends: dict[int, dict[str, int]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], {})[event["ph"]] = event["pid"]
    return [(each["s"], each["f"]) for each in ends.values()]


@pytest.mark.parametrize("ahead_ms", [0.0, 250.0, -70.0])
def test_collectives_set_clocks_right_and_say_how_well(ahead_ms: float) -> None:
    spans = reduced(ahead_ms)
    found = clocks(spans)
    assert found["n1"].error_ns == 0
    assert found["n2"].offset_ns == pytest.approx(-ahead_ms * MS, abs=1)
    error_ns = found["n2"].error_ns
    assert error_ns is not None and error_ns == pytest.approx(1 * MS, abs=2)
    trace = merged(spans, found)
    assert arrows(trace) == [(1, 0)] * 10  # the last to enter, and who waited for it
    assert trace["otherData"]["clock of n2"] == "clock within 1.000 ms, collectives"
    for event in trace["traceEvents"]:
        assert event["ph"] == "M" or event["ts"] >= 0


def test_heartbeats_set_a_clock_right_where_nothing_else_does() -> None:
    spans = table([(0, 1, 3, 0, 0, 5, 0), (1, 1, 3, 0, 40, 5, 0)], RankLayout(dp=2), ("n1", "n2"))
    assert clocks(spans)["n2"].error_ns is None
    beats = {
        "n1": [Exchange.of(2 * MS, 0), Exchange.of(8 * MS, 3 * MS)],
        "n2": [Exchange.of(1 * MS, -40 * MS)],
    }
    found = clocks(spans, beats)["n2"]
    assert (found.offset_ns, found.error_ns) == (-40 * MS, 1_500_000)
    assert found.source == "heartbeats"
    starts = aligned(spans, clocks(spans, beats)).start_ns
    assert starts[0] == starts[1]


def test_no_arrow_is_drawn_inside_the_error_or_without_a_clock() -> None:
    spans = reduced(0.0)
    sure = {"n1": Clock(0, 0, "reference"), "n2": Clock(0, MS, "heartbeats")}
    assert len(arrows(merged(spans, sure))) == 10
    vague = {**sure, "n2": Clock(0, 9 * MS, "heartbeats")}  # it entered 9 ms later
    assert arrows(merged(spans, vague)) == []
    unknown = {**sure, "n2": Clock(0, None, "none")}
    trace = merged(spans, unknown)
    assert arrows(trace) == [] and trace["otherData"]["clock of n2"] == "clock unknown"


def test_a_send_is_joined_with_the_receive_of_the_next_virtual_stage() -> None:
    rows: list[Any] = [
        (0, 1, 1, 3, 0, 1, 0),  # rank 0 sends micro-batch 3 of chunk 0 to rank 1, chunk 0
        (1, 1, 2, 3, 1, 4, 0),
        (1, 1, 1, 3, 10, 1, 0),  # and rank 1 to chunk 1 of rank 0
        (0, 1, 2, 3, 9, 4, 1),
        (1, 1, 2, 4, 1, 1, 0),  # nobody sent it
    ]
    spans = table(rows, RankLayout(pp=2), ("n1", "n1"))
    trace = merged(spans, clocks(spans))
    assert sorted(arrows(trace)) == [(0, 1), (1, 0)]
    assert {event["name"] for event in trace["traceEvents"] if event["ph"] == "s"} == {"activation"}


def test_a_recorded_job_becomes_a_trace_that_viewers_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "trace.json"
    assert main(["timeline", str(recorded_spans.CPU_DP4), "--out", str(out)]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    events = json.loads(out.read_text())["traceEvents"]
    of_ranks = [event for event in events if event["pid"] != PATH_PROCESS]
    assert said["spans"] == sum(event["ph"] == "X" for event in of_ranks) > 10_000
    assert 0 < said["arrows"] < said["spans"]
    assert set(said["clock_error_ns"]) == {"n1", "n2", "n3", "n4"}
    begins = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
    assert all(begins[e["id"]] <= e["ts"] for e in events if e["ph"] == "f")

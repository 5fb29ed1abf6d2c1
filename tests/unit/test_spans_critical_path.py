"""The chain of spans that a step's length is made of, across ranks."""

from __future__ import annotations

import gzip
import json
import time
from typing import Any

import numpy as np
import pytest
from tests.harness import recorded_spans, recorded_timeline

from megascale_common.node.spans import ops
from megascale_common.node.spans.record import NO_MICRO_BATCH
from megascale_driver.analysis.spans import recorded
from megascale_driver.analysis.spans.clocks import aligned, clocks
from megascale_driver.analysis.spans.table import COLUMNS, SpanTable
from megascale_driver.analysis.spans.timeline import PATH_PROCESS, UNMEASURED, critical_path
from megascale_job.layout import RankLayout

MS = 1_000_000
BASE = 10**15
REDUCE = ops.Op("all_reduce", "collective", "world")
SEND, RECEIVE = ops.Op("send_activation", "p2p"), ops.Op("receive_activation", "p2p")
OPS = (REDUCE, SEND, RECEIVE, ops.FORWARD, ops.OPTIMIZER, ops.STEP, ops.GARBAGE)
NAMES = {op.name: number for number, op in enumerate(OPS)}


def table(layout: RankLayout, *rows: tuple[int, str, float, float]) -> SpanTable:
    """Rows of rank, operation, begin and end in ms, all of step 7."""
    whole = [
        (
            *(rank, 7, NAMES[name], 0 if "act" in name else NO_MICRO_BATCH, 0),
            *(BASE + round(begin * MS), round((end - begin) * MS), 0),
        )
        for rank, name, begin, end in rows
    ]
    typed = {
        name: column.astype(dtype)
        for (name, dtype), column in zip(COLUMNS.items(), np.array(whole).T, strict=True)
    }
    nodes = tuple(f"n{rank}" for rank in range(layout.world_size))
    return SpanTable(**typed, ops=OPS, layout=layout, nodes=nodes)


def path(spans: SpanTable) -> list[tuple[int, str, float]]:
    found = critical_path(spans, 7)
    assert found is not None
    return [(each.rank, each.name, each.duration_ns / MS) for each in found.segments]


def test_a_collective_leads_to_the_last_of_its_members_to_enter() -> None:
    spans = table(
        RankLayout(dp=2),
        (0, "step", 0, 40), (1, "step", 0, 40),
        (0, "forward", 0, 10), (0, "all_reduce", 10, 32), (0, "optimizer", 32, 40),
        (1, "forward", 0, 30), (1, "all_reduce", 30, 32), (1, "optimizer", 32, 35),
    )  # fmt: skip
    assert path(spans) == [
        (1, "forward", 30.0),
        (1, "all_reduce world", 2.0),
        (0, "optimizer", 8.0),
    ]
    found = critical_path(spans, 7)
    assert found is not None and found.length_ns == 40 * MS
    assert found.sentence == (
        "The critical path of step 7 takes 40.0 ms: rank 1 on n1 for 80% of it (forward 30.0 ms, "
        "all_reduce world 2.0 ms); rank 0 on n0 for 20% of it (optimizer 8.0 ms)."
    )


def test_a_receive_leads_to_its_send_only_if_it_waited_for_it() -> None:
    late = table(
        RankLayout(pp=2),
        (0, "forward", 0, 20), (0, "send_activation", 20, 21),
        (1, "receive_activation", 1, 23), (1, "forward", 23, 43),
    )  # fmt: skip
    assert path(late) == [(0, "forward", 20), (1, "receive_activation", 3), (1, "forward", 20)]
    early = table(
        RankLayout(pp=2),
        (0, "forward", 0, 20), (0, "send_activation", 20, 21),
        (1, "forward", 0, 30), (1, "receive_activation", 30, 31), (1, "forward", 31, 51),
    )  # fmt: skip
    assert path(early) == [(1, "forward", 30), (1, "receive_activation", 1), (1, "forward", 20)]


def test_a_pause_inside_a_span_and_a_gap_between_spans_are_named() -> None:
    spans = table(
        RankLayout(),
        (0, "forward", 0, 30), (0, "garbage_collection", 10, 15), (0, "optimizer", 42, 50),
    )  # fmt: skip
    assert path(spans) == [
        (0, "forward", 10),
        (0, "garbage_collection", 5),
        (0, "forward", 15),
        (0, UNMEASURED, 12),
        (0, "optimizer", 8),
    ]


def test_clocks_that_contradict_each_other_lead_in_no_ring() -> None:
    rows = []
    for at in range(0, 400, 4):  # each says that the other was last, and later
        rows += [(0, "all_reduce", at, at + 3 + at % 3), (1, "all_reduce", at + 2, at + 4)]
    found = critical_path(table(RankLayout(dp=2), *rows), 7)
    assert found is not None and 0 < found.length_ns <= 404 * MS


def test_of_a_pipeline_the_path_is_as_long_as_the_step_and_goes_through_the_slow_rank() -> None:
    layout = RankLayout(pp=4, dp=2)
    ranks = layout.members(0, "pp")
    data = recorded_timeline.trace(
        layout, ranks, 5, 1, begin_s=1_000_000.0, slow={ranks[2]: 1.5}, node_of=lambda r: f"n{r}"
    )
    trace: dict[str, Any] = json.loads(gzip.decompress(data))
    on_path = [e for e in trace["traceEvents"] if e["pid"] == PATH_PROCESS and e["ph"] == "X"]
    spans = [e for e in trace["traceEvents"] if e["pid"] != PATH_PROCESS and e["ph"] == "X"]
    begin, end = min(e["ts"] for e in spans), max(e["ts"] + e["dur"] for e in spans)
    assert sum(e["dur"] for e in on_path) == pytest.approx(end - begin, rel=1e-3)
    by_rank: dict[int, float] = {}
    for each in on_path:
        by_rank[each["args"]["rank"]] = by_rank.get(each["args"]["rank"], 0) + each["dur"]
    assert max(by_rank, key=by_rank.__getitem__) == ranks[2]
    assert by_rank[ranks[2]] > 0.7 * (end - begin)
    assert trace["otherData"]["critical path of step 5"].startswith(
        "The critical path of step 5 takes"
    )


def test_of_recorded_steps_it_explains_nearly_all_of_the_step() -> None:
    found = recorded.load(recorded_spans.CPU_DP4.read_bytes())
    spans = aligned(found.table, clocks(found.table, found.heartbeats))
    whole = spans.of_op("step")
    took = []
    for step in np.unique(spans.step)[5:25].tolist():
        one = critical_path(spans, step)
        assert one is not None
        step_ns = float(np.median(whole.duration_ns[whole.step == step]))
        took.append(one.length_ns / step_ns)
    assert 0.85 < float(np.median(took)) < 1.15, took


def test_many_spans_are_walked_in_time_that_grows_with_them() -> None:
    layout = RankLayout(pp=8, dp=8)
    began_s = time.process_time()
    recorded_timeline.trace(layout, range(64), 5, 2, begin_s=1_000_000.0, batches=64)
    assert time.process_time() - began_s < 30.0  # 0.1 million spans; squares of them take hours


def test_without_spans_of_the_step_there_is_no_path() -> None:
    assert critical_path(table(RankLayout(), (0, "forward", 0, 3)), 8) is None
    assert critical_path(table(RankLayout(), (0, "step", 0, 3)), 7) is None

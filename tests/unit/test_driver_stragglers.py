"""Slow nodes that spans show: the map, the line in the log, and what follows where it is asked."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.harness import recorded_spans
from tests.harness.desk import Desk
from tests.harness.overlapped_spans import overlapped
from tests.harness.sent_spans import batches

from megascale.v1 import link_pb2
from megascale_common.node.spans.record import SPAN, Span, to_columns
from megascale_driver.analysis.spans.outliers import heat_map
from megascale_driver.core.orders.stragglers import MAX_NAMED
from megascale_driver.core.values.events import Event, PolicyRequested, StragglerFound
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.telemetry.intake import SpanIntake
from megascale_driver.telemetry.store import SpanStore
from megascale_driver.telemetry.views import SpanViews
from megascale_driver.telemetry.watches import StragglerWatch


def running(*nodes: str, **options: Any) -> Desk:
    desk = Desk(*nodes)
    desk.submit(**options)
    desk.run()
    return desk


def slow(desk: Desk, node: str, attempt: int = 0) -> StragglerFound:
    job = desk.job()
    sentence = f"node {node} is slow: its forward spans take 12.0 % longer"
    number = attempt or job.attempt
    return StragglerFound(desk.now_s, job.name, number, node, 1, "forward", 1.12, sentence)


def lines(desk: Desk) -> list[tuple[str, str, str]]:
    found = [line for line in desk.audit if line.reason == "STRAGGLER"]
    return [(line.subject, line.mode, line.outcome) for line in found]


def test_a_slow_node_is_written_down_once_and_keeps_its_work() -> None:
    desk = running("n1", "n2", "n3", spares=1)
    node = desk.job().slots[1].node
    for _ in range(3):
        desk.feed(slow(desk, node))
    assert lines(desk) == [
        (f"nodes/{node}", "OBSERVE", "the rule is observed: the job keeps the node")
    ]
    assert desk.job().phase is JobPhase.RUNNING and desk.job().evicted == ()
    assert desk.disposition(node) == "SCHEDULABLE"


def test_where_the_rule_is_enforced_the_job_leaves_for_a_spare() -> None:
    desk = running("n1", "n2", "n3", spares=1)
    desk.feed(PolicyRequested(desk.now_s, "straggler", "ENFORCE", "a test", "me"))
    node = desk.job().slots[1].node
    desk.feed(slow(desk, node))
    assert lines(desk)[0][1:] == ("ENFORCE", "the job leaves the node for a spare")
    assert desk.job().evicted == (node,) and desk.job().phase is JobPhase.STOPPING
    desk.stop(search=False)
    assert node not in {slot.node for slot in desk.job().slots}
    assert desk.disposition(node) == "SCHEDULABLE"


def test_without_a_spare_a_slow_node_is_better_than_none() -> None:
    desk = running("n1", "n2")
    desk.feed(PolicyRequested(desk.now_s, "straggler", "ENFORCE", "a test", "me"))
    desk.feed(slow(desk, desk.job().slots[0].node))
    assert lines(desk)[0][2] == "no spare stands by: the job keeps the node"
    assert desk.job().phase is JobPhase.RUNNING


def test_what_is_found_of_an_earlier_attempt_or_another_node_says_nothing() -> None:
    desk = running("n1", "n2", "n3", spares=1)
    before = desk.state
    for event in (
        slow(desk, desk.job().slots[0].node, attempt=7),
        slow(desk, "n9"),
        slow(desk, desk.job().spares[0]),
    ):
        desk.feed(event)
    assert not lines(desk) and desk.state.jobs == before.jobs


def test_a_bounded_number_of_nodes_is_named_in_an_attempt() -> None:
    nodes = [f"n{number}" for number in range(MAX_NAMED + 2)]
    desk = running(*nodes, dp=len(nodes))
    for slot in desk.job().slots:
        desk.feed(slow(desk, slot.node))
    assert len(lines(desk)) == MAX_NAMED


def test_the_heat_map_of_recorded_spans_has_a_slow_rank_hot() -> None:
    table = recorded_spans.read(recorded_spans.CPU_DP4).of_steps(100, 150)
    rows = {row.name: row for row in heat_map(table)}
    assert {"step", "forward", "backward", "optimizer"} <= set(rows)
    assert all(0.5 < ratio < 2 for ratio in rows["forward"].ratio)
    assert rows["step"].median_ns.min() > rows["forward"].median_ns.max()
    table.duration_ns[(table.rank == 2)] *= 3
    again = {row.name: row for row in heat_map(table, ("forward",))}
    assert list(again) == ["forward"]
    assert again["forward"].ratio[2] == pytest.approx(3, rel=0.4)
    assert int(np.nanargmax(again["forward"].ratio)) == 2


async def test_a_stored_rank_that_waits_inside_its_forward_is_not_slow(tmp_path: Path) -> None:
    desk = running("n1", "n2", "n3", "n4", dp=4)
    job, posted = desk.job(), list[Event]()
    for factor, slow in ((0.5, 0), (1.5, 1)):
        store = SpanStore(tmp_path / str(factor), 1 << 30, 1e9)
        intake = SpanIntake(store)
        views = SpanViews(intake, store)
        watch = StragglerWatch(views, lambda: desk.state, lambda: desk.now_s, posted.append)
        table = overlapped({1: factor}, steps=55)
        for slot in job.slots:
            for rank in slot.ranks:
                if rank < 4:
                    for batch in batches(job, slot.node, table, rank):
                        assert intake.take(batch)
        await intake.store_waiting()
        await watch.look()
        assert len(posted) == slow, "its optimizer is faster, so it waits longer for the others"
        await intake.close()


def spans_of(job: Job, rank: int, node: str, factor: float, steps: int) -> Any:
    data = b"".join(
        SPAN.pack(
            *Span(step * 10**9, int(factor * (1e7 + 1e4 * (step * 7 + rank * 3) % 13)), step, 0)
        )
        for step in range(steps)
    )
    found = link_pb2.ReportSpansRequest(
        node=node, job=job.name, attempt=job.attempt, rank=rank, count=steps,
        columns=zlib.compress(to_columns(data)),
    )  # fmt: skip
    found.operations.add(name="forward", kind="compute")
    return found


async def test_stored_spans_lead_to_one_event_a_window_and_to_a_map(tmp_path: Path) -> None:
    desk = running("n1", "n2", "n3", "n4", dp=4)
    job, posted = desk.job(), list[Event]()
    store = SpanStore(tmp_path, 1 << 30, 1e9)
    intake = SpanIntake(store)
    views = SpanViews(intake, store)
    watch = StragglerWatch(views, lambda: desk.state, lambda: desk.now_s, posted.append)
    await watch.look()
    assert not posted, "without spans nothing is slow"
    bad = job.slots[2]
    for slot in job.slots:
        for rank in slot.ranks:
            factor = 1.2 if rank == bad.ranks[0] else 1.0
            assert intake.take(spans_of(job, rank, slot.node, factor, 52))
    found = await views.heat_map(job, (), 50)
    assert (found.first_step, found.last_step) == (1, 50)
    assert list(found.rank_nodes)[bad.ranks[0]] == bad.node
    (row,) = found.rows
    assert row.ratio[bad.ranks[0]] == pytest.approx(1.2, rel=0.05)
    assert not any(math.isnan(value) for value in row.median_ms)
    assert [slow.node for slow in found.slow_nodes] == [bad.node]
    await watch.look()
    await watch.look()
    (event,) = posted
    assert isinstance(event, StragglerFound) and event.node == bad.node
    desk.feed(event)
    assert lines(desk)[0][0] == f"nodes/{bad.node}"
    await intake.close()

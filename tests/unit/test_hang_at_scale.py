"""The verdict about a hang: right by its definition, and linear in ranks."""

from __future__ import annotations

import gc
import time
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.harness.properties import examples
from tests.unit.test_driver_orders import fleet

from megascale_driver.analysis.progress import OperationCount, RankStatus, RankView, suspects
from megascale_driver.core import machine
from megascale_driver.core.values.cluster import AttemptPhase, Cluster, Liveness, Report
from megascale_driver.core.values.events import PagesRead, RankPages
from megascale_driver.core.values.job import JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_job.layout import RankLayout

# 50 ms on a machine of its own; a busy one takes more processor time for the same work. What was
# quadratic took 2.2 s.
LIMIT_S = 0.150
LAYOUTS = [RankLayout(dp=4), RankLayout(tp=2, dp=2, pp=2), RankLayout(tp=2, dp=3), RankLayout(pp=4)]


def members(group: str, rank: int, layout: RankLayout) -> tuple[int, ...]:
    if group in ("tp", "dp"):
        return tuple(layout.members(rank, group))  # type: ignore[arg-type]
    return tuple(layout.members(rank, "pp")) if group.startswith("pp") else ()


def by_definition(views: list[RankView], layout: RankLayout) -> set[int]:
    """Who holds the others up: every pair of ranks of every group, looked at one by one."""
    waits: dict[int, set[int]] = {view.rank: set() for view in views}
    inside = {
        view.rank: [c for c in view.status.operations if c.entered > c.completed]
        for view in views
        if view.status is not None
    }
    for one in views:
        for count in inside[one.rank]:
            for other in views:
                if members(count.group, one.rank, layout) != members(
                    count.group, other.rank, layout
                ):
                    continue
                theirs = [c for c in other.status.operations if c.group == count.group]  # type: ignore[union-attr]
                if theirs and theirs[0].entered < count.entered:
                    waits[one.rank].add(other.rank)
    waited_for = set[int]().union(*waits.values())
    return {
        rank
        for rank, peers in waits.items()
        if not peers and (not inside[rank] or rank in waited_for)
    }


@examples(200)
@given(st.sampled_from(LAYOUTS), st.data())
def test_the_verdict_is_that_of_the_definition(layout: RankLayout, data: st.DataObject) -> None:
    views = []
    for rank in range(layout.world_size):
        counts = []
        for group in ("world", "tp", "dp", "pp0-1.gradient"):
            entered = data.draw(st.integers(1, 3))
            counts.append(OperationCount(group, entered, data.draw(st.integers(0, entered))))
        views.append(RankView(rank, "n", 0.0, RankStatus(rank, 5, "STEP", 70.0, tuple(counts))))
    expected = by_definition(views, layout)
    if 0 < len(expected) < len(views):
        assert {view.rank for view in suspects(views, layout)} == expected


def hung(culprit: int) -> tuple[Cluster, PagesRead]:
    """A job of 12,288 ranks on 1,536 nodes that stands still because of one rank."""
    state = fleet()
    job = replace(state.jobs["a"], phase=JobPhase.RUNNING, timer_s=800.0, step_times=(1.0,) * 100)
    report = Report(job="a", attempt=3, phase=AttemptPhase.RUNNING)
    nodes = {
        name: replace(node, liveness=Liveness.ALIVE, connected=True, report=report)
        for name, node in state.nodes.items()
    }
    pages = []
    for slot in job.slots:
        statuses = []
        for rank in slot.ranks:
            tp = OperationCount("tp", 8 if rank == culprit else 9, 8)
            counts = (OperationCount("world", 3, 3), tp, OperationCount("dp", 4, 4))
            statuses.append(RankStatus(rank, 5, "STEP", 190.0, counts))
        pages.append(RankPages(slot.node, "i", 999.0, tuple(statuses)))
    event = PagesRead(1000.0, "a", 3, tuple(pages))
    return Cluster(nodes=nodes, jobs={"a": job}), event


def test_a_hang_of_1536_nodes_is_decided_in_milliseconds() -> None:
    state, event = hung(culprit=4711)
    took_s = []
    gc.collect()
    gc.freeze()  # as a driver does with what lives long
    try:
        for _ in range(5):
            began_s = time.process_time()
            after, outcome = machine.step(state, event, Policy())
            took_s.append(time.process_time() - began_s)
    finally:
        gc.unfreeze()
    (line,) = [line for line in outcome.audit if line.reason == "HANG_SUSPECTED"]
    assert "rank 4711 on node node-00588 is in phase STEP" in line.message
    assert after.jobs["a"].phase is JobPhase.STOPPING
    assert min(took_s) < LIMIT_S, took_s

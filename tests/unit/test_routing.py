"""A rank with hot experts: named with the cause routing, and never as a slow node."""

from __future__ import annotations

import json
import math
import re
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tests.harness.desk import POLICY, Desk
from tests.harness.expert_spans import HOT_AT, OPS, spans

from megascale.v1 import link_pb2, types_pb2
from megascale_common.node.spans.record import SPAN, to_columns
from megascale_common.service.clock import VirtualClock
from megascale_driver.analysis.hot_experts import REMEDY, HotExpert, HotRank
from megascale_driver.analysis.spans import clocks, recorded
from megascale_driver.analysis.spans.__main__ import main
from megascale_driver.analysis.spans.decline import compared
from megascale_driver.analysis.spans.outliers import heat_map, slow_nodes
from megascale_driver.analysis.spans.routing import expert_shares, hot_ranks, routing_ns
from megascale_driver.analysis.spans.table import SpanTable
from megascale_driver.analysis.spans.terms import EXPERT_TERM, TERMS, measured_steps
from megascale_driver.analysis.spans.timeline import merged
from megascale_driver.core.queue.explain import explanation
from megascale_driver.core.signs.routing import MAX_NAMED, HotRanksFound
from megascale_driver.core.values.events import Event, PolicyRequested, StragglerFound
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.shell.engine import Engine, Term
from megascale_driver.shell.metrics import DriverMetrics, Sources
from megascale_driver.telemetry.intake import SpanIntake
from megascale_driver.telemetry.store import SpanStore
from megascale_driver.telemetry.views import SpanViews
from megascale_driver.telemetry.watches import StragglerWatch
from megascale_job.layout import RankLayout

LAYOUT = RankLayout(dp=16, ep=4)
HOT = 6
SHARES = {4: 0.8, 5: 0.7, HOT: 1.8, 7: 0.7}


def fleet(slow: dict[int, float] | None = None, **options: Any) -> SpanTable:
    """A fleet of 16 nodes in which one rank of an ep group is hot."""
    return spans(options.pop("shares", SHARES), slow, **{"layout": LAYOUT, **options})


@pytest.mark.parametrize("parts", [True, False])
@pytest.mark.parametrize("noise", [0.002, 0.01, 0.03])
def test_a_hot_rank_is_named_as_routing_alone(parts: bool, noise: float) -> None:
    table = fleet(parts=parts, noise=noise)
    assert slow_nodes(table) == []
    [hot] = hot_ranks(table)
    assert (hot.rank, hot.node) == (HOT, "n6")
    assert hot.share == pytest.approx(1.8, rel=0.02)
    # The experts are half of the computation of an even rank.
    assert hot.ratio == pytest.approx(1.4, abs=0.06)
    assert hot.since_step == 6 and hot.last_step == 55
    assert [(one.layer, one.expert, one.load) for one in hot.experts] == [HOT_AT]


@pytest.mark.parametrize("parts", [True, False])
def test_the_same_slowness_without_the_share_is_a_slow_node(parts: bool) -> None:
    table = fleet(parts=parts, figures=False)
    assert hot_ranks(table) == [] and not routing_ns(table).any()
    assert "n6" in {found.node for found in slow_nodes(table)}


@pytest.mark.parametrize("factor", [1.15, 1.3])
def test_a_rank_that_is_slow_beyond_its_share_stays_a_slow_node(factor: float) -> None:
    table = fleet({HOT: factor})
    [slow] = slow_nodes(table)
    assert slow.node == "n6"
    [hot] = hot_ranks(table)
    assert hot.rank == HOT and hot.ratio == pytest.approx(1.4, abs=0.05), "no more than its rows"


@pytest.mark.parametrize("rank", [0, 5, 12])
def test_another_rank_that_is_slow_is_named_beside_the_hot_one(rank: int) -> None:
    table = fleet({rank: 1.2})
    assert [found.rank for found in slow_nodes(table)] == [rank]
    assert [found.rank for found in hot_ranks(table)] == [HOT]


def test_an_even_fleet_names_nobody() -> None:
    table = fleet(shares={})
    assert slow_nodes(table) == [] and hot_ranks(table) == []


def test_rows_that_cost_no_time_explain_none() -> None:
    table = fleet(device_share=0.0)
    assert hot_ranks(table) == [] and slow_nodes(table) == []
    assert [slow.rank for slow in slow_nodes(fleet({HOT: 1.2}, device_share=0.0))] == [HOT]


def test_a_rank_with_few_rows_is_never_made_to_look_slow() -> None:
    few = {4: 1.2, 5: 1.2, 6: 0.4, 7: 1.2}
    for device_share in (0.0, 0.5, 1.0):
        assert slow_nodes(fleet(shares=few, device_share=device_share)) == []


def test_two_ranks_are_enough_because_the_share_names_the_hot_one() -> None:
    table = spans({0: 1.8, 1: 0.2}, layout=RankLayout(dp=2, ep=2))
    assert [found.rank for found in hot_ranks(table)] == [0]
    assert [found.rank for found in hot_ranks(spans(SHARES, layout=LAYOUT, nodes=1))] == [HOT]


def test_a_rank_that_was_hot_for_a_short_time_is_not_named() -> None:
    before, after = fleet(shares={}, steps=35), fleet(first=36, steps=20)
    assert hot_ranks(joined(before, after)) == []


def joined(before: SpanTable, after: SpanTable) -> SpanTable:
    later = int((before.start_ns + before.duration_ns).max() - after.start_ns.min())
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(before, name), getattr(after, name)])
        for name in ("rank", "step", "op", "micro_batch", "seq", "duration_ns", "aux")
    }
    starts = np.concatenate([before.start_ns, after.start_ns + later])
    return replace(before, **columns, start_ns=starts)


def test_the_sentence_has_rank_share_cause_time_and_experts() -> None:
    hot = HotRank(3, "n2", 1.83, "forward", 1.24, 12.3e6, 41, 90, (HotExpert(5, 17, 4.2),))
    assert hot.sentence == (
        "rank 3 on node n2 has hot experts (1.8 times the mean rows of its ep group): the cause is "
        "routing, which makes its forward spans take 24.0 % longer (12.30 ms a step) from step 41 "
        "on; the hottest is expert 17 of layer 5 (4.2 times an even load)"
    )
    for word in ("slow", "hardware", "device", "evict", "diagnose"):
        assert word not in f"{hot.sentence}; {REMEDY}"


def test_the_heat_map_shows_times_as_they_are_and_no_figure_as_a_time() -> None:
    rows = {row.name: row for row in heat_map(fleet())}
    assert rows["experts"].kind == "part"
    assert rows["experts"].ratio[HOT] == pytest.approx(1.8, rel=0.05)
    assert rows["forward"].ratio[HOT] == pytest.approx(1.4, rel=0.05)
    assert not {"expert_share", "hot_expert"} & set(rows)
    shares = expert_shares(fleet())
    assert shares[HOT] == pytest.approx(1.8, rel=0.02) and shares[0] == pytest.approx(1, rel=0.02)
    assert len(expert_shares(fleet(figures=False))) == 0


def test_why_names_routing_and_a_slow_host_as_before() -> None:
    hot = joined(fleet(shares={}, steps=40), fleet(first=41, steps=40))
    split, answer = compared(hot, 41)
    assert (split, answer.cause, answer.rank, answer.node) == (41, "routing", HOT, "n6")
    assert "the experts of rank 6 on node n6 are hot, with 1.8 times the mean rows" in (
        answer.sentence
    )
    assert "instead of 1.0" in answer.sentence and REMEDY in answer.sentence
    assert answer.shares["routing"] > 0.8 and "slow_host" not in answer.shares
    slow = joined(fleet(shares={}, steps=40), fleet({HOT: 1.5}, shares={}, first=41, steps=40))
    assert compared(slow, 41)[1].cause == "slow_host"


def test_the_wait_for_a_hot_rank_is_no_term_of_a_straggler() -> None:
    even, hot = measured_steps(fleet(shares={}), 2), measured_steps(fleet(), 2)
    assert tuple(hot.terms) == (*TERMS, EXPERT_TERM)
    grown = {name: np.median(hot.terms[name] - even.terms[name]) for name in hot.terms}
    assert max(grown, key=lambda name: grown[name]) == EXPERT_TERM
    assert grown["straggler"] < 0.1 * grown[EXPERT_TERM]
    for found in (even, hot):
        assert np.sum(list(found.terms.values()), axis=0) == pytest.approx(found.step_s)
    # Of four micro-batches two have spans.
    more = measured_steps(fleet(shares={}), 4)
    assert more.terms[EXPERT_TERM] == pytest.approx(2 * even.terms[EXPERT_TERM], rel=0.1)
    assert EXPERT_TERM not in measured_steps(fleet(parts=False), 2).terms


def test_a_trace_has_neither_sums_nor_figures() -> None:
    table = fleet(steps=2)
    trace = merged(table, clocks.clocks(table))
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"forward", "backward", "optimizer"} <= names
    assert not names & {"router", "experts", "dispatch ep", "combine ep", "expert_share"}


# A job of the desk has tp 2 and pp 2, and four ranks on a node.
IN_STAGES = RankLayout(tp=2, dp=8, pp=2, ep=4)


def running() -> Desk:
    desk = Desk(*(f"n{number}" for number in range(9)))
    desk.submit(dp=IN_STAGES.dp, spares=1)
    desk.run()
    return desk


def hot(rank: int, node: str = "n1", share: float = 1.8) -> HotRank:
    return HotRank(rank, node, share, "forward", 1.24, 12.3e6, 41, 90, (HotExpert(5, 17, 4.2),))


def found(desk: Desk, *ranks: HotRank, attempt: int = 0) -> HotRanksFound:
    job = desk.job()
    return HotRanksFound(desk.now_s, job.name, attempt or job.attempt, ranks)


def lines(desk: Desk) -> list[Any]:
    return [line for line in desk.audit if line.reason == "EXPERTS_HOT"]


def test_each_hot_rank_has_one_line_in_an_attempt_and_the_job_goes_on() -> None:
    desk = running()
    before = desk.state.nodes
    for _ in range(3):
        desk.feed(found(desk, hot(2, share=1.8), hot(1, share=1.4)))
    first, second = lines(desk)
    assert (first.subject, first.policy, first.mode) == ("jobs/a", "routing", "OBSERVE")
    assert first.message == f"{hot(2).sentence}; {REMEDY}"
    assert [one.digest for one in first.evidence] == ["expert_share", str(HotExpert(5, 17, 4.2))]
    assert first.evidence[0].uri == "1.800" and second.evidence[0].uri == "1.400"
    assert desk.job().phase is JobPhase.RUNNING and desk.job().evicted == ()
    assert desk.state.nodes == before


def test_a_bounded_number_of_ranks_is_named_and_none_of_an_earlier_attempt() -> None:
    desk = running()
    desk.feed(found(desk, hot(0), attempt=7))
    assert not lines(desk)
    for rank in range(MAX_NAMED + 3):
        desk.feed(found(desk, hot(rank)))
    assert len(lines(desk)) == MAX_NAMED


def test_explain_says_what_is_slow_why_and_what_to_do_as_long_as_it_holds() -> None:
    desk = running()

    def explained() -> Any:
        log = [line for line in desk.audit if line.log == "a"]
        return explanation(desk.state, "a", log, desk.now_s, POLICY)

    before = explained()
    desk.feed(found(desk, hot(2)))
    answer = explained()
    assert answer.sentence == f"{before.sentence}; {hot(2).sentence}; {REMEDY}"
    assert answer.cause is None and answer.actions == ()
    raised, shown = answer.suggestions[:2]
    assert "trainer.loss.global_balance (now 0)" in raised.text
    assert raised.command == "megascale update JOB.YAML --reason REASON"
    assert shown.command == "megascale heat a"
    desk.feed(found(desk))
    assert explained().sentence == before.sentence and len(lines(desk)) == 1


async def test_stored_spans_of_a_hot_rank_cost_no_node_its_job(tmp_path: Path) -> None:
    desk = running()
    # The strictest cluster: a slow node would lose its job to the spare.
    desk.feed(PolicyRequested(desk.now_s, "straggler", "ENFORCE", "a test", "me"))
    posted = await look(desk, fleet(layout=IN_STAGES), tmp_path)
    assert [type(event) for event in posted] == [HotRanksFound]
    for event in posted:
        desk.feed(event)
    assert len(lines(desk)) == 1 and "STRAGGLER" not in desk.reasons()
    assert desk.job().phase is JobPhase.RUNNING and desk.job().evicted == ()
    node = next(slot.node for slot in desk.job().slots if HOT in slot.ranks)
    assert desk.disposition(node) == "SCHEDULABLE"


async def test_the_same_spans_without_shares_cost_the_node_its_job(tmp_path: Path) -> None:
    desk = running()
    desk.feed(PolicyRequested(desk.now_s, "straggler", "ENFORCE", "a test", "me"))
    [event] = await look(desk, fleet(layout=IN_STAGES, figures=False), tmp_path)
    assert isinstance(event, StragglerFound) and event.rank == HOT
    desk.feed(event)
    assert not lines(desk) and desk.job().evicted == (event.node,)


def test_the_metrics_have_the_loads_and_the_hot_ranks_of_a_job() -> None:
    engine = Engine(Policy(), VirtualClock(), "token", "here")
    engine.term = cast(Term, SimpleNamespace(epoch=types_pb2.Epoch()))
    engine.state = running().state
    ranks: list[tuple[str, HotRank]] = []
    metrics = DriverMetrics(engine, sources=Sources(hot=lambda: ranks))

    def found() -> dict[tuple[str, ...], float]:
        return {
            (sample.name.removeprefix("megascale_"), *sample.labels.values()): sample.value
            for metric in metrics.registry.collect()
            for sample in metric.samples
            if re.search("expert|balance|router|hot_rank", sample.name)
        }

    metrics.step("a", types_pb2.StepRecord(attempt=1, step=1, loss=2.0))
    assert found() == {}, "a dense model has none of them"
    experts = types_pb2.StepRecord(balance=1.25, router_z=0.5, expert_load_max=4, expert_load_min=0)
    metrics.step("a", experts)
    ranks += [("a", hot(3)), ("a", hot(5))]
    assert found() == {
        ("balance", "a"): 1.25,
        ("router_z", "a"): 0.5,
        ("expert_load_ratio", "a", "max"): 4.0,
        ("expert_load_ratio", "a", "min"): 0.0,
        ("hot_rank_rows_ratio", "a", "3"): 1.8,
        ("hot_rank_rows_ratio", "a", "5"): 1.8,
    }


def test_a_recorded_file_of_ranks_with_experts_has_both_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, ranks = fleet({12: 1.3}), []
    for rank in range(LAYOUT.world_size):
        own = b"".join(records_of(table, rank))
        ranks.append(recorded.rank_entry(OPS, own))
    layout = {"dp": LAYOUT.dp, "ep": LAYOUT.ep}
    path = tmp_path / "spans.json.z"
    path.write_bytes(recorded.dump({"ranks": ranks, "layout": layout}))
    assert main(["heat", str(path)]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert [one["rank"] for one in answer["slow_nodes"]] == [12]
    assert [one["rank"] for one in answer["hot_ranks"]] == [HOT]
    assert answer["expert_share"][HOT] == pytest.approx(1.8, rel=0.02)
    assert "has hot experts" in err and REMEDY in err


async def look(desk: Desk, table: SpanTable, folder: Path) -> list[Event]:
    """What the watch posts about a job whose ranks have sent these spans."""
    job, posted = with_layout(desk.job()), list[Event]()
    store = SpanStore(folder, 1 << 30, 1e9)
    intake = SpanIntake(store)
    views = SpanViews(intake, store)
    state = replace(desk.state, jobs={job.name: job})
    watch = StragglerWatch(views, lambda: state, lambda: desk.now_s, posted.append)
    for slot in job.slots:
        for rank in slot.ranks:
            for batch in batches(job, slot.node, table, rank):
                assert intake.take(batch)
    await intake.store_waiting()
    await watch.look()
    answer = await views.heat_map(job, ("forward",), 50)
    hot = [one.rank for one in answer.routing.hot_ranks]
    assert hot == [event_hot.rank for _, event_hot in watch.hot_ranks()]
    if hot:
        assert answer.routing.expert_share[HOT] == pytest.approx(1.8, rel=0.02)
        assert not any(math.isnan(share) for share in answer.routing.expert_share)
        assert answer.routing.hot_ranks[0].hottest[0].expert == HOT_AT[1]
        assert REMEDY in answer.routing.hot_ranks[0].sentence
    else:
        assert not answer.HasField("routing")
    await intake.close()
    return posted


def with_layout(job: Job) -> Job:
    """The job with groups of ep, which a dense model has not."""
    sizes = replace(job.config.parallelism, ep=IN_STAGES.ep)
    return replace(job, config=replace(job.config, parallelism=sizes))


def batches(job: Job, node: str, table: SpanTable, rank: int) -> list[link_pb2.ReportSpansRequest]:
    records, found = records_of(table, rank), []
    for begin in range(0, len(records), 1024):
        part = records[begin : begin + 1024]
        message = link_pb2.ReportSpansRequest(
            node=node,
            job=job.name,
            attempt=job.attempt,
            rank=rank,
            count=len(part),
            columns=zlib.compress(to_columns(b"".join(part))),
        )
        for op in OPS:
            message.operations.add(name=op.name, kind=op.kind, group=op.group)
        found.append(message)
    return found


def records_of(table: SpanTable, rank: int) -> list[bytes]:
    own = table.where(table.rank == rank)
    columns = (
        getattr(own, name)
        for name in ("start_ns", "duration_ns", "step", "op", "micro_batch", "seq", "aux")
    )
    return [SPAN.pack(*map(int, row)) for row in zip(*columns, strict=True)]

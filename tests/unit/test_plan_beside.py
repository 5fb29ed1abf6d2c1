"""Recorded steps beside a plan: what they consist of, an injected slow term, and noise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness import recorded_spans
from tests.harness.injected_spans import Change, injected
from tests.harness.properties import examples

from megascale_common.node.spans import ops
from megascale_common.node.spans.record import NO_MICRO_BATCH, SPAN, Span, pack_aux
from megascale_driver.analysis.spans.table import SpanTable
from megascale_driver.analysis.spans.terms import EXPERT_TERM, TERMS, measured_steps
from megascale_driver.shell.metrics import _collective_metric
from megascale_job.layout import RankLayout
from megascale_planner.job_plan import (
    PARTS,
    Comparison,
    JobPlan,
    PlanRule,
    Term,
    compare_steps,
    sentence_of,
)

MS = 1_000_000
RECORDED = recorded_spans.read(recorded_spans.CPU_DP4)
RULE = PlanRule()
WINDOW = RULE.windows * RULE.window_steps


def plan_of_steps(first: int, last: int) -> JobPlan:
    """A plan that recorded steps keep: their medians, and the interval that a CPU's plan has.

    They were recorded on shared cores: medians of 30 steps in a row are 51 to 99 ms.
    """
    found = measured_steps(RECORDED.of_steps(first, last), 2)
    step_s = float(np.median(found.step_s))
    terms = {name: float(np.median(values)) for name, values in found.terms.items()}
    return JobPlan(step_s, 0.5 * step_s, 1.5 * step_s, terms, "a CPU")


def compared(table: SpanTable, plan: JobPlan, before: str = "") -> Comparison:
    found = measured_steps(table, 2)
    answer = compare_steps(found.steps, found.step_s, found.terms, plan, before)
    assert answer is not None
    return answer


def test_the_terms_are_those_of_the_plan_and_add_up_to_each_step() -> None:
    assert {*TERMS, EXPERT_TERM} == set(PARTS)
    found = measured_steps(RECORDED, 2)
    assert len(found.steps) > 1000 and tuple(found.terms) == TERMS
    assert np.sum(list(found.terms.values()), axis=0) == pytest.approx(found.step_s)
    assert all(np.all(values >= 0) for name, values in found.terms.items() if name != "compute")


def test_single_collectives_add_up_to_their_terms() -> None:
    found = measured_steps(RECORDED, 2)
    assert {group for _, group in found.collectives} == {"dp", "world"}
    network = sum(one for one, _ in found.collectives.values())
    waiting = sum(late for _, late in found.collectives.values())
    terms = found.terms["data_parallel"] + found.terms["tensor_parallel"]
    np.testing.assert_allclose(network, terms, rtol=1e-9)
    np.testing.assert_allclose(waiting, found.terms["straggler"], rtol=1e-9, atol=1e-12)
    assert all(np.median(one) > 0 for one, _ in found.collectives.values())


def test_the_kinds_of_collectives_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = max(
        measured_steps(RECORDED, 2).collectives.items(), key=lambda one: float(np.sum(one[1]))
    )
    monkeypatch.setattr("megascale_driver.analysis.spans.terms.MAX_COLLECTIVES", 1)
    assert list(measured_steps(RECORDED, 2).collectives) == [longest[0]]


def test_metrics_have_a_line_for_each_part_of_a_collective() -> None:
    found = _collective_metric([("a", {("all_gather", "dp"): (0.25, 0.5)})])
    assert {(s.labels["part"], s.value) for s in found.samples} == {
        ("network", 0.25),
        ("waiting", 0.5),
    }
    assert found.samples[0].labels["group"] == "dp"


@pytest.mark.parametrize(
    ("change", "term"),
    [
        (Change(network={"reduce_scatter": 8.0}), "data_parallel"),
        (Change(compute=dict.fromkeys(range(4), 5.0)), "compute"),
        (Change(compute={2: 5.0}), "straggler"),
        (Change(data_wait={(r, s): 90 * MS for r in range(4) for s in range(500)}), "host"),
    ],
)
def test_an_injected_slow_term_is_named(change: Change, term: str) -> None:
    plan, table = plan_of_steps(1, 400), RECORDED.of_steps(401, 400 + WINDOW)
    before = compared(table, plan)
    assert before.slower_by == "", before.sentence
    found = compared(injected(table, change), plan)
    assert found.slower_by == term, found.sentence
    assert f"{term.replace('_', '-')} term +" in found.sentence
    assert (found.first, found.last) == (401, 400 + WINDOW)


def test_clean_recorded_steps_never_change_the_verdict() -> None:
    """Every window of the recording beside a plan from its first half."""
    plan, verdict, changes, looks = plan_of_steps(1, 560), "", 0, 0
    found = measured_steps(RECORDED, 2)
    for end in range(WINDOW, len(found.steps), RULE.window_steps):
        part = slice(end - WINDOW, end)
        terms = {name: values[part] for name, values in found.terms.items()}
        answer = compare_steps(found.steps[part], found.step_s[part], terms, plan, verdict)
        assert answer is not None
        changes += bool(answer.slower_by) != bool(verdict)
        verdict, looks = answer.slower_by, looks + 1
    assert looks > 100 and changes == 0


@examples(30)
@given(at=st.floats(0.8, 1.5), noise=st.floats(0.0, 0.3), seed=st.integers(0, 1000))
def test_noise_around_one_level_changes_the_verdict_at_most_once(
    at: float, noise: float, seed: int
) -> None:
    plan = JobPlan(1.0, 0.94, 1.07, {"compute": 1.0}, "a device")
    random = np.random.default_rng(seed)
    steps = at * (1 + noise / 3 * random.standard_normal(600).clip(-3, 9))
    steps[random.integers(0, 600, 20)] *= 5  # checkpoints and the like
    verdict, changes = "", 0
    for end in range(RULE.window_steps, 600, RULE.window_steps):
        part = steps[max(0, end - WINDOW) : end]
        answer = compare_steps(list(range(len(part))), part, {"compute": part}, plan, verdict)
        assert answer is not None
        changes += answer.slower_by != verdict
        verdict = answer.slower_by
    assert changes <= 1
    if at > 1.07 * (1 + 1.2 * noise):
        assert verdict == "compute"
    if at < 1.0:
        assert not verdict


def test_the_verdict_stays_in_between_and_ends_clearly_inside() -> None:
    plan = JobPlan(6.5, 6.1, 6.9, {"data_parallel": 0.3, "host": 0.1, "compute": 6.1}, "a device")

    def after(step_s: float, before: str, **terms: float) -> str:
        steps = np.full(WINDOW, step_s)
        values = {name: np.full(WINDOW, value) for name, value in terms.items()}
        answer = compare_steps(list(range(WINDOW)), steps, values, plan, before)
        assert answer is not None
        return answer.slower_by

    assert after(7.4, "", data_parallel=1.0, host=0.3, compute=6.1) == "data_parallel"
    assert after(6.85, "", data_parallel=0.6) == "", "within the interval"
    assert after(6.85, "data_parallel", data_parallel=0.6) == "data_parallel", "not clearly inside"
    assert after(6.7, "data_parallel", data_parallel=0.5) == ""
    # Another term takes over only when it is clearly ahead.
    assert after(7.4, "data_parallel", data_parallel=0.6, host=0.5) == "data_parallel"
    assert after(7.4, "data_parallel", data_parallel=0.4, host=0.9) == "host"
    assert after(7.4, "") == "step", "terms were not measured"
    burst = np.where(np.arange(WINDOW) < 20, 9.0, 6.5)
    answer = compare_steps(list(range(WINDOW)), burst, {}, plan)
    assert answer is not None and not answer.slower_by, "one window of three is as planned"
    few = compare_steps([1, 2], np.array([9.0, 9.0]), {}, plan)
    assert few is None
    one = compare_steps(list(range(10)), np.full(10, 9.0), {}, plan)
    assert one is not None and one.slower_by == "", "one window says nothing"


def test_the_sentence_has_the_numbers() -> None:
    plan = JobPlan(6.5, 6.1, 6.9, {}, "a device")
    terms = (Term("data_parallel", 0.3, 1.0), Term("compute", 6.2, 6.3))
    assert sentence_of(7.4, plan, terms, "data_parallel") == (
        "step 7.4 s, plan 6.5 s (6.1 s to 6.9 s): data-parallel term +700 ms (1.0 s, plan 300 ms)"
    )
    assert sentence_of(6.6, plan, terms, "") == "step 6.6 s, plan 6.5 s (6.1 s to 6.9 s)"


def spans(rank: int, step: int, rows: list[tuple[ops.Op, int, int, int]]) -> list[Span]:
    """Spans of (operation, begin, duration, micro-batch) in ms of a step of a second."""
    count: dict[ops.Op, int] = {}
    found = []
    for op, begin, duration, micro_batch in rows:
        seq = count[op] = count.get(op, -1) + 1
        start = step * 1000 * MS + begin * MS
        found.append(Span(start, duration * MS, step, OPS.index(op), micro_batch, seq, 0))
    return found


GATHER = ops.Op("all_gather", "collective", "tp")
REDUCE = ops.Op("reduce_scatter", "collective", "dp")
OPS = (ops.STEP, ops.FORWARD, ops.BACKWARD, ops.OPTIMIZER, GATHER, REDUCE, ops.GARBAGE)


def test_what_lies_inside_computation_counts_once_and_two_micro_batches_stand_for_eight() -> None:
    """tp 2 x dp 2; of 8 micro-batches two were measured; ranks 2 and 3 are 40 ms late."""
    none = NO_MICRO_BATCH
    by_rank = []
    for rank in range(4):
        wait = 0 if rank >= 2 else 40
        rows = [
            (ops.STEP, 0, 900, none),
            (ops.FORWARD, 0, 30, 0),
            (GATHER, 5, 10, none),  # inside the forward
            (ops.FORWARD, 40, 20, 1),
            (ops.BACKWARD, 60, 40, 0),
            (ops.BACKWARD, 100, 40, 1),
            (ops.GARBAGE, 110, 8, none),  # inside the backward
            (REDUCE, 700 - wait, 20 + wait, none),
            (ops.OPTIMIZER, 730, 50, none),
        ]
        records = [span for step in range(3) for span in spans(rank, step, rows)]
        by_rank.append((rank, b"".join(SPAN.pack(*span) for span in records), OPS))
    table = SpanTable.of_records(by_rank, RankLayout(tp=2, dp=2), ["a", "a", "b", "b"])
    found = measured_steps(table, 8)
    assert list(found.steps) == [0, 1, 2]
    ms = {name: values[0] * 1000 for name, values in found.terms.items()}
    forward, backward = 4 * (20 + 20), 4 * (40 + 32)
    assert ms["compute"] == pytest.approx(forward + backward)
    assert ms["tensor_parallel"] == pytest.approx(10)
    assert ms["data_parallel"] == pytest.approx(20) and ms["straggler"] == pytest.approx(20)
    assert ms["optimizer"] == pytest.approx(50)
    rest = 900 - forward - backward - 10 - 20 - 20 - 50
    assert ms["host"] == pytest.approx(rest)


def test_weight_gradients_that_run_apart_are_computation_of_their_own_chunks() -> None:
    """Of two chunks one splits its backwards; of 8 micro-batches one was measured."""
    operations = (*OPS, ops.BACKWARD_WEIGHT)
    rows = [
        (ops.STEP, 0, 900, NO_MICRO_BATCH, 0),
        (ops.FORWARD, 0, 10, 0, 0),
        (ops.FORWARD, 10, 10, 0, 1),
        (ops.BACKWARD, 20, 10, 0, 1),
        (ops.BACKWARD_WEIGHT, 30, 10, 0, 1),
        (ops.BACKWARD, 40, 20, 0, 0),
    ]
    records = [
        Span(
            *(1_000_000_000 + begin * 1_000_000, length * 1_000_000, 0),
            *(operations.index(op), micro_batch, 0, pack_aux(chunk)),
        )
        for op, begin, length, micro_batch, chunk in rows
    ]
    packed = b"".join(SPAN.pack(*span) for span in records)
    table = SpanTable.of_records([(0, packed, operations)], RankLayout(), ["a"])
    terms = measured_steps(table, 8).terms
    assert terms["compute"][0] * 1000 == pytest.approx(8 * (10 + 10 + 10 + 10 + 20))
    assert terms["host"][0] * 1000 == pytest.approx(900 - 8 * 60)

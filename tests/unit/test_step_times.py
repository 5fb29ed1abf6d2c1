"""How long a job's steps take is what its ranks have measured, not when records arrive."""

from __future__ import annotations

import math
import random

import pytest
from tests.harness.desk import POLICY, Desk

from megascale_driver.analysis.progress import p99
from megascale_driver.core.values.events import Tick


def trained(desk: Desk, steps: int, step_time_s: float | None, late_s: float) -> None:
    """Steps of 10 s, of which each record arrives up to ``late_s`` late; ticks are a grid."""
    rng, first = random.Random(5), desk.job().current.step
    began_s = desk.now_s
    for number in range(1, steps + 1):
        at_s = began_s + 10.0 * number + rng.uniform(0.0, late_s)
        desk.now_s = math.ceil(at_s * 4) / 4
        record = {"step_time": step_time_s} if step_time_s is not None else {}
        step = (("a", desk.job().attempt, first + number),)
        desk.feed(Tick(desk.now_s, step, False, {"a": record}))


@pytest.fixture
def desk() -> Desk:
    desk = Desk("n1", "n2")
    desk.submit()
    desk.run()
    return desk


def test_late_records_do_not_change_the_limit_of_a_hang(desk: Desk) -> None:
    trained(desk, 20, 10.0, late_s=1.0)
    times = desk.job().step_times
    assert len(times) == 19 and set(times) == {10.0}, "the first step is a warm-up"
    assert POLICY.hang.p99_factor * p99(times) == 50.0
    assert desk.job().current.step_interval_s == 10.0


def test_a_record_after_a_gap_counts_as_a_step(desk: Desk) -> None:
    """As after a stretch that a simulation skips, or when records were lost."""
    trained(desk, 3, 10.0, late_s=0.0)
    desk.now_s += 95.0
    desk.feed(Tick(desk.now_s, (("a", 1, desk.job().current.step + 9),), False,
                   {"a": {"step_time": 10.0}}))  # fmt: skip
    assert set(desk.job().step_times) == {10.0}


@pytest.mark.parametrize("damaged", [None, 0.0, -1.0, math.inf, math.nan, 1e9])
def test_a_record_without_a_time_that_can_be_true_counts_by_its_arrival(
    desk: Desk, damaged: float | None
) -> None:
    trained(desk, 10, damaged, late_s=0.0)
    assert set(desk.job().step_times) == {10.0}

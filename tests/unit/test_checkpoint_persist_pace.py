"""Persistence slows down while steps are slower beside it: the controller and its bucket."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_checkpoint.concurrency import Cancellation
from megascale_checkpoint.save import write_limit
from megascale_checkpoint.save.write_limit import (
    FIRST_HOLD_AFTER,
    LEAST_PACE_S,
    LEAST_QUIET,
    LEAST_SHARE,
    LOWER,
    MIB,
    WINDOW_STEPS,
    PersistPace,
    WriteLimits,
)

RATE = 1e9  # what the store takes without a limit


class Run:
    """Steps of 1 s, longer beside a write by ``cost`` of the share of the full rate in use."""

    def __init__(self, pace: PersistPace, cost: float) -> None:
        self.pace, self.cost, self.step = pace, cost, 0

    def take(self, count: int, *, writing: bool) -> None:
        for _ in range(count):
            self.step += 1
            rate = min(RATE, self.pace.limit or RATE) if writing and not self.pace.hold else 0.0
            time_s = 1 + self.cost * rate / RATE
            self.pace.add(self.step, time_s, writing=writing, written=int(rate * time_s))


def test_the_bandwidth_falls_until_steps_are_no_slower_and_rises_again() -> None:
    pace = PersistPace(0.05)
    run = Run(pace, cost=0.2)
    run.take(5, writing=False)
    run.take(1 + WINDOW_STEPS, writing=True)
    assert pace.slowdown == pytest.approx(0.2)
    assert pace.limit == pytest.approx(LOWER * RATE)
    run.take(10 * WINDOW_STEPS, writing=True)
    assert 0.1 * RATE < pace.limit < 0.3 * RATE
    assert pace.slowdown <= 0.06
    run.cost = 0.0
    run.take(12 * WINDOW_STEPS, writing=True)
    assert pace.limit == 0.0, "no limit is left"


def test_it_never_falls_below_its_bound() -> None:
    pace = PersistPace(0.05)
    run = Run(pace, cost=0.0)
    run.take(5, writing=False)
    run.take(1 + WINDOW_STEPS, writing=True)
    for _ in range(50):  # whatever the write does, these steps stay slow
        for _ in range(WINDOW_STEPS):
            run.step += 1
            rate = pace.limit or RATE
            pace.add(run.step, 2.0, writing=True, written=int(2 * rate))
    assert pace.limit == pytest.approx(LEAST_SHARE * RATE, rel=0.01)


def test_without_quiet_steps_writing_is_held_for_a_few() -> None:
    pace = PersistPace(0.05)
    run = Run(pace, cost=0.2)
    run.take(FIRST_HOLD_AFTER, writing=True)
    assert pace.hold
    run.take(1 + LEAST_QUIET, writing=True)
    assert not pace.hold
    run.take(2 * WINDOW_STEPS, writing=True)
    assert 0 < pace.limit < RATE, "the quiet steps of the hold were compared with"


@given(
    st.floats(0, 0.5),
    st.lists(st.tuples(st.floats(0.001, 10), st.booleans(), st.integers(0, 1 << 40)), max_size=300),
)
def test_the_limit_stays_within_its_bounds_and_a_hold_ends(
    tolerated: float, steps: list[tuple[float, bool, int]]
) -> None:
    pace, held = PersistPace(tolerated), 0
    fastest = 0.0
    for number, (time_s, writing, written) in enumerate(steps, start=1):
        pace.add(number, time_s, writing=writing, written=written)
        fastest = max(fastest, written / time_s)
        assert pace.limit >= 0 and pace.limit <= max(fastest, 1e-9) * 1.01
        held = held + 1 if pace.hold else 0
        assert held <= LEAST_QUIET + 1
    if not tolerated:
        assert (pace.limit, pace.hold, pace.slowdown) == (0.0, False, 0.0)


def test_only_the_first_report_of_a_step_counts() -> None:
    alone, repeated = PersistPace(0.05), PersistPace(0.05)
    for step in range(1, 40):
        beside = step > 10
        values: dict[str, Any] = {"writing": beside, "written": 1000}
        alone.add(step, 1.5 if beside else 1.0, **values)
        for _ in range(4):
            repeated.add(step, 1.5 if beside else 1.0, **values)
    assert alone.limit == repeated.limit > 0


def test_a_held_write_goes_on_when_no_step_comes_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that waits for the write itself, at its end, must not wait for the hold."""
    limits, now_s = WriteLimits(), 100.0

    def look() -> None:
        nonlocal now_s
        now_s += LEAST_PACE_S / 4

    monkeypatch.setattr(write_limit, "time", SimpleNamespace(monotonic=lambda: now_s))
    limits.set_pace("job", 0.0, hold=True, step_s=0.001)
    paced = limits.paced("job", 0.0, [memoryview(b"x")], Cancellation(), look)
    assert list(paced) == [memoryview(b"x")]
    assert now_s == 100.0 + LEAST_PACE_S, "held for that long"
    assert limits.taken("job") == 1


def test_a_pace_lowers_the_job_s_own_limit_and_never_raises_it() -> None:
    limits, chunk = WriteLimits(), [memoryview(bytearray(MIB))]
    limits.set_pace("job", 2.0 * MIB, hold=False, step_s=10.0)
    begun_s = time.monotonic()
    assert sum(map(len, limits.paced("job", 8.0, chunk, Cancellation()))) == MIB
    assert time.monotonic() - begun_s >= 0.2  # of 0.5 s a quarter may come at once

"""Which checkpoints a job keeps: the rules, and what they never give up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale_checkpoint.retention.retire import HOUR_S, Commit, Retention, expendable


def commits(*steps: int, attempt: int = 1, every_s: float = 600.0) -> list[Commit]:
    return [Commit(attempt, step, number * every_s) for number, step in enumerate(steps)]


def kept(found: list[Commit], retention: Retention, *protected: tuple[int, int]) -> list[int]:
    gone = expendable(found, retention, protected)
    return [each.step for each in found if each not in gone]


STEPS = commits(*range(100, 1300, 100))  # one every ten minutes, two hours in all


@pytest.mark.parametrize(
    ("retention", "expected"),
    [
        (Retention(), [each.step for each in STEPS]),
        (Retention(keep_latest=1), [1200]),
        (Retention(keep_latest=3), [1000, 1100, 1200]),
        (Retention(keep_latest=99), [each.step for each in STEPS]),
        (Retention(keep_every_steps=500), [500, 1000, 1200]),
        (Retention(keep_every_steps=250), [300, 500, 800, 1000, 1200]),
        (Retention(keep_every_steps=10**6), [1200]),
        (Retention(keep_every_hours=1), [100, 700, 1200]),
        (Retention(2, 1000, 1), [100, 700, 1000, 1100, 1200]),
    ],
)
def test_a_checkpoint_stays_that_one_rule_keeps(retention: Retention, expected: list[int]) -> None:
    assert kept(STEPS, retention) == expected


def test_the_newest_and_what_is_protected_always_stay() -> None:
    assert kept(STEPS, Retention(keep_every_steps=10**6), (1, 300), (1, 700)) == [300, 700, 1200]
    assert kept(STEPS[:1], Retention(keep_every_steps=10**6)) == [100]
    assert kept([], Retention(keep_latest=1)) == []


def test_of_a_step_that_was_done_again_the_later_attempt_is_kept() -> None:
    found = [*commits(100, 200, 300), *commits(200, 300, 400, attempt=2, every_s=1.0)]
    gone = expendable(found, Retention(keep_every_steps=200), ())
    assert [each.key for each in found if each not in gone] == [(2, 200), (2, 400)]


def test_rules_survive_the_record() -> None:
    rules = Retention(2, 1000, 0.5)
    assert Retention.from_record(rules.to_record()) == rules
    assert Retention.from_record({}).keeps_all and str(Retention()) == "all"
    assert str(rules) == "the newest 2 and one of every 1,000 steps and one of every 0.5 hours"


@st.composite
def histories(draw: st.DrawFn) -> list[Commit]:
    """Commits of some attempts, each of which begins at or below the step before."""
    found: list[Commit] = []
    step, time_s = 0, 0.0
    for attempt in range(1, draw(st.integers(1, 4)) + 1):
        step = draw(st.integers(0, step))
        for _ in range(draw(st.integers(0, 8))):
            step += draw(st.integers(1, 300))
            time_s += draw(st.integers(1, 3 * int(HOUR_S)))
            found.append(Commit(attempt, step, time_s))
    return found


RULES = st.builds(
    Retention, st.integers(0, 5), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 1.0, 6.0])
)


@given(histories(), RULES, st.data())
def test_rules_hold_in_any_order_of_commits_and_removals(
    history: list[Commit], rules: Retention, data: st.DataObject
) -> None:
    """Removing after each commit, or after some, leaves what removing once in the end leaves of
    those; and what stays, stays when nothing is committed."""
    pins = {each.key for each in history if data.draw(st.booleans())}
    stored: list[Commit] = []
    for each in history:
        stored.append(each)
        if data.draw(st.booleans()):
            stored = [c for c in stored if c not in expendable(stored, rules, pins)]
            assert expendable(stored, rules, pins) == []
            assert stored[-1] == each
    left = [c for c in stored if c not in expendable(stored, rules, pins)]
    assert {c.key for c in history if c.key in pins} <= {c.key for c in left}
    if history:
        assert left[-1] == history[-1]
    if not rules.keeps_all and not pins:
        bound = rules.keep_latest + 1
        if rules.keep_every_steps:
            bound += max((c.step for c in history), default=0) // rules.keep_every_steps
        if rules.keep_every_hours:
            last_s = max((c.time_s for c in history), default=0.0)
            bound += int(last_s / (rules.keep_every_hours * HOUR_S)) + 1
        assert len(left) <= bound

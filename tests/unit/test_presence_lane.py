"""The presence lane: silence as deadlines, evidence that changes, and stretches left out."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.properties import examples

from megascale_driver.core.values.cluster import Liveness, Node
from megascale_driver.core.values.policy import Policy
from megascale_driver.presence.lane import FORGOTTEN_S, RECHECK_S, SLOW_PER_S, Lane, News

POLICY = Policy()
ALIVE = Node("n", liveness=Liveness.ALIVE)


def linked(*names: str, now_s: float = 100.0) -> Lane:
    lane = Lane(POLICY)
    lane.begin(now_s, ())
    for name in names:
        lane.opened(now_s, name, f"{name}-1")
    return lane


def nodes(*names: str) -> dict[str, Node]:
    return {name: replace(ALIVE, name=name) for name in names}


def silent(lane: Lane, now_s: float, *names: str) -> list[str]:
    return [found.node for found in lane.due(now_s, nodes(*names))]


def test_a_heartbeat_is_news_once_and_then_only_when_its_evidence_changes() -> None:
    lane = linked("a")
    assert lane.beat(101.0, "a", ("RUNNING", 1)) is News.DECIDES
    assert [lane.beat(102.0 + i, "a", ("RUNNING", 1)) for i in range(5)] == [News.NONE] * 5
    assert lane.beat(110.0, "a", ("FAILED", 1)) is News.DECIDES
    lane.opened(111.0, "a", "a-2")
    assert lane.beat(112.0, "a", ("FAILED", 1)) is News.DECIDES, "the core knows nothing of a-2"


def test_a_new_term_gets_the_evidence_of_every_node_again() -> None:
    lane = linked("a")
    lane.beat(101.0, "a", 1)
    lane.begin(102.0, ("a", "gone"))
    assert lane.beat(103.0, "a", 1) is News.DECIDES
    assert silent(lane, 109.9, "a", "gone") == []
    assert silent(lane, 110.1, "a", "gone") == ["gone"], "stored, and never linked to this leader"


def test_silence_is_reported_at_each_limit_and_in_between_until_the_node_is_heard() -> None:
    lane = linked("a", "b", now_s=100.0)
    reported = []
    for quarter in range(1, 61 * 4):
        now_s = 100.0 + quarter / 4
        if quarter % 20 == 0:
            lane.beat(now_s, "b", None)
        found = lane.due(now_s, nodes("a", "b"))
        assert [each.last_beat_s for each in found] == [100.0] * len(found)
        reported += [(each.node, now_s - 100.0) for each in found]
    assert {name for name, _ in reported} == {"a"}
    times = [at_s for _, at_s in reported]
    assert times[0] == POLICY.suspect_after_s
    assert POLICY.dead_after_s in times and POLICY.dead_uncorroborated_after_s in times
    assert max(b - a for a, b in itertools.pairwise(times)) <= RECHECK_S
    assert lane.beat(161.0, "a", None) is News.DECIDES, "the core must see that it is back"
    assert silent(lane, 168.9, "a", "b") in ([], ["b"]) and "a" in silent(lane, 169.1, "a")


def test_dead_nodes_are_left_alone_and_forgotten_ones_forgotten() -> None:
    lane = linked("a", "b")
    lane.closed("b", "b-1")
    dead = {"a": replace(ALIVE, name="a", liveness=Liveness.DEAD)}
    assert lane.due(109.0, dead) == ()
    assert lane.next_deadline_s() == 109.0 + FORGOTTEN_S and lane.last_beat_s("b") == 0.0
    assert lane.beat(200.0, "a", None) is News.DECIDES
    assert lane.next_deadline_s() == 200.0 + POLICY.suspect_after_s


def test_what_only_a_restart_needs_enters_the_core_at_a_bounded_rate() -> None:
    count = int(4 * SLOW_PER_S)  # so each node may once in four seconds
    names = [f"n{i}" for i in range(count)]
    lane = linked(*names)
    for name in names:
        lane.beat(100.0, name, 1, 0)
    entered = sum(
        lane.beat(100.0 + second, name, 1, second) is News.PROGRESS
        for second in range(1, 21)
        for name in names
    )
    assert entered == count * 20 / 4
    alone = linked("a")
    alone.beat(100.0, "a", 1, 0)
    assert [alone.beat(100.0 + i, "a", 1, i) for i in range(1, 4)] == [News.PROGRESS] * 3


def test_a_fact_that_all_nodes_report_enters_once() -> None:
    lane = linked("a", "b", "c")
    for name in "abc":
        lane.beat(100.0, name, 1)
    commit = ("job", "committed", 40, 1)
    assert [lane.beat(101.0, name, 1, None, (commit,)) for name in "abc"] == [
        News.PROGRESS,
        News.NONE,
        News.NONE,
    ]
    lane.closed("a", "a-1")  # perhaps before the core read it
    assert lane.beat(102.0, "b", 1, None, (commit,)) is News.PROGRESS


def test_counters_of_one_node_per_job_count_until_it_is_gone() -> None:
    lane = linked("a", "b")
    for name in "ab":
        lane.beat(100.0, name, 1)
    assert lane.beat(101.0, "a", 1, counted=(("job", 7),)) is News.PROGRESS
    assert lane.beat(101.0, "b", 1, counted=(("job", 8),)) is News.NONE
    assert lane.beat(102.0, "a", 1, counted=(("job", 8),)) is News.PROGRESS
    lane.closed("a", "a-1")
    assert lane.beat(103.0, "b", 1, counted=(("job", 9),)) is News.PROGRESS


def test_an_assumed_node_is_never_silent_until_it_is_doubted() -> None:
    lane = linked("a", "b", now_s=100.0)
    lane.assume("a")
    lane.assume("b")
    assert lane.next_deadline_s() == math.inf and silent(lane, 10_000.0, "a", "b") == []
    lane.doubt(10_000.0, "b", 9_998.0)
    assert lane.next_deadline_s() == 9_998.0 + POLICY.suspect_after_s
    assert silent(lane, 10_006.0, "a", "b") == ["b"]


def test_a_silent_node_that_is_heard_while_it_is_assumed_is_not_silent_again() -> None:
    """Its heartbeat is on the way when a simulation declares that it repeats it."""
    lane = linked("a", now_s=100.0)
    assert silent(lane, 109.0, "a") == ["a"]
    lane.assume("a")
    lane.beat(109.1, "a", None)
    assert lane.next_deadline_s() == math.inf and silent(lane, 10_000.0, "a") == []


@examples(60)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["beat", "open", "close"]), st.integers(1, 9)),
        max_size=60,
    )
)
def test_the_next_deadline_is_when_silence_is_next_reported(
    history: list[tuple[int, str, int]],
) -> None:
    names = [f"n{i}" for i in range(4)]
    lane, now_s, plain = linked(*names), 100.0, dict.fromkeys(names, 100.0)
    for which, what, wait in history:
        name = names[which]
        if what == "beat":
            lane.beat(now_s, name, None)
            plain[name] = now_s
        elif what == "open":
            lane.opened(now_s, name, f"{name}-1")
            plain[name] = now_s
        else:
            lane.closed(name, f"{name}-1")
        now_s += wait / 2
        deadline_s = lane.next_deadline_s()
        found = silent(lane, now_s, *names)
        assert bool(found) <= (deadline_s <= now_s), "nothing is reported before the deadline"
        assert all(now_s - plain[each] >= POLICY.suspect_after_s for each in found)
    # Whoever is silent now is reported within the recheck.
    quiet = {name for name in names if now_s + RECHECK_S - plain[name] >= POLICY.suspect_after_s}
    assert set(silent(lane, now_s + RECHECK_S, *names)) == quiet


@pytest.mark.parametrize("count", [1_000, 16_000])
def test_a_heartbeat_costs_the_same_in_a_fleet_of_any_size(count: int) -> None:
    names = [f"n{i:05d}" for i in range(count)]
    lane = linked(*names)
    for name in names:
        lane.beat(100.0, name, (1, 2), (3,))
    began_s = time.process_time()
    for beat in range(20_000):
        lane.beat(101.0, names[beat * 7 % count], (1, 2), (3,))
        if beat % 100 == 0:
            lane.due(101.0, {})
    assert time.process_time() - began_s < 0.5, "25 us each; here about 1"

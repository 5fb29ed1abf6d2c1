"""An incast packet by packet: what published congestion controls do to a victim beside it."""

from __future__ import annotations

import pytest

from megascale_planner.network.congestion_control import (
    Dcqcn,
    DcqcnParameters,
    Swift,
    SwiftParameters,
)
from megascale_planner.network.incast import ARMS, Outcome, Setup, simulate

LINE_BPS, RTT_S = 200e9, 8e-6


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """The incast of the reference: 32 senders, 128 MB."""
    names = ("dcqcn", "dcqcn-deep", "dcqcn-window", "swift", "hybrid")
    return {name: simulate(ARMS[name].setup(Setup()), ARMS[name].make) for name in names}


def test_dcqcn_pauses_the_link_and_starves_the_victim(outcomes: dict[str, Outcome]) -> None:
    """Another packet simulation: 8.38 ms, the victim 4.6 Gb/s, 11.7 % paused, queue 270 KB."""
    found = outcomes["dcqcn"]
    assert 6.5e-3 < found.done_s < 9e-3
    assert found.victim_bps < 10e9
    assert found.paused == pytest.approx(0.117, abs=0.02)
    assert found.queue_mean_bytes == pytest.approx(270e3, rel=0.1)


def test_a_target_delay_takes_nearly_all_pauses_away(outcomes: dict[str, Outcome]) -> None:
    """The same one: 5.12 ms (the least that is possible), the victim 189 Gb/s, 3.3 % paused."""
    found = outcomes["swift"]
    assert found.done_s == pytest.approx(Setup().ideal_s, rel=0.01)
    assert found.victim_bps > 150e9
    assert found.paused < 0.08 < outcomes["dcqcn"].paused
    assert found.fairness > 0.95


def test_marks_beside_the_delay_change_little(outcomes: dict[str, Outcome]) -> None:
    swift, hybrid = outcomes["swift"], outcomes["hybrid"]
    assert hybrid.done_s == pytest.approx(swift.done_s, rel=0.02)
    assert hybrid.victim_bps == pytest.approx(swift.victim_bps, rel=0.1)
    assert hybrid.marked > swift.marked


def test_earlier_marks_and_later_pauses_help_dcqcn(outcomes: dict[str, Outcome]) -> None:
    """Its figures depend on parameters more than on anything else: a sweep, never one bar."""
    assert outcomes["dcqcn-deep"].victim_bps > 5 * outcomes["dcqcn"].victim_bps


def test_a_window_alone_helps_the_victim_of_dcqcn(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["dcqcn-window"].victim_bps > 2 * outcomes["dcqcn"].victim_bps


def test_one_sender_has_the_link_to_itself() -> None:
    setup = Setup(senders=1, total_bytes=8_000_000)
    found = simulate(setup, ARMS["swift"].make)
    assert found.done_s == pytest.approx(setup.ideal_s + 3 * RTT_S / 4, rel=0.02)
    assert found.paused == 0 and found.fairness == 1
    assert found.victim_bps > 0.9 * LINE_BPS


def test_nothing_is_lost_and_a_run_repeats() -> None:
    setup = Setup(senders=8, total_bytes=4_000_000, xoff_bytes=50_000)
    first, second = (simulate(setup, ARMS["dcqcn"].make) for _ in range(2))
    assert first == second and first.done_s < setup.most_s


def test_without_a_pause_the_queue_grows_beyond_it() -> None:
    """PFC is what bounds the queue: the sabotage of its threshold shows."""
    held = simulate(Setup(total_bytes=32_000_000), ARMS["dcqcn-window"].make)
    free = simulate(Setup(total_bytes=32_000_000, xoff_bytes=1 << 40), ARMS["dcqcn-window"].make)
    assert free.paused == 0 < held.paused
    assert free.queue_p99_bytes > 2 * held.queue_p99_bytes


def test_dcqcn_halves_at_the_first_mark_and_comes_back_by_halves() -> None:
    control = Dcqcn(DcqcnParameters(), LINE_BPS, RTT_S)
    control.acknowledged(1e-6, RTT_S, marked=False)
    assert control.rate_bps == LINE_BPS
    control.acknowledged(1e-6, RTT_S, marked=True)
    assert control.rate_bps == pytest.approx(LINE_BPS / 2, rel=0.01)
    control.acknowledged(2e-6, RTT_S, marked=True)
    assert control.rate_bps == pytest.approx(LINE_BPS / 2, rel=0.01), "cut at most every 4 us"
    control.timer(control.timer_s)
    assert control.rate_bps == pytest.approx(0.75 * LINE_BPS, rel=0.01)


def test_swift_shrinks_once_in_a_round_trip_and_never_by_more_than_half() -> None:
    control = Swift(SwiftParameters(), LINE_BPS, RTT_S)
    window = control.window
    control.acknowledged(1e-3, 1e-3, marked=False)
    assert control.window == pytest.approx(window / 2)
    control.acknowledged(1.1e-3, 1e-3, marked=False)
    assert control.window == pytest.approx(window / 2), "once in a round trip"
    control.acknowledged(5e-3, RTT_S, marked=False)
    assert control.window > window / 2


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"senders": 0}, "senders is 0"),
        ({"senders": 10, "total_bytes": 4096}, "each at least a packet"),
        ({"total_bytes": 1 << 40}, "8 GB at most"),
    ],
)
def test_what_cannot_be_run_is_refused(given: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Setup(**given)  # type: ignore[arg-type]

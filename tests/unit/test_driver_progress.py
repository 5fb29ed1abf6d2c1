"""Standstill of a job and its suspects from status pages alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.v1 import link_pb2
from megascale_common.node.status_page import Phase, StatusPageWriter, read_status_page
from megascale_driver.analysis.progress import (
    MAX_STEP_TIMES,
    Beat,
    HangLimits,
    OperationCount,
    RankStatus,
    RankView,
    add_step_time,
    no_progress,
    p99,
    suspects,
)
from megascale_driver.presence import reports
from megascale_executor.agent.workers.worker_status import worker_status
from megascale_executor.agent.workers.workers import Worker
from megascale_job.layout import RankLayout

LIMITS = HangLimits()
PACE = (0.5, 0.5, 0.5)


def status(
    rank: int, age_s: float, *operations: tuple[str, int, int], step: int = 7, phase: str = "STEP"
) -> RankStatus:
    return RankStatus(rank, step, phase, age_s, tuple(OperationCount(*item) for item in operations))


def views(*statuses: RankStatus) -> tuple[RankView, ...]:
    return tuple(RankView(s.rank, f"n{s.rank}", 1000.0 - s.age_s, s) for s in statuses)


def suspected(layout: RankLayout, *statuses: RankStatus) -> list[int]:
    return [view.rank for view in suspects(views(*statuses), layout)]


def test_limits_follow_phase_and_pace() -> None:
    assert LIMITS.of("STEP", PACE) == 60.0
    assert LIMITS.of("STEP", (50.0,) * 10) == 250.0
    assert LIMITS.of("STEP", ()) == LIMITS.of("WARMUP", PACE) == LIMITS.warmup_s
    assert LIMITS.of("EVAL", PACE) == LIMITS.evaluation_s
    with pytest.raises(ValueError, match="hang floor"):
        HangLimits(floor_s=0.0)


@given(st.lists(st.floats(0.001, 1000.0), max_size=300))
def test_the_sample_is_bounded_and_its_p99_is_one_of_its_greatest(intervals: list[float]) -> None:
    times: tuple[float, ...] = ()
    for interval_s in intervals:
        times = add_step_time(times, interval_s)
    assert times == tuple(intervals[-MAX_STEP_TIMES:])
    assert p99(times) in ([0.0] if not times else sorted(times)[-2:])


def test_standstill_counts_up_to_the_oldest_beat_from_the_newest_write() -> None:
    beats = [
        Beat("n0", 1000.0, (0,), (status(0, 70.0),)),
        Beat("n1", 996.0, (1,), (status(1, 80.0),)),
    ]
    found = no_progress(beats, PACE, 0.0, LIMITS)
    assert found is not None and (found.still_s, found.limit_s, found.hangs) == (66.0, 60.0, True)
    found = no_progress(beats, PACE, 950.0, LIMITS)
    assert found is not None and found.still_s == 46.0 and not found.hangs
    silent = no_progress([beats[0], Beat("n1", 935.0, (1,), (status(1, 80.0),))], PACE, 0.0, LIMITS)
    assert silent is not None and silent.still_s == 5.0, "a node without heartbeats proves nothing"


@given(
    st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500)), min_size=1, max_size=8),
    st.floats(0, 500),
)
def test_a_rank_that_advances_within_the_limit_rules_a_hang_out(
    others: list[tuple[float, float]], fresh_age_s: float
) -> None:
    beats = [
        Beat(f"n{i}", 1000.0 - at, (i,), (status(i, age),)) for i, (at, age) in enumerate(others)
    ]
    beats.append(Beat("fresh", 1000.0, (99,), (status(99, fresh_age_s),)))
    found = no_progress(beats, PACE, 0.0, LIMITS)
    assert found is not None
    assert found.still_s <= fresh_age_s + 1e-6  # clocks near 1000 s round by less
    assert found.hangs == (found.still_s >= 60.0)


def test_ranks_in_a_longer_phase_and_ranks_that_are_done() -> None:
    beat = Beat("n0", 1000.0, (0, 1), (status(0, 100.0, phase="EVAL"), status(1, 100.0)))
    found = no_progress([beat], PACE, 0.0, LIMITS)
    assert found is not None and found.limit_s == LIMITS.evaluation_s
    beat = Beat("n0", 1000.0, (0, 1), (status(0, 100.0, phase="DONE"), status(1, 100.0)))
    found = no_progress([beat], PACE, 0.0, LIMITS)
    assert found is not None and [row[0] for row in found.rows] == [1] and found.hangs
    done = Beat("n0", 1000.0, (0,), (status(0, 100.0, phase="DONE"),))
    assert no_progress([done], PACE, 0.0, LIMITS) is None
    assert no_progress([Beat("n0", 1000.0, (0,), ())], PACE, 0.0, LIMITS) is None


def test_the_rank_that_has_not_entered_is_found_through_a_chain_of_waiting() -> None:
    # dp 2 x pp 2: ranks 0, 1 are stage 0; 2, 3 stage 1. Rank 3 is stuck in its own code, rank 1
    # waits for its gradient, rank 0 for rank 1 in the reduction over dp, rank 2 for all in the
    # world.
    layout = RankLayout(dp=2, pp=2)
    assert suspected(
        layout,
        status(0, 61.0, ("world", 3, 3), ("dp", 9, 8), ("pp0-1.gradient", 5, 5)),
        status(1, 62.0, ("world", 3, 3), ("dp", 8, 8), ("pp0-1.gradient", 5, 4)),
        status(2, 60.0, ("world", 4, 3), ("dp", 8, 8), ("pp0-1.gradient", 5, 5)),
        status(3, 61.5, ("world", 3, 3), ("dp", 8, 8), ("pp0-1.gradient", 4, 4)),
    ) == [3]


def test_a_group_that_all_members_entered_is_suspected_when_others_wait_for_it() -> None:
    layout = RankLayout(tp=2, dp=2)
    assert suspected(
        layout,
        status(0, 61.0, ("tp", 4, 3), ("world", 2, 2)),
        status(1, 61.0, ("tp", 4, 3), ("world", 2, 2)),
        status(2, 60.0, ("tp", 4, 4), ("world", 3, 2)),
        status(3, 60.0, ("tp", 4, 4), ("world", 3, 2)),
    ) == [0, 1]


def test_without_evidence_from_operations_the_first_to_stop_are_suspected() -> None:
    layout = RankLayout(dp=3)
    assert suspected(layout, status(0, 60.0), status(1, 75.0), status(2, 60.5)) == [1]
    assert suspected(layout, status(0, 60.0), status(1, 60.1), status(2, 60.2)) == [2, 1, 0]
    assert suspected(layout, status(0, 90.0), status(1, 60.0, step=6), status(2, 60.0)) == [1]


def test_a_collective_that_all_have_entered_singles_nobody_out() -> None:
    # Who entered first has waited longest for the others, and is the least likely of all.
    joined = [status(rank, 60.0 + 5 * rank, ("world", 4, 3)) for rank in range(3)]
    assert suspected(RankLayout(dp=3), *joined) == [2, 1, 0]
    # Hosts that are ahead of their devices: the device that hangs is the first to complete nothing.
    ahead = [status(rank, 60.0 + 5 * rank, ("world", 4, 3), ("dp", 9, 6)) for rank in range(3)]
    assert suspected(RankLayout(dp=3), *ahead) == [2]


def test_a_page_that_cannot_be_read_is_suspected_first() -> None:
    beat = Beat("n0", 1000.0, (0, 1), (status(0, 100.0),))
    found = no_progress([beat], PACE, 0.0, LIMITS)
    assert found is not None and found.hangs
    assert [view.rank for view in suspects(found.rows, RankLayout(dp=2))] == [1]


def test_the_status_page_reaches_the_driver_with_its_operations_once_it_stands_still(
    tmp_path: Path,
) -> None:
    page = StatusPageWriter(tmp_path / "page", rank=3, attempt=1)
    row = page.row("world")
    page.update(step=9, phase=Phase.STEP)
    page.enter(row)
    status = read_status_page(tmp_path / "page")
    assert status is not None
    for age_s, operations in ((0.5, ()), (2.0, (OperationCount("world", 1, 0),))):
        message = worker_status(
            Worker(3, cast(Any, None), tmp_path / "log", tmp_path / "page"),
            status.updated_ns + round(age_s * 1e9),
        )
        beat = link_pb2.Heartbeat(workers=[message, link_pb2.WorkerStatus(rank=4)])
        assert reports.pages(beat) == (RankStatus(3, 9, "STEP", age_s, operations),)
    page.close()

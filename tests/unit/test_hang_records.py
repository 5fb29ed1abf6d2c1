"""NCCL's records in the driver's verdict on a hang: said beside the stacks, and who is blamed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.harness.desk import Desk

from megascale_common.node.flight_record import GroupRecord, RankRecord
from megascale_driver.core.values.attempt import Fault, FaultKind
from megascale_driver.core.values.cluster import AttemptPhase, StoppedReport
from megascale_driver.core.values.job import JobPhase

RANKS = range(8)
CULPRIT = 5
SAID = (
    "NCCL's records: rank 5 did not enter all_gather 31 of dp, in which ranks 0, 1, 2, 3 and 3 "
    "more waited"
)


def record(rank: int, culprit: int = CULPRIT) -> RankRecord:
    """All ranks are in the 31st operation of a group but for one, which is none."""
    inside = rank != culprit
    entered, waits_in = (33, 31) if inside else (30, 0)  # hosts are ahead of their devices
    return RankRecord(
        rank, (GroupRecord("dp", RANKS, False, entered, waits_in, "all_gather" * inside),)
    )


ALL = {"n1": [record(rank) for rank in RANKS[:4]], "n2": [record(rank) for rank in RANKS[4:]]}


def hung(node: str) -> Desk:
    """Two nodes with ranks 0 to 3 and 4 to 7, whose attempt is stopped after a hang."""
    desk = Desk("n1", "n2", "n3")
    desk.submit()
    desk.run()
    job, message = desk.job(), "no rank has advanced"
    fault = Fault(FaultKind.HANG, node, desk.now_s, message, 4, hard=False)
    stopping = replace(
        job, phase=JobPhase.STOPPING, after_stop=JobPhase.QUEUED, timer_s=desk.now_s,
        stop_reason=message, current=replace(job.current, faults=(fault,)),
    )  # fmt: skip
    desk.state = replace(desk.state, jobs={"a": stopping})
    return desk


def stopped(desk: Desk, records: dict[str, list[RankRecord]]) -> list[Any]:
    """Both nodes have stopped, with these records; returns the lines on it."""
    for node in ("n1", "n2"):
        report = StoppedReport("a", 1, records=tuple(records.get(node, ())))
        desk.report(node, AttemptPhase.IDLE, stopped=report)
    desk.stop(search=False)
    return [line for line in desk.audit if line.reason == "HANG_STACKS"]


def test_what_the_records_say_stands_in_the_log_with_the_rank_as_evidence() -> None:
    desk = hung("n2")
    (line,) = stopped(desk, ALL)
    assert line.message.endswith(SAID)
    (named,) = [item for item in line.evidence if item.kind == "nccl_record"]
    assert named.source == "nodes/n2/ranks/5"
    assert named.digest == "has not entered all_gather 31 of dp"


def test_records_of_one_node_end_the_search_for_a_culprit_that_pages_did_not_name() -> None:
    blamed, unnamed = hung(""), hung("")
    stopped(blamed, ALL)
    assert blamed.job().node_failures == {"n2": 1}
    assert "GROUP_CHECK_STARTED" not in blamed.reasons()
    (line,) = [line for line in blamed.audit if line.reason == "ATTEMPT_STOPPED"]
    assert "by NCCL's records rank 5 did not enter all_gather 31" in line.message
    assert stopped(unnamed, {}) == []
    assert not unnamed.job().node_failures
    assert "GROUP_CHECK_STARTED" in unnamed.reasons()


def test_a_node_that_pages_have_blamed_stays_blamed() -> None:
    desk = hung("n1")
    stopped(desk, ALL)
    assert desk.job().node_failures == {"n1": 1}


def test_a_rank_that_wrote_no_record_is_the_silent_one() -> None:
    desk = hung("")
    waiting = {"n1": [record(rank) for rank in range(4)], "n2": [record(4), record(6), record(7)]}
    (line,) = stopped(desk, waiting)
    (named,) = [item for item in line.evidence if item.kind == "nccl_record"]
    assert named.source == "nodes/n2/ranks/5" and named.digest.startswith("wrote no record")
    assert desk.job().node_failures == {"n2": 1}


@pytest.mark.parametrize("ranks", [[], [0, 1, 2]])
def test_where_most_records_are_missing_they_say_nothing(ranks: list[int]) -> None:
    desk = hung("")
    assert stopped(desk, {"n1": [record(rank) for rank in ranks]}) == []
    assert desk.job().node_failures == {}


def test_where_all_have_entered_nobody_is_blamed() -> None:
    desk = hung("")
    everyone = [record(rank, culprit=-1) for rank in RANKS]
    stopped(desk, {"n1": everyone[:4], "n2": everyone[4:]})
    assert not desk.job().node_failures
    assert "GROUP_CHECK_STARTED" in desk.reasons(), "its nodes check each other"


def test_records_of_another_attempt_or_of_ranks_elsewhere_do_not_count() -> None:
    desk = hung("")
    for node in ("n1", "n2"):
        old = StoppedReport("a", 2, records=tuple(map(record, RANKS)))
        desk.report(node, AttemptPhase.IDLE, stopped=old)
    assert "HANG_STACKS" not in desk.reasons()

"""Restart budgets: per cause and window, with back-off, and never while a spare is untried."""

from __future__ import annotations

import pytest
from tests.harness.desk import Desk, exited
from tests.harness.simulated_cluster import demo_job

from megascale_driver.core.values.cluster import AttemptPhase, Disposition
from megascale_driver.core.values.events import EvictRequested, JobSubmitted, OpenFailed, Tick
from megascale_driver.core.values.job import JobPhase

HOUR_S = 3600.0


def step(desk: Desk, number: int) -> None:
    desk.feed(Tick(desk.now_s, (("a", desk.job().attempt, number),)))


def rest(desk: Desk, seconds: float) -> None:
    """Time passes, and all nodes beat."""
    until_s = desk.now_s + seconds
    while desk.now_s < until_s:
        desk.wait(min(5.0, until_s - desk.now_s))
        for name, node in desk.state.nodes.items():
            if node.report is not None:
                details = {"job": node.report.job, "attempt": node.report.attempt}
                desk.report(name, node.report.phase, **details)


def prepared(desk: Desk) -> None:
    for slot in desk.job().slots:
        desk.report(slot.node, AttemptPhase.PREPARED)


def open_fails(desk: Desk, error: str = "the committer does not answer") -> None:
    """All calls of this attempt's committer fail, and the attempt stops."""
    prepared(desk)
    for _ in range(3):
        desk.feed(OpenFailed(desk.now_s, "a", desk.job().attempt, error))
        desk.wait(1.1)
    desk.stop()


def test_a_broken_committer_costs_its_node_and_not_the_job_while_a_spare_stands_by() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.feed(JobSubmitted(desk.now_s, demo_job("a", max_restarts_without_progress=3), "me"))
    for _ in range(6):
        if desk.job().phase is JobPhase.PREPARING and desk.job().slots[0].node == "n1":
            open_fails(desk)
    job = desk.job()
    assert (job.phase, job.slots[0].node) == (JobPhase.PREPARING, "n3"), job.reason
    assert job.evicted == ("n1",) and desk.disposition("n1") == "SCHEDULABLE"


def test_a_broken_loader_of_the_first_node_does_not_end_the_job_while_a_spare_stands_by() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit(spares=1, max_restarts_without_progress=1)
    for _ in range(6):
        if desk.job().phase is JobPhase.PREPARING and desk.job().slots[0].node == "n1":
            desk.run()
            desk.report("n1", AttemptPhase.FAILED, failure="the loader ended with status 1")
            desk.stop()
            rest(desk, 10.0)
    job = desk.job()
    assert (job.phase, job.slots[0].node) == (JobPhase.PREPARING, "n3"), job.reason


def test_a_storage_that_is_away_for_all_nodes_evicts_none_of_them() -> None:
    desk = Desk("n1", "n2", "n3", "n4", "n5")
    desk.feed(JobSubmitted(desk.now_s, demo_job("a", max_restarts_without_progress=4), "me"))
    for _ in range(8):
        if desk.job().phase is JobPhase.PREPARING:
            open_fails(desk, "/mnt/nfs: stale file handle")
            rest(desk, 60.0)
    job = desk.job()
    assert job.phase is JobPhase.FAILED and len(job.evicted) <= 1
    assert "the same on nodes n1, n3" in job.reason, job.reason


def test_restarts_of_a_long_run_are_counted_by_window() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit(max_restarts=3)
    for number in range(1, 13):
        desk.run()
        if number % 3 == 1:
            desk.now_s += 6.1 * HOUR_S
        for name in ("n1", "n2", "n3"):
            desk.hello(name)
        step(desk, number)
        desk.fail("n2", exited(5, desk.now_s, -11))
        desk.stop()
        assert desk.job().phase is JobPhase.PREPARING, desk.job().reason
    assert desk.job().restarts == 12


def test_a_budget_is_spent_by_one_cause_within_its_window() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit(max_restarts=2)
    for number in range(1, 4):
        desk.run()
        step(desk, number)
        desk.fail("n2", exited(5, desk.now_s, -11))
        desk.stop()
    assert desk.job().phase is JobPhase.FAILED
    assert "recovery.max_restarts = 2 is spent" in desk.job().reason


def test_causes_have_budgets_of_their_own() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit(max_restarts=2)
    for number in range(1, 5):
        desk.run()
        step(desk, number)
        node = desk.job().slots[1].node
        if number % 2:
            desk.fail(node, exited(5, desk.now_s, -11))
        else:
            desk.hello(node, boot=number)
        desk.stop()
    assert desk.job().phase is JobPhase.PREPARING and desk.job().restarts == 4, desk.job().reason


def test_lost_nodes_do_not_spend_the_budget_without_progress() -> None:
    desk = Desk(*(f"n{i}" for i in range(1, 9)))
    desk.submit(max_restarts_without_progress=1)
    for _ in range(4):
        lost = desk.job().slots[1].node
        desk.now_s += 400.0  # beyond the window of the breaker
        for name in desk.state.nodes:
            if desk.liveness(name) == "ALIVE":
                desk.hello(name)
        for slot in desk.job().slots:
            desk.report(slot.node, AttemptPhase.PREPARING)
        desk.crash(lost)
        desk.stop()
    assert desk.job().phase is JobPhase.PREPARING and desk.job().restarts == 4, desk.job().reason


def test_attempts_without_progress_back_off() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit(max_restarts_without_progress=50, max_restarts=50)
    waits = []
    for number in range(7):
        desk.run()
        node = desk.job().slots[number % 2].node
        desk.fail(node, exited(4 * (number % 2), desk.now_s, -11))
        for slot in desk.job().slots:
            desk.report(slot.node, AttemptPhase.IDLE)
        since_s = desk.now_s
        while desk.job().phase is JobPhase.QUEUED:
            rest(desk, 0.5)
        waits.append(desk.now_s - since_s)
    assert waits[0] == 0.0 and waits == sorted(waits)
    assert waits[-1] == pytest.approx(32.0, abs=1.0)
    step(desk, 7)
    desk.run()
    step(desk, 8)
    desk.fail("n1", exited(0, desk.now_s, -11))
    desk.stop()
    assert desk.job().phase is JobPhase.PREPARING, "progress ends the back-off"


def fails_alike(desk: Desk, times: int) -> float:
    """The job's own code fails so often; how long the next attempt waits, in seconds."""
    for number in range(times):
        if desk.job().phase is JobPhase.QUEUED:
            rest(desk, desk.job().not_before_s - desk.now_s)
        desk.run()
        slot = desk.job().slots[number % 2]
        desk.fail(slot.node, exited(slot.ranks[0], desk.now_s, 1, error="ValueError: mine"))
        ended(desk)
    return desk.job().not_before_s - desk.now_s


def ended(desk: Desk) -> None:
    """All nodes of the attempt that live have stopped it; no time passes."""
    for slot in desk.job().slots:
        if desk.liveness(slot.node) == "ALIVE":
            desk.report(slot.node, AttemptPhase.IDLE)


def test_hosts_that_are_restarted_in_turn_make_no_attempt_wait() -> None:
    """Each attempt of a large job may lose another host before its first new step."""
    desk = Desk("n1", "n2", "n3")
    desk.submit(max_restarts_without_progress=50, max_restarts=50)
    for slot in desk.job().slots:
        desk.run()
        desk.hello(slot.node, boot=2)
        ended(desk)
        assert desk.job().phase is JobPhase.PREPARING, desk.job().reason
    desk.run()
    desk.hello("n1", boot=3)
    ended(desk)
    assert "2 attempts failed in the same way" in desk.job().reason, (
        "one host again and again is waited for"
    )


def test_a_job_that_has_left_the_broken_node_begins_at_once() -> None:
    desk = Desk("n1", "n2", "n3", "n4")
    desk.submit(max_restarts_without_progress=50, max_restarts=50)
    assert fails_alike(desk, 5) == pytest.approx(8.0)
    rest(desk, 8.0)
    desk.run()
    desk.crash(desk.job().slots[0].node)
    ended(desk)
    assert desk.job().phase is JobPhase.PREPARING, desk.job().reason
    # It is no news about the job's own failure, which still waits longer each time.
    assert fails_alike(desk, 1) == pytest.approx(16.0)


def test_an_evicted_node_makes_no_job_wait() -> None:
    desk = Desk("n1", "n2", "n3", "n4")
    desk.submit(max_restarts_without_progress=50, max_restarts=50)
    assert fails_alike(desk, 4) == pytest.approx(4.0)
    rest(desk, 4.0)
    desk.run()
    lost = desk.job().slots[0].node
    desk.feed(EvictRequested(desk.now_s, lost, "me", "it smells", now=True))
    ended(desk)
    assert desk.job().phase is JobPhase.PREPARING, desk.job().reason


def test_a_job_that_backs_off_says_so() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit(max_restarts_without_progress=50)
    for _ in range(3):
        desk.run()
        desk.fail("n1", exited(0, desk.now_s, -11, error="ValueError: mine"))
        for slot in desk.job().slots:
            desk.report(slot.node, AttemptPhase.IDLE)
        if desk.job().phase is JobPhase.QUEUED:
            assert "the next attempt begins in" in desk.job().reason, desk.job().reason
            rest(desk, 10.0)


def test_the_same_failure_on_different_nodes_is_software_and_evicts_none_of_them() -> None:
    desk = Desk("n1", "n2", "n3", "n4")
    desk.submit(max_restarts_without_progress=7)
    error = "RuntimeError: shapes (4, {}) and (5, 8) cannot be multiplied at 0x7f{}a0"
    for number in range(8):
        desk.run()
        node = desk.job().slots[number % 2].node
        rank = desk.job().slots[number % 2].ranks[0]
        desk.fail(node, exited(rank, desk.now_s, 1, error=error.format(number, number)))
        desk.stop()
        rest(desk, 70.0)
    job = desk.job()
    assert job.phase is JobPhase.FAILED and job.evicted == ()
    assert "the same on nodes n1, n2" in job.reason and "software" in job.reason
    said = [line for line in desk.audit if line.reason == "SOFTWARE_SUSPECTED"]
    assert len(said) == 1 and "n1, n2" in said[0].message
    assert {n.disposition for n in desk.state.nodes.values()} == {Disposition.SCHEDULABLE}

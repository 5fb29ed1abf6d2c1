"""Attempts never overlap on a live node, and committed steps go back only by an order."""

from __future__ import annotations

from tests.harness.desk import POLICY, Desk, exited, job_with
from tests.harness.simulated_cluster import demo_job

from megascale_driver.core.values.cluster import AttemptPhase, Progress
from megascale_driver.core.values.events import AttemptOpened, JobSubmitted
from megascale_driver.core.values.job import JobPhase
from megascale_job.restore import RestorePlan, RestoreSource


def desk_of(*nodes: str) -> Desk:
    desk = Desk(*nodes)
    desk.submit()
    desk.run()
    return desk


def beat(desk: Desk, seconds: float, disobedient: str) -> None:
    """Time passes; one node keeps running attempt 1, the others are idle."""
    until_s = desk.now_s + seconds
    while desk.now_s < until_s:
        desk.wait(2.5)
        for name, node in desk.state.nodes.items():
            if name == disobedient:
                desk.report(name, AttemptPhase.RUNNING, job="a", attempt=1)
            elif node.report is not None and node.report.phase is AttemptPhase.IDLE:
                desk.report(name, AttemptPhase.IDLE)


def test_no_attempt_opens_while_a_live_node_still_runs_the_last_one() -> None:
    desk = desk_of("n1", "n2", "n3")
    desk.fail("n2", exited(5, desk.now_s, -11))
    desk.report("n2", AttemptPhase.IDLE)
    beat(desk, POLICY.stop_timeout_s + 10.0, "n1")
    assert (desk.job().attempt, desk.job().phase) == (1, JobPhase.STOPPING)
    assert "n1" in desk.job().reason, "an operator sees what it waits for"
    beat(desk, POLICY.fence_timeout_s, "n1")
    assert desk.disposition("n1") == "QUARANTINED", "a node that does not obey gets no work"
    assert desk.job().attempt == 2 and "n1" not in [slot.node for slot in desk.job().slots]
    lines = [line for line in desk.audit if line.reason == "NODE_EVICTED"]
    assert lines[-1].policy == "stop-deadline" and "attempt 1" in lines[-1].message


def test_a_node_that_stops_late_is_waited_for_and_stays_in_service() -> None:
    desk = desk_of("n1", "n2", "n3")
    desk.fail("n2", exited(5, desk.now_s, -11))
    desk.report("n2", AttemptPhase.IDLE)
    beat(desk, POLICY.stop_timeout_s + 10.0, "n1")
    desk.report("n1", AttemptPhase.IDLE)
    assert desk.disposition("n1") == "SCHEDULABLE" and desk.job().attempt == 2
    assert [slot.node for slot in desk.job().slots] == ["n1", "n2"]


def opening(committed: int) -> Desk:
    """Attempt 2 of a job whose newest commit the driver knows, with its committer called."""
    desk = Desk("n1", "n2", "n3")
    desk.feed(JobSubmitted(desk.now_s, demo_job("a", spares=0), "me"))
    for slot in desk.job().slots:
        desk.report(slot.node, AttemptPhase.PREPARED)
    desk.feed(AttemptOpened(desk.now_s, "a", 1, RestorePlan(), "n1:2"))
    progress = (Progress("a", (), committed, 1, "m"),)
    for phase in (AttemptPhase.RUNNING, AttemptPhase.RUNNING):
        for slot in desk.job().slots:
            desk.report(slot.node, phase, progress=progress)
    assert desk.job().committed_step == committed
    desk.fail("n2", exited(5, desk.now_s, -11))
    desk.stop()
    for slot in desk.job().slots:
        desk.report(slot.node, AttemptPhase.PREPARED)
    assert (desk.job().attempt, desk.job().phase) == (2, JobPhase.PREPARING)
    return desk


def test_a_storage_that_went_back_is_not_believed() -> None:
    """A folder from a backup, or another mount: the job would train its steps a second time."""
    for restore in (RestorePlan(RestoreSource.STORAGE, 20, 1, "m"), RestorePlan()):
        desk = opening(40)
        desk.feed(AttemptOpened(desk.now_s, "a", 2, restore, "n1:2"))
        desk.wait(0.1)
        job = desk.job()
        assert job.phase is JobPhase.STOPPING and job.committed_step == 40
        assert "step 40 was complete" in job.stop_reason
        assert f"megascale restart a --from-step {restore.step}" in job.stop_reason
        desk.stop()
        assert desk.job().slots[0].node == "n3", "it may be the mount of this one node"


def test_a_step_back_with_a_reason_is_believed() -> None:
    desk = opening(40)
    older = RestorePlan(RestoreSource.STORAGE, 20, 1, "m")
    refused = ("step 40: shard 3 is damaged",)
    desk.feed(AttemptOpened(desk.now_s, "a", 2, older, "n1:2", refused))
    assert desk.job().phase is JobPhase.STARTING
    desk = opening(40)
    desk.state = type(desk.state)(
        nodes=desk.state.nodes,
        jobs={"a": job_with(desk.job(), refused_steps=(40,))},
        log_seq=desk.state.log_seq,
    )
    desk.feed(AttemptOpened(desk.now_s, "a", 2, older, "n1:2"))
    assert desk.job().phase is JobPhase.STARTING


def test_a_newer_state_in_memory_is_believed() -> None:
    desk = opening(40)
    desk.feed(AttemptOpened(desk.now_s, "a", 2, RestorePlan(RestoreSource.MEMORY, 45, 1), "n1:2"))
    assert desk.job().phase is JobPhase.STARTING

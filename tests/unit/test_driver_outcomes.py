"""Failures that the job itself causes: it ends at once, or is retried, and the reason names why."""

from __future__ import annotations

import pytest
from tests.harness.desk import Desk, exited
from tests.harness.simulated_cluster import demo_job

from megascale_driver.core.values.cluster import AttemptPhase
from megascale_driver.core.values.events import JobSubmitted, OpenAttempt, OpenFailed, Tick
from megascale_driver.core.values.job import JobPhase

KILLED = "killed by the kernel's out-of-memory killer (cgroup limit 2.0 GiB)"


@pytest.fixture
def desk() -> Desk:
    """Two nodes that run job ``a``, attempt 1, and a third that is free."""
    desk = Desk("n1", "n2", "n3")
    desk.submit()
    desk.run()
    return desk


def advance(desk: Desk, step: int) -> None:
    """A step record of the current attempt arrives."""
    desk.now_s += 1.0
    desk.feed(Tick(desk.now_s, (("a", desk.job().attempt, step),)))


def fail_everywhere(desk: Desk, kind: str, error: str, status: int = 1) -> None:
    """Rank 0 fails with ``kind``, the ranks of the other node are victims, and all stop."""
    first, second = (slot.node for slot in desk.job().slots)
    desk.fail(first, exited(0, desk.now_s + 0.1, status, kind, error))
    desk.fail(second, exited(4, desk.now_s + 0.2, 1, "COLLECTIVE", "peer closed"))
    desk.stop()


def opening() -> Desk:
    """Job ``a`` with checkpoints, whose committer has been called."""
    desk = Desk("n1", "n2", "n3")
    desk.feed(JobSubmitted(desk.now_s, demo_job("a", spares=0), "me"))
    for slot in desk.job().slots:
        desk.report(slot.node, AttemptPhase.PREPARED)
    assert isinstance(desk.effects[-1], OpenAttempt)
    return desk


def test_a_committer_that_refuses_ends_the_job_at_its_first_attempt() -> None:
    desk = opening()
    why = "checkpoint.uri: the folder belongs to job b: give a a checkpoint.uri of its own"
    desk.feed(OpenFailed(desk.now_s, "a", 1, why, refused=True))
    desk.stop()
    job = desk.job()
    assert (job.phase, job.attempt, job.restarts) == (JobPhase.FAILED, 1, 0)
    assert why in job.reason


def test_a_job_goes_on_behind_the_attempts_that_were_opened_elsewhere() -> None:
    desk = opening()
    desk.feed(OpenFailed(desk.now_s, "a", 1, "superseded", newest=3))
    desk.stop()
    desk.wait(1.0)
    job = desk.job()
    assert (job.phase, job.attempt, job.restarts) == (JobPhase.PREPARING, 4, 0)
    assert not job.evicted
    assert "attempt 3 was opened elsewhere" in job.stop_reason
    # A number that no log reaches is none to go on behind.
    for slot in job.slots:
        desk.report(slot.node, AttemptPhase.PREPARED)
    desk.feed(OpenFailed(desk.now_s, "a", 4, "superseded", newest=10**9))
    desk.feed(OpenFailed(desk.now_s, "a", 4, "superseded", newest=2))
    assert (desk.job().phase, desk.job().opened_elsewhere) == (JobPhase.PREPARING, 3)


def test_a_job_that_ran_before_leaves_the_node_that_ran_out_of_memory_twice(desk: Desk) -> None:
    advance(desk, 7)
    fail_everywhere(desk, "OUT_OF_MEMORY", KILLED, -9)
    desk.run()
    fail_everywhere(desk, "OUT_OF_MEMORY", KILLED, -9)
    job = desk.job()
    assert (job.phase, job.evicted) == (JobPhase.PREPARING, ("n1",))
    assert sorted(slot.node for slot in job.slots) == ["n2", "n3"]
    assert desk.disposition("n1") == "SCHEDULABLE"

"""Suspend, resume, preempt, delete, on the driver's core: state is saved before nodes are left."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.harness.desk import POLICY, exited
from tests.harness.fleet import Fleet

from megascale_driver.core import machine
from megascale_driver.core.nodes.departures import ORDER_S
from megascale_driver.core.orders import orders
from megascale_driver.core.values.cluster import AttemptPhase, Cluster, desired_of
from megascale_driver.core.values.events import (
    CancelRequested,
    DeleteRequested,
    DrainRequested,
    LeaderStarted,
    ResumeRequested,
    SuspendRequested,
    Tick,
)
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.journal import codec


class Yard(Fleet):
    """A fleet with the orders of this file."""

    policy = POLICY

    def ask(self, event: Any) -> Any:
        return machine.step(self.state, event, self.policy)

    def suspend(self, name: str) -> str:
        return self.feed(SuspendRequested(self.now_s, name, "maintenance", "ada"))

    def resume(self, name: str) -> str:
        return self.feed(ResumeRequested(self.now_s, name, "done", "ada"))

    def delete(self, name: str) -> str:
        return self.feed(DeleteRequested(self.now_s, name, "tidy", "ada"))

    def ordered(self, name: str) -> str:
        """The order to save and end that the job's nodes have."""
        found = {
            desired_of(self.state.nodes[node], self.job(name)).leave for node in self.nodes_of(name)
        }
        assert len(found) == 1
        return found.pop()

    def save(self, name: str, step: int) -> None:
        """The workers have saved this step, and ended."""
        progress = self.committed(name, step)
        self.all_report(name, AttemptPhase.FINISHED, finished_step=step, progress=progress)
        self.idle(name)
        self.wait(0.25)

    def said(self, name: str, reason: str) -> list[str]:
        return [each.message for each in self.audit if each.log == name and each.reason == reason]


def test_a_suspended_job_saves_then_frees_its_nodes_and_resumes_from_there() -> None:
    fleet = Yard("n0", "n1", "n2")
    fleet.add("a", 2, spares=1)
    fleet.start("a")
    assert not fleet.suspend("a")
    assert fleet.job("a").phase is JobPhase.RUNNING and fleet.ordered("a"), "it saves first"
    assert fleet.job("a").spares == ()
    fleet.save("a", 7)
    job = fleet.job("a")
    assert (job.phase, job.committed_step) == (JobPhase.SUSPENDED, 7)
    assert job.reason == "suspended by ada: maintenance; step 7 is saved"
    fleet.add("b", 3)
    fleet.wait(0.25)
    assert fleet.job("b").phase is JobPhase.PREPARING, "all nodes are free"
    for _ in range(3):
        fleet.beat()
    assert fleet.job("a").phase is JobPhase.SUSPENDED
    fleet.start("b")
    fleet.all_report("b", AttemptPhase.FINISHED, progress=fleet.committed("b", 100_000))
    for node in fleet.nodes_of("b"):
        fleet.report(node, AttemptPhase.IDLE)
    assert not fleet.resume("a")
    fleet.wait(0.25)
    fleet.start("a")
    restore = fleet.job("a").current.restore
    assert restore is not None and restore.step == 7
    assert not fleet.ordered("a"), "the order was for the attempt before"
    assert (fleet.job("a").restarts, fleet.job("a").goodput.faults) == (0, 0)


def test_a_job_without_checkpoints_is_not_suspended_while_it_runs() -> None:
    fleet = Yard("n0")
    fleet.add("a", saves=False)
    fleet.start("a")
    assert fleet.suspend("a") == "JOB_CANNOT_SAVE"
    assert "would be lost" in orders.suspend_refusal(fleet.job("a"))[1]
    assert fleet.job("a").phase is JobPhase.RUNNING and not fleet.ordered("a")


def test_what_has_nothing_to_save_is_suspended_at_once() -> None:
    fleet = Yard("n0")
    fleet.add("queued", 5)
    fleet.suspend("queued")
    assert fleet.job("queued").phase is JobPhase.SUSPENDED
    fleet.add("a")
    assert fleet.job("a").phase is JobPhase.PREPARING
    fleet.suspend("a")
    assert fleet.job("a").phase is JobPhase.STOPPING
    fleet.idle("a")
    assert fleet.job("a").phase is JobPhase.SUSPENDED
    fleet.suspend("a")
    assert len(fleet.said("a", "SUSPEND_REQUESTED")) == 1, "repeated, it changes nothing"
    assert fleet.feed(CancelRequested(fleet.now_s, "a", "enough", "ada")) == ""
    assert fleet.job("a").phase is JobPhase.CANCELLED
    assert fleet.suspend("a") == fleet.resume("a") == "JOB_ENDED"
    assert fleet.suspend("none") == fleet.resume("none") == fleet.delete("none") == "JOB_NOT_FOUND"


def test_a_fault_while_it_saves_suspends_it_all_the_same() -> None:
    fleet = Yard("n0", "n1")
    fleet.add("a", 2)
    fleet.start("a")
    fleet.suspend("a")
    fleet.fail(fleet.nodes_of("a")[0], exited(0, fleet.now_s))
    fleet.idle("a")
    fleet.wait(0.25)
    assert fleet.job("a").phase is JobPhase.SUSPENDED and fleet.job("a").restarts == 1


def test_a_resume_before_the_stop_keeps_the_job_running_or_starts_it_again() -> None:
    fleet = Yard("n0")
    fleet.add("a")
    fleet.start("a")
    fleet.suspend("a")
    fleet.resume("a")
    assert fleet.job("a").phase is JobPhase.RUNNING and not fleet.ordered("a")
    # The workers had stopped by then.
    fleet.all_report("a", AttemptPhase.FINISHED, finished_step=3, progress=fleet.committed("a", 3))
    assert fleet.job("a").phase is JobPhase.STOPPING
    fleet.idle("a")
    fleet.wait(0.25)
    assert (fleet.job("a").phase, fleet.job("a").attempt) == (JobPhase.PREPARING, 2)
    fleet.suspend("a")
    fleet.resume("a")
    fleet.idle("a")
    fleet.wait(0.25)
    assert (fleet.job("a").phase, fleet.job("a").attempt) == (JobPhase.PREPARING, 3)
    assert fleet.job("a").restarts == 0


def test_a_commit_that_only_a_worker_saw_counts_after_a_while() -> None:
    fleet = Yard("n0")
    fleet.add("a")
    fleet.start("a")
    fleet.suspend("a")
    fleet.all_report("a", AttemptPhase.FINISHED, finished_step=9)
    assert fleet.job("a").phase is JobPhase.RUNNING
    for _ in range(3):
        fleet.beat()
    fleet.idle("a")
    fleet.wait(0.25)
    assert (fleet.job("a").phase, fleet.job("a").committed_step) == (JobPhase.SUSPENDED, 9)


def test_what_cannot_save_trains_on_and_is_left_alone_for_a_while() -> None:
    fleet = Yard("n0")
    fleet.add("low")
    fleet.start("low")
    fleet.add("high", priority=1)
    assert fleet.ordered("low")
    limit_s = fleet.job("low").config.checkpoint.final_timeout_s + ORDER_S
    waited_s = 0.0
    while fleet.ordered("low"):
        fleet.beat()
        waited_s += 5
        assert waited_s <= limit_s + 5
    assert fleet.job("low").phase is JobPhase.RUNNING
    assert "could not save within 420 s" in fleet.said("low", "LEAVE_WITHDRAWN")[0]
    assert "job low is not displaced: it could not save" in fleet.job("high").reason
    for _ in range(int(POLICY.save_again_s / 5) + 1):
        fleet.beat()
    assert fleet.ordered("low"), "asked again"


def test_a_higher_priority_displaces_what_can_save_and_it_comes_back() -> None:
    fleet = Yard("n0", "n1")
    fleet.add("low", 2)
    fleet.start("low")
    fleet.add("high", 1, priority=3)
    assert fleet.job("low").phase is JobPhase.RUNNING and fleet.ordered("low")
    assert fleet.said("low", "PREEMPTION_ORDERED") == [
        "it must leave its nodes: job high of priority 3 needs its nodes"
    ]
    assert "job low of lower priority must save and leave" in fleet.job("high").reason
    fleet.save("low", 12)
    assert fleet.job("high").phase is JobPhase.PREPARING
    low = fleet.job("low")
    assert (low.phase, low.committed_step, low.restarts) == (JobPhase.QUEUED, 12, 0)
    assert "displaced by job high; step 12 is saved" in low.reason
    assert fleet.said("low", "JOB_PREEMPTED") == ["displaced by job high; step 12 is saved"]
    fleet.start("high")
    fleet.all_report("high", AttemptPhase.FINISHED, progress=fleet.committed("high", 100_000))
    for node in fleet.nodes_of("high"):
        fleet.report(node, AttemptPhase.IDLE)
    fleet.wait(0.25)
    fleet.start("low")
    restore = fleet.job("low").current.restore
    assert restore is not None and restore.step == 12


def test_an_order_for_a_job_that_no_longer_waits_is_withdrawn() -> None:
    fleet = Yard("n0")
    fleet.add("low")
    fleet.start("low")
    fleet.add("high", priority=3)
    assert fleet.ordered("low")
    fleet.feed(CancelRequested(fleet.now_s, "high", "enough", "ada"))
    assert not fleet.ordered("low") and fleet.job("low").phase is JobPhase.RUNNING
    assert "job high no longer waits" in fleet.said("low", "LEAVE_WITHDRAWN")[0]


@pytest.mark.parametrize("saves", [False, True])
def test_nobody_is_displaced_who_cannot_save_or_where_it_is_switched_off(saves: bool) -> None:
    fleet = Yard("n0")
    fleet.policy = replace(POLICY, preempt=not saves)
    fleet.add("low", saves=saves)
    fleet.start("low")
    fleet.add("high", priority=3)
    fleet.beat()
    assert not fleet.ordered("low")
    if not saves:
        assert "job low is not displaced: it has no checkpoints" in fleet.job("high").reason


def test_a_quota_bounds_what_a_tenant_holds_and_others_go_on() -> None:
    fleet = Yard("n0", "n1", "n2")
    fleet.policy = replace(POLICY, quotas={"red": 4})
    fleet.add("r1", tenant="red")
    fleet.add("r2", tenant="red")
    fleet.add("huge", 2, tenant="red")
    fleet.add("b1", tenant="blue")
    fleet.wait(0.25)
    phases = {name: fleet.job(name).phase for name in ("r1", "r2", "huge", "b1")}
    assert phases == {
        "r1": JobPhase.PREPARING, "r2": JobPhase.QUEUED, "huge": JobPhase.QUEUED,
        "b1": JobPhase.PREPARING,
    }  # fmt: skip
    assert "tenant red has a quota of 4 devices: 4 are in use" in fleet.job("r2").reason
    assert "the quota of tenant red is 4 devices" in fleet.job("huge").reason
    fleet.beat()
    (line,) = fleet.said("r2", "JOB_WAITS")
    assert "tenant red has a quota" in line, "the audit log says why it waits, once"


def test_an_order_to_leave_survives_a_change_of_leader() -> None:
    fleet = Yard("n0")
    fleet.add("a")
    fleet.start("a")
    fleet.suspend("a")
    job = fleet.job("a")
    stored = codec.load(Job, codec.dump(job), config=job.config, attempts=job.attempts)
    assert stored.current.leaving == job.current.leaving
    fleet.state = Cluster(nodes=fleet.state.nodes, jobs={"a": stored})
    fleet.feed(LeaderStarted(fleet.now_s, "there"))
    fleet.hello("n0")
    assert fleet.ordered("a")
    fleet.save("a", 5)
    assert fleet.job("a").phase is JobPhase.SUSPENDED


def test_only_an_ended_job_is_deleted_and_its_name_is_free() -> None:
    fleet = Yard("n0")
    fleet.add("a")
    assert fleet.delete("a") == "JOB_NOT_ENDED"
    fleet.feed(CancelRequested(fleet.now_s, "a", "enough", "ada"))
    fleet.idle("a")
    assert fleet.job("a").phase is JobPhase.CANCELLED
    assert fleet.delete("a") == "" and "a" not in fleet.state.jobs
    line = fleet.audit[-1]
    assert (line.log, line.reason, line.subject) == ("", "JOB_DELETED", "jobs/a")
    assert line.outcome.endswith("its checkpoints stay in /checkpoints/a")
    assert fleet.add("a") == ""


def test_ended_jobs_are_deleted_by_number_and_by_age_the_oldest_first() -> None:
    fleet = Yard("n0")
    fleet.policy = replace(POLICY, keep_ended_jobs=3, keep_ended_s=1000.0)
    for number in range(9):
        fleet.add(f"j{number}", 9)
        fleet.feed(CancelRequested(fleet.now_s, f"j{number}", "enough", "ada"))
        fleet.now_s += 10
    for _ in range(3):
        fleet.feed(Tick(fleet.now_s))
    assert list(fleet.state.jobs) == ["j6", "j7", "j8"]
    fleet.add("queued", 9)
    fleet.now_s += 2000
    fleet.feed(Tick(fleet.now_s))
    assert list(fleet.state.jobs) == ["queued"], "what has not ended stays"


def test_the_defaults_displace_and_keep_a_thousand_jobs_for_a_month() -> None:
    policy = Policy()
    assert policy.preempt and not policy.quotas
    assert (policy.keep_ended_jobs, policy.keep_ended_s) == (1000, 30 * 86_400)


def not_saved(fleet: Yard, name: str, problem: str, order: str = "") -> None:
    """The workers of the job's first node report that the order failed; they train on."""
    (first, *_) = fleet.nodes_of(name)
    failed = (order or fleet.ordered(name), problem)
    fleet.report(first, AttemptPhase.RUNNING, leave_failed=failed)


def test_a_drain_goes_on_at_once_when_the_save_fails() -> None:
    fleet = Yard("n0", "n1", "n2")
    fleet.add("a", 2)
    fleet.start("a")
    fleet.feed(DrainRequested(fleet.now_s, "n1", "new firmware", "ada"))
    not_saved(fleet, "a", "No space left on device")
    job = fleet.job("a")
    assert job.phase is JobPhase.STOPPING
    assert job.stop_reason == "new firmware; it could not save: No space left on device"
    fleet.idle("a")
    assert set(fleet.nodes_of("a")) == {"n0", "n2"}
    assert fleet.state.nodes["n1"].disposition.value == "QUARANTINED"

"""Orders of operators: restart, drain, evict, update, rules, breaker; what each one leads to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.harness.desk import Desk, exited, job_with
from tests.harness.simulated_cluster import demo_job

from megascale_driver.core.checkpoints.replicas import sealed_everywhere
from megascale_driver.core.values.attempt import LeaveKind
from megascale_driver.core.values.cluster import (
    AttemptPhase,
    Check,
    Liveness,
    Progress,
    SealedSnapshot,
)
from megascale_driver.core.values.events import (
    AttemptOpened,
    BreakerResetRequested,
    DrainRequested,
    EvictRequested,
    JobSubmitted,
    LeaderStarted,
    OpenAttempt,
    PolicyRequested,
    RequestKey,
    RestartRequested,
    ResumeRequested,
    SuspendRequested,
    UncordonRequested,
    UpdateRequested,
)
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.journal import codec
from megascale_job.config import CheckpointConfig
from megascale_job.restore import RestorePlan, RestoreSource


def saving_desk(*nodes: str) -> Desk:
    """Nodes of which two run job ``a`` with checkpoints; step 40 of it is committed."""
    desk = Desk(*(nodes or ("n1", "n2", "n3")))
    desk.feed(JobSubmitted(desk.now_s, demo_job("a"), "me"))
    for slot in desk.job().slots:
        desk.report(slot.node, AttemptPhase.PREPARED)
    desk.feed(AttemptOpened(desk.now_s, "a", 1, RestorePlan(), "n1:2"))
    for _ in range(2):
        for slot in desk.job().slots:
            desk.report(slot.node, AttemptPhase.RUNNING, progress=(Progress("a", (), 40, 1, "m"),))
    assert (desk.job().phase, desk.job().committed_step) == (JobPhase.RUNNING, 40)
    return desk


def saved(desk: Desk, step: int) -> None:
    """The workers have saved after ``step`` and ended, and then all is idle."""
    progress = (Progress("a", (), step, desk.job().attempt, "m"),)
    for slot in desk.job().slots:
        desk.report(slot.node, AttemptPhase.FINISHED, finished_step=step, progress=progress)
    desk.stop()


def restart(desk: Desk, **options: object) -> str:
    return desk.feed(RestartRequested(desk.now_s, "a", "new driver", "ada", **options))  # type: ignore[arg-type]


def test_a_running_job_saves_before_it_is_restarted_and_pays_nothing_for_it() -> None:
    desk = saving_desk()
    assert restart(desk) == ""
    order = desk.job().current.leaving
    assert order is not None and order.kind is LeaveKind.RESTART
    assert all(desk.state.nodes[slot.node].desired.leave for slot in desk.job().slots)
    assert desk.job().phase is JobPhase.RUNNING
    saved(desk, 47)
    job = desk.job()
    assert (job.phase, job.attempt, job.restarts) == (JobPhase.PREPARING, 2, 0)
    assert [slot.node for slot in job.slots] == ["n1", "n2"] and job.spares == ("n3",)
    assert "RESTART_REQUESTED" in desk.reasons() and job.committed_step == 47


def test_a_restart_now_stops_at_once() -> None:
    desk = saving_desk()
    restart(desk, now=True)
    assert desk.job().phase is JobPhase.STOPPING
    desk.stop()
    assert (desk.job().attempt, desk.job().restarts) == (2, 0)


def test_a_job_that_cannot_save_in_time_is_restarted_all_the_same() -> None:
    desk = saving_desk()
    restart(desk)
    for _ in range(200):
        desk.wait(5.0)
        for name in desk.state.nodes:
            desk.hello(name)
        if desk.job().phase is not JobPhase.RUNNING:
            break
    assert desk.job().phase is JobPhase.STOPPING and "could not save" in desk.job().stop_reason


def failed_desk() -> Desk:
    desk = Desk("n1", "n2", "n3")
    desk.submit(max_restarts=0)
    desk.run()
    desk.fail("n1", exited(0, desk.now_s, error="ValueError: mine"))
    desk.stop()
    assert desk.job().phase is JobPhase.FAILED
    return desk


def test_a_failed_job_is_restarted_with_its_budgets_anew() -> None:
    desk = failed_desk()
    assert restart(desk) == ""
    job = desk.job()
    assert (job.phase, job.attempt) == (JobPhase.PREPARING, 2)
    assert not job.restart_times and not job.node_failures and job.restarts == 1
    desk.run()
    assert desk.job().phase is JobPhase.RUNNING


def test_a_job_that_has_succeeded_is_restarted_only_from_a_step() -> None:
    desk = saving_desk()
    desk.state = replace(
        desk.state, jobs={"a": replace(desk.job(), phase=JobPhase.SUCCEEDED, spares=())}
    )
    assert restart(desk) == "JOB_ENDED"
    assert desk.feed(RestartRequested(desk.now_s, "zz", "x", "ada")) == "JOB_NOT_FOUND"
    assert restart(desk, from_step=20, later_steps=(30, 40)) == ""


def back_to_20() -> Desk:
    desk = saving_desk()
    desk.feed(EvictRequested(desk.now_s, "n3", "not for this test", "me"))
    assert restart(desk, from_step=20, later_steps=(30, 40)) == ""
    assert desk.job().phase is JobPhase.STOPPING, "what it would save now is not wanted"
    desk.stop()
    sealed = tuple(SealedSnapshot(rank, 1, step, "d") for rank in range(8) for step in (20, 41))
    for slot in desk.job().slots:
        desk.report(slot.node, AttemptPhase.PREPARED, progress=(Progress("a", sealed),))
    return desk


def test_a_restart_from_a_step_refuses_all_that_came_after_it() -> None:
    desk = back_to_20()
    asked = [effect for effect in desk.effects if isinstance(effect, OpenAttempt)][-1]
    assert (asked.attempt, asked.refused_steps) == (2, (30, 40))
    assert (asked.sealed_step, asked.sealed_by_attempt) == (20, 1), "not step 41 of attempt 1"
    assert (desk.job().committed_step, desk.job().best_step) == (20, 20)
    newer = RestorePlan(RestoreSource.STORAGE, 40, 1, "m")
    desk.feed(AttemptOpened(desk.now_s, "a", 2, newer, "n1:2"))
    assert "go back to step 20" in desk.job().current.faults[0].message


def test_a_checkpoint_that_was_committed_after_the_order_is_refused_and_no_fault() -> None:
    desk = back_to_20()
    late = RestorePlan(RestoreSource.STORAGE, 50, 1, "m")
    desk.feed(AttemptOpened(desk.now_s, "a", 2, late, "n1:2"))
    assert desk.job().phase is JobPhase.STOPPING and not desk.job().current.faults
    desk.stop()
    for slot in desk.job().slots:
        desk.report(slot.node, AttemptPhase.PREPARED)
    asked = [effect for effect in desk.effects if isinstance(effect, OpenAttempt)][-1]
    assert (asked.attempt, asked.refused_steps) == (3, (30, 40, 50))


def test_a_step_that_an_earlier_order_gave_up_can_be_named_again() -> None:
    desk = back_to_20()
    desk.feed(
        AttemptOpened(desk.now_s, "a", 2, RestorePlan(RestoreSource.STORAGE, 20, 1, "m"), "n1:2")
    )
    assert restart(desk, from_step=40, from_attempt=1, later_steps=()) == ""
    job = desk.job()
    assert not job.abandoned(40, 1) and job.abandoned(41, 1) and job.abandoned(41, 2)
    assert 40 not in job.refused_steps
    desk.stop()
    for slot in desk.job().slots:
        desk.report(slot.node, AttemptPhase.PREPARED)
    desk.feed(
        AttemptOpened(desk.now_s, "a", 3, RestorePlan(RestoreSource.STORAGE, 40, 1, "m"), "n1:2")
    )
    assert desk.job().phase is JobPhase.STARTING and not desk.job().current.faults


def test_what_old_attempts_wrote_stays_abandoned_after_the_restart_and_a_new_leader() -> None:
    desk = back_to_20()
    desk.feed(
        AttemptOpened(desk.now_s, "a", 2, RestorePlan(RestoreSource.STORAGE, 20, 1, "m"), "n1:2")
    )
    job = desk.job()
    desk.state = replace(
        desk.state,
        jobs={"a": codec.load(Job, codec.dump(job), config=job.config, attempts=job.attempts)},
    )
    desk.feed(LeaderStarted(desk.now_s, "next"))
    desk.hello("n1"), desk.hello("n2")
    desk.report("n1", AttemptPhase.RUNNING, progress=(Progress("a", (), 40, 1, "old"),))
    assert desk.job().committed_step == 20, "a heartbeat of the past is not believed"
    desk.report("n1", AttemptPhase.RUNNING, progress=(Progress("a", (), 25, 2, "new"),))
    assert desk.job().committed_step == 25
    held = job_with(desk.job(), number=3)
    assert sealed_everywhere(held, desk.state.nodes) in ((0, 0), (20, 1))


def test_a_drained_node_is_left_after_a_save_and_gets_no_work() -> None:
    desk = saving_desk()
    desk.feed(DrainRequested(desk.now_s, "n2", "new firmware", "ada"))
    assert desk.disposition("n2") == "DRAINING" and desk.job().phase is JobPhase.RUNNING
    assert desk.state.nodes["n2"].desired.leave
    saved(desk, 52)
    job = desk.job()
    assert desk.disposition("n2") == "QUARANTINED" and (job.restarts, job.attempt) == (0, 2)
    assert [slot.node for slot in job.slots] == ["n1", "n3"] and job.committed_step == 52
    assert desk.state.nodes["n2"].disposition_reason == "new firmware"
    assert not desk.state.breaker.evictions


def test_two_nodes_of_a_job_are_drained_with_one_save() -> None:
    desk = saving_desk("n1", "n2", "n3", "n4")
    desk.feed(DrainRequested(desk.now_s, "n1", "rack move", "ada"))
    leave = desk.state.nodes["n2"].desired.leave
    desk.feed(DrainRequested(desk.now_s, "n2", "rack move", "ada"))
    assert desk.state.nodes["n2"].desired.leave == leave
    saved(desk, 52)
    assert [slot.node for slot in desk.job().slots] == ["n3", "n4"]
    assert {desk.disposition("n1"), desk.disposition("n2")} == {"QUARANTINED"}


def test_an_eviction_saves_first_and_an_eviction_now_does_not() -> None:
    for now in (False, True):
        desk = saving_desk()
        desk.feed(EvictRequested(desk.now_s, "n2", "bad fan", "ada", now=now))
        assert desk.disposition("n2") == ("QUARANTINED" if now else "DRAINING")
        assert desk.job().phase is (JobPhase.STOPPING if now else JobPhase.RUNNING)


def test_a_node_without_a_job_that_can_save_is_emptied_at_once() -> None:
    desk = saving_desk()
    desk.feed(DrainRequested(desk.now_s, "n3", "idle anyway", "ada"))
    assert desk.disposition("n3") == "QUARANTINED"
    assert desk.feed(DrainRequested(desk.now_s, "zz", "x", "ada")) == "NODE_NOT_FOUND"
    desk = Desk("n1", "n2")
    desk.submit()
    desk.run()
    desk.feed(DrainRequested(desk.now_s, "n2", "no checkpoints", "ada"))
    assert desk.disposition("n2") == "QUARANTINED" and desk.job().phase is JobPhase.STOPPING


def test_an_uncordon_withdraws_the_order_to_leave_a_draining_node() -> None:
    desk = saving_desk()
    desk.feed(DrainRequested(desk.now_s, "n2", "bad fan", "ada"))
    assert desk.state.nodes["n1"].desired.leave
    desk.feed(UncordonRequested(desk.now_s, "n2", "the wrong node", "ada"))
    job = desk.job()
    assert (job.phase, job.current.leaving) == (JobPhase.RUNNING, None), job.reason
    assert not desk.state.nodes["n1"].desired.leave and desk.disposition("n2") == "SCHEDULABLE"
    assert desk.reasons()[-2:] == ["NODE_UNCORDONED", "LEAVE_WITHDRAWN"]


def test_an_order_that_is_withdrawn_after_the_workers_have_ended_displaces_nobody() -> None:
    """Found by a seed: the log said that the job was displaced, and by nobody."""
    desk = saving_desk()
    desk.feed(DrainRequested(desk.now_s, "n2", "bad fan", "ada"))
    desk.feed(UncordonRequested(desk.now_s, "n2", "the wrong node", "ada"))
    saved(desk, 52)
    desk.stop()
    assert "JOB_PREEMPTED" not in desk.reasons()
    job = desk.job()
    assert job.attempt == 2 and {slot.node for slot in job.slots} == {"n1", "n2"}


def test_an_order_to_leave_stands_while_another_node_is_emptied_or_it_was_given_before() -> None:
    desk = saving_desk("n1", "n2", "n3", "n4")
    for name in ("n1", "n2"):
        desk.feed(DrainRequested(desk.now_s, name, "rack move", "ada"))
    desk.feed(UncordonRequested(desk.now_s, "n2", "not this one", "ada"))
    order = desk.job().current.leaving
    assert order is not None and order.nodes == ("n1",)
    saved(desk, 52)
    assert (desk.disposition("n1"), desk.disposition("n2")) == ("QUARANTINED", "SCHEDULABLE")
    desk = saving_desk()
    restart(desk)
    desk.feed(DrainRequested(desk.now_s, "n2", "bad fan", "ada"))
    desk.feed(UncordonRequested(desk.now_s, "n2", "the wrong node", "ada"))
    order = desk.job().current.leaving
    assert order is not None and (order.kind, order.nodes) == (LeaveKind.RESTART, ())


def test_a_restart_asked_for_while_a_node_is_emptied_outlives_the_uncordon() -> None:
    desk = saving_desk()
    desk.feed(DrainRequested(desk.now_s, "n2", "bad fan", "ada"))
    restart(desk)
    desk.feed(UncordonRequested(desk.now_s, "n2", "the wrong node", "ada"))
    order = desk.job().current.leaving
    assert order is not None and (order.kind, order.nodes) == (LeaveKind.RESTART, ())


def test_a_resumed_job_still_leaves_a_node_that_is_to_be_emptied() -> None:
    desk = saving_desk()
    desk.feed(DrainRequested(desk.now_s, "n2", "bad fan", "ada"))
    desk.feed(SuspendRequested(desk.now_s, "a", "no power", "ada"))
    desk.feed(ResumeRequested(desk.now_s, "a", "power is back", "ada"))
    order = desk.job().current.leaving
    assert order is not None and (order.kind, order.nodes) == (LeaveKind.DRAIN, ("n2",))
    saved(desk, 52)
    assert desk.disposition("n2") == "QUARANTINED" and desk.job().attempt == 2


def test_a_draining_node_whose_attempt_breaks_is_empty_then() -> None:
    desk = saving_desk()
    desk.feed(DrainRequested(desk.now_s, "n2", "new firmware", "ada"))
    desk.fail("n1", exited(0, desk.now_s, -11))
    desk.stop()
    assert desk.disposition("n2") == "QUARANTINED"
    assert [slot.node for slot in desk.job().slots] == ["n1", "n3"]


def test_a_draining_node_whose_job_succeeds_is_empty_then() -> None:
    desk = saving_desk()
    desk.feed(DrainRequested(desk.now_s, "n2", "new firmware", "ada"))
    steps = desk.job().config.training.steps
    progress = (Progress("a", (), steps, 1, "m"),)
    for slot in desk.job().slots:
        desk.report(slot.node, AttemptPhase.FINISHED, progress=progress)
    assert desk.job().phase is JobPhase.SUCCEEDED and desk.disposition("n2") == "QUARANTINED"


def update(desk: Desk, restart_: bool, steps: int = 777) -> str:
    config = demo_job("a", steps=steps)
    if not desk.job().config.checkpoint.uri:
        config = replace(config, checkpoint=CheckpointConfig())
    return desk.feed(UpdateRequested(desk.now_s, config, restart_, "longer", "ada"))


def test_an_update_waits_for_the_next_attempt() -> None:
    desk = saving_desk()
    assert update(desk, restart_=False) == ""
    job = desk.job()
    assert job.config.training.steps == 100_000 and job.current.leaving is None
    stored = codec.load(Job, codec.dump(job), config=job.config, attempts=job.attempts)
    assert stored.pending_spec == job.pending_spec != ""
    desk.fail("n1", exited(0, desk.now_s, -11))
    desk.stop()
    job = desk.job()
    assert (job.attempt, job.config.training.steps, job.spec_revision) == (2, 777, 2)
    assert job.pending_spec == ""


def test_an_update_with_restart_saves_first() -> None:
    desk = saving_desk()
    assert update(desk, restart_=True) == ""
    assert desk.job().current.leaving is not None
    saved(desk, 50)
    assert (desk.job().attempt, desk.job().config.training.steps) == (2, 777)


def test_a_failed_job_is_corrected_and_restarted() -> None:
    desk = failed_desk()
    assert update(desk, restart_=False) == ""
    assert desk.job().config.training.steps == 777 and desk.job().phase is JobPhase.FAILED
    restart(desk)
    desk.run()
    assert desk.job().phase is JobPhase.RUNNING and desk.job().spec_revision == 2


def set_mode(desk: Desk, rule: str, mode: str = "OBSERVE") -> None:
    assert desk.feed(PolicyRequested(desk.now_s, rule, mode, "being tried", "ada")) == ""


def test_an_observed_self_check_costs_no_quarantine() -> None:
    desk = Desk("n1", "n2", "n3")
    set_mode(desk, "self-check")
    desk.submit()
    desk.report("n1", AttemptPhase.FAILED, checks=(Check("compute", "FAIL", "cpu0", "wrong"),))
    assert desk.disposition("n1") == "SCHEDULABLE" and desk.job().evicted == ("n1",)
    (line,) = [line for line in desk.audit if line.reason == "NODE_EVICTED"]
    assert (line.policy, line.mode) == (
        "self-check",
        "OBSERVE",
    ) and "not quarantined" in line.outcome


def test_an_observed_rule_leaves_no_node_and_says_what_it_would_do() -> None:
    desk = Desk("n1", "n2", "n3")
    set_mode(desk, "repeated-failure")
    desk.submit(max_restarts_without_progress=9)
    for _ in range(3):
        desk.run()
        desk.fail("n2", exited(5, desk.now_s, -11))
        desk.stop()
    lines = [line for line in desk.audit if line.reason == "NODE_EVICTED"]
    assert desk.job().evicted == () and [line.mode for line in lines] == ["OBSERVE"]


@pytest.mark.parametrize("mode", ["OBSERVE", "ENFORCE"])
def test_silence_that_is_observed_kills_no_node(mode: str) -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit()
    desk.run()
    set_mode(desk, "silence", "OBSERVE")
    if mode == "ENFORCE":
        set_mode(desk, "silence", "ENFORCE")
    for _ in range(16):
        desk.wait(5.0)
        desk.report("n1", AttemptPhase.RUNNING)
        desk.report("n3", AttemptPhase.IDLE)
        if desk.liveness("n2") == "DEAD":
            break
    assert desk.liveness("n2") == ("DEAD" if mode == "ENFORCE" else "SUSPECT")


def test_modes_survive_a_change_of_leader() -> None:
    desk = Desk("n1")
    set_mode(desk, "hang")
    stored = codec.load(type(desk.state.breaker), codec.dump(desk.state.breaker))
    assert dict(stored.modes) == {"hang": "OBSERVE"}
    assert [line.reason for line in desk.audit][-1] == "POLICY_SET"


def test_a_reset_of_the_breaker_observes_silent_nodes_anew() -> None:
    desk = Desk(*(f"n{i}" for i in range(1, 13)))
    desk.submit()
    desk.run()
    held = desk.job().slots[1].node  # the breaker protects nodes of jobs alone
    desk.state = replace(
        desk.state,
        breaker=replace(
            desk.state.breaker, tripped_at_s=desk.now_s, evictions=((desk.now_s, "n9"),)
        ),
    )
    for _ in range(14):  # beyond the time after which silence alone is enough
        desk.wait(5.0)
        desk.report("n1", AttemptPhase.RUNNING)
    assert desk.liveness(held) == "SUSPECT"
    desk.feed(BreakerResetRequested(desk.now_s, "the switch is back", "ada"))
    assert not desk.state.breaker.tripped_at_s and not desk.state.breaker.evictions
    line = desk.audit[-1]
    assert (line.reason, line.actor, line.policy) == ("BREAKER_RESET", "ada", "manual")
    for _ in range(4):
        desk.wait(0.25)
        assert desk.liveness(held) == "SUSPECT", "no verdict that was held back is made up for"
    for _ in range(13):
        desk.wait(5.0)
        desk.report("n1", AttemptPhase.RUNNING)
    assert desk.liveness(held) == "DEAD"


def test_a_repeated_request_takes_effect_once() -> None:
    desk = failed_desk()
    request = RestartRequested(desk.now_s, "a", "again", "ada", request=RequestKey("id-1", "d"))
    desk.feed(request)
    desk.run()
    assert desk.feed(request) == "" and desk.job().phase is JobPhase.RUNNING
    assert desk.job().attempt == 2


def test_a_spare_that_is_evicted_while_nodes_still_link_is_a_spare_no_longer() -> None:
    desk = Desk("n1", "n2", "n3", "n4")
    desk.submit(spares=1)
    desk.run()
    (spare,) = desk.job().spares
    late = desk.job().slots[0].node  # has not linked to the new leader
    unknown = replace(desk.state.nodes[late], liveness=Liveness.UNKNOWN, connected=False)
    desk.state = replace(desk.state, nodes={**desk.state.nodes, late: unknown})
    desk.feed(LeaderStarted(desk.now_s, "next"))
    assert desk.job().spares == (spare,)
    desk.feed(EvictRequested(desk.now_s, spare, "bad fan", "ada", now=True))
    assert desk.disposition(spare) == "QUARANTINED" and spare not in desk.job().spares

"""The core, event by event: attempts, blame, budgets, deadlines, requests, explanations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.harness.desk import POLICY, Desk, exited, job_with
from tests.harness.simulated_cluster import demo_job

from megascale_driver.core.checkpoints.replicas import sealed_everywhere
from megascale_driver.core.queue.explain import explain
from megascale_driver.core.values.attempt import Fault, FaultKind
from megascale_driver.core.values.cluster import (
    AttemptPhase,
    Breaker,
    Check,
    DesiredPhase,
    Disposition,
    Liveness,
    PlatformSign,
    Progress,
    Report,
    SealedSnapshot,
    StoppedReport,
    WorkerReport,
)
from megascale_driver.core.values.events import (
    AttemptOpened,
    CancelRequested,
    EvictRequested,
    JobSubmitted,
    LeaderStarted,
    NodeReport,
    OpenAttempt,
    OpenFailed,
    PlatformReport,
    Probe,
    ProbeResult,
    RequestKey,
    StreamReset,
    Tick,
)
from megascale_driver.core.values.job import JobPhase
from megascale_job.restore import RestorePlan, RestoreSource


@pytest.fixture
def desk() -> Desk:
    """Two nodes that run job ``a``, attempt 1, and a third that is free."""
    desk = Desk("n1", "n2", "n3")
    desk.submit()
    desk.run()
    return desk


def test_the_way_to_running_is_prepare_then_start() -> None:
    desk = Desk("n1", "n2")
    desk.submit()
    assert [n.desired.phase for n in desk.state.nodes.values()] == [DesiredPhase.PREPARE] * 2
    desk.report("n1", AttemptPhase.PREPARED)
    assert desk.job().phase is JobPhase.PREPARING
    desk.report("n2", AttemptPhase.PREPARED)
    assert [n.desired.phase for n in desk.state.nodes.values()] == [DesiredPhase.START] * 2
    assert desk.state.nodes["n2"].desired.store_endpoint == "h:9"
    desk.report("n1", AttemptPhase.RUNNING)
    desk.report("n2", AttemptPhase.FINISHED)
    assert desk.job().phase is JobPhase.RUNNING
    desk.report("n1", AttemptPhase.FINISHED)
    assert desk.job().phase is JobPhase.SUCCEEDED
    assert [n.desired.phase for n in desk.state.nodes.values()] == [DesiredPhase.IDLE] * 2


def test_the_earliest_explicit_failure_is_the_culprit_and_peers_show_symptoms(desk: Desk) -> None:
    desk.fail(
        "n1",
        exited(0, 1001.2, kind="COLLECTIVE", error="peer closed"),
        exited(1, 1001.3, -9, "STOPPED"),
    )
    assert desk.job().phase is JobPhase.STOPPING and not desk.job().evicted
    desk.fail(
        "n2",
        exited(5, 1001.5, error="Traceback\nValueError: bad shape"),
        exited(4, 1001.6, -9, "STOPPED"),
    )
    desk.stop()
    assert desk.job().attempt == 2 and desk.job().node_failures == {"n2": 1}
    stopped = next(line for line in desk.audit if line.reason == "ATTEMPT_STOPPED")
    assert stopped.message.endswith("rank 5 on node n2 ended with status 1: ValueError: bad shape")
    outcomes = [line.outcome for line in desk.audit if line.reason == "WORKER_EXITED"]
    assert "symptom" in outcomes[0] and "symptom" not in outcomes[1]


def test_a_failure_that_the_stop_overtook_names_the_culprit_in_the_same_attempt(desk: Desk) -> None:
    """The report of a rank that lost its peer came first, and with it the order to stop."""
    desk.fail("n1", exited(0, 1001.2, kind="COLLECTIVE", error="peer closed"))
    assert desk.job().phase is JobPhase.STOPPING
    before = exited(5, desk.now_s - 0.2, error="ValueError: bad shape")
    desk.report("n1", AttemptPhase.IDLE)
    desk.report("n2", AttemptPhase.IDLE, stopped=StoppedReport("a", 1, workers=(before,)))
    desk.stop(search=False)
    assert desk.job().attempt == 2 and desk.job().node_failures == {"n2": 1}
    assert "GROUP_CHECK_STARTED" not in desk.reasons(), "the culprit is known"
    stopped = next(line for line in desk.audit if line.reason == "ATTEMPT_STOPPED")
    assert stopped.message.endswith("rank 5 on node n2 ended with status 1: ValueError: bad shape")


@pytest.mark.parametrize(
    ("job", "attempt", "at_s", "kind"),
    [
        ("a", 1, 9.0, "OTHER"),  # after the stop: of what it did to the peers
        ("a", 1, -0.2, "COLLECTIVE"),
        ("a", 7, -0.2, "OTHER"),
        ("b", 1, -0.2, "OTHER"),
    ],
)
def test_what_is_no_cause_of_the_stop_blames_nobody(
    desk: Desk, job: str, attempt: int, at_s: float, kind: str
) -> None:
    desk.fail("n1", exited(0, 1001.2, kind="COLLECTIVE", error="peer closed"))
    found = exited(5, desk.now_s + at_s, kind=kind, error="RuntimeError: aborted")
    desk.report("n2", AttemptPhase.IDLE, stopped=StoppedReport(job, attempt, workers=(found,)))
    assert {fault.node for fault in desk.job().current.faults} == {"n1"}
    desk.stop()
    assert desk.job().attempt == 2 and desk.job().node_failures == {}


def test_a_new_leader_blames_nobody_for_what_the_stop_did(desk: Desk) -> None:
    """It does not know when the stop began, only when the first failure was."""
    desk.fail("n1", exited(0, desk.now_s - 0.1, kind="COLLECTIVE", error="peer closed"))
    desk.wait(10.0)
    desk.feed(LeaderStarted(desk.now_s, "there"))
    assert desk.job().phase is JobPhase.STOPPING
    found = exited(5, desk.now_s - 2.0, error="RuntimeError: aborted")
    desk.hello("n2")
    desk.report("n2", AttemptPhase.IDLE, stopped=StoppedReport("a", 1, workers=(found,)))
    assert {fault.node for fault in desk.job().current.faults} == {"n1"}


def test_a_stop_by_order_blames_nobody_for_what_it_does(desk: Desk) -> None:
    desk.feed(CancelRequested(desk.now_s, "a", "me", "enough"))
    found = exited(5, desk.now_s - 0.2, error="RuntimeError: aborted")
    desk.report("n2", AttemptPhase.IDLE, stopped=StoppedReport("a", 1, workers=(found,)))
    desk.stop()
    assert desk.job().phase is JobPhase.CANCELLED and not desk.job().current.faults
    assert "WORKER_EXITED" not in desk.reasons()


def test_a_node_that_dies_while_its_peers_report_symptoms_is_the_culprit(desk: Desk) -> None:
    desk.fail("n1", exited(0, 1001.0, kind="COLLECTIVE", error="peer closed"))
    desk.feed(StreamReset(desk.now_s, "n2", "n2-1"))
    assert isinstance(desk.effects[-1], Probe)
    desk.report("n1", AttemptPhase.IDLE)
    assert desk.job().phase is JobPhase.STOPPING, "whether n2 is gone is not known yet"
    desk.feed(ProbeResult(desk.now_s, "n2", "n2-1", "refused"))
    assert (desk.job().attempt, desk.job().evicted) == (2, ("n2",))
    assert [slot.node for slot in desk.job().slots] == ["n1", "n3"]
    assert desk.job().node_failures == {}


def test_the_next_attempt_waits_until_every_node_has_stopped(desk: Desk) -> None:
    desk.fail("n2", exited(5, 1001.0, -11))
    desk.report("n2", AttemptPhase.IDLE)
    assert desk.job().phase is JobPhase.STOPPING
    stale = desk.state.nodes["n1"]
    report = Report(desired_version=stale.desired_version - 1, phase=AttemptPhase.IDLE)
    desk.feed(NodeReport(desk.now_s, "n1", "n1-1", report))
    assert desk.job().phase is JobPhase.STOPPING, "the report is older than the order to stop"
    for _ in range(4):
        desk.wait(3.0)
        desk.report("n2", AttemptPhase.IDLE)
        desk.report("n3", AttemptPhase.IDLE)
        desk.feed(NodeReport(desk.now_s, "n1", "n1-1", report))
    assert desk.job().phase is JobPhase.STOPPING
    desk.wait(3.0)
    assert desk.job().attempt == 2 and "n1" not in [slot.node for slot in desk.job().slots]
    assert "n1" in desk.job().evicted


def test_a_failed_self_check_quarantines_its_node() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit()
    check = Check("compute", "FAIL", "cpu0", "GEMM gave 4.0 instead of 5.0")
    desk.report("n1", AttemptPhase.FAILED, checks=(check,))
    assert desk.state.nodes["n1"].disposition is Disposition.QUARANTINED
    desk.stop()
    assert [slot.node for slot in desk.job().slots] == ["n3", "n2"]
    assert "self-check compute of node n1 failed" in desk.state.nodes["n1"].disposition_reason
    assert desk.reasons().count("NODE_EVICTED") == 1


ROOM = Check(
    "memory_room", "FAIL", "host", "needs 9000.0 MiB of 4000.0 MiB: give the node fewer ranks"
)


def test_a_job_that_fits_on_no_node_ends_and_costs_no_node() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit()
    desk.report("n1", AttemptPhase.FAILED, checks=(ROOM,))
    desk.report("n2", AttemptPhase.FAILED, checks=(ROOM,))
    desk.stop()
    assert (
        desk.job().phase is JobPhase.FAILED
        and "needs 9000.0 MiB of 4000.0 MiB" in desk.job().reason
    )
    assert {node.disposition for node in desk.state.nodes.values()} == {Disposition.SCHEDULABLE}
    assert not desk.state.breaker.evictions


def test_a_job_that_ran_before_only_leaves_a_node_whose_memory_is_taken(desk: Desk) -> None:
    desk.feed(Tick(desk.now_s, (("a", 1, 7),)))
    desk.fail("n2", exited(5, 1001.0, -11))
    desk.stop()
    desk.report("n2", AttemptPhase.FAILED, checks=(ROOM,))
    desk.stop()
    assert [slot.node for slot in desk.job().slots] == ["n1", "n3"] and desk.job().attempt == 3
    assert desk.state.nodes["n2"].disposition is Disposition.SCHEDULABLE


def test_a_quarantine_by_self_check_ends_with_the_incarnation_that_failed_it() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit()
    desk.report("n1", AttemptPhase.FAILED, checks=(Check("compute", "FAIL", "cpu0", "wrong"), ROOM))
    assert desk.disposition("n1") == "QUARANTINED"
    desk.hello("n1", boot=2)
    assert desk.disposition("n1") == "SCHEDULABLE" and not desk.job().evicted
    desk.feed(EvictRequested(desk.now_s, "n1", "broken fan", "me"))
    desk.hello("n1", boot=3)
    assert desk.disposition("n1") == "QUARANTINED", "an operator quarantined it"


def test_self_checks_that_fail_everywhere_do_not_quarantine_the_fleet() -> None:
    desk = Desk(*(f"n{i}" for i in range(1, 9)))
    desk.submit()
    for _ in range(8):
        if desk.job().active:
            for slot in desk.job().slots:
                desk.report(
                    slot.node,
                    AttemptPhase.FAILED,
                    checks=(Check("compute", "FAIL", "cpu0", "wrong"),),
                )
            desk.stop()
    gone = [n.name for n in desk.state.nodes.values() if n.disposition is Disposition.QUARANTINED]
    assert len(gone) == POLICY.software_checks - 1


@pytest.mark.parametrize(("nodes", "evicted"), [(3, 2), (400, 3)])
def test_of_a_large_fleet_some_nodes_break_alike_by_themselves(nodes: int, evicted: int) -> None:
    """Three devices that are gone within an hour are no software where 400 nodes train."""
    desk = Desk(*(f"n{i}" for i in range(1, nodes + 4)))
    desk.submit(dp=nodes)
    gone = Check("device_present", "FAIL", "GPU-0", "the device does not answer")
    for _ in range(3):
        node = desk.job().slots[1].node
        desk.report(node, AttemptPhase.FAILED, checks=(gone,))
        desk.stop()
    assert len(desk.job().evicted) == evicted, desk.job().evicted
    said = [line for line in desk.audit if line.reason == "SOFTWARE_SUSPECTED"]
    assert bool(said) == (nodes == 3)


@pytest.mark.parametrize(("status", "kind"), [(-11, ""), (0, "OTHER")])
def test_a_rank_that_only_lost_its_peer_is_not_the_culprit_of_its_node(
    desk: Desk, status: int, kind: str
) -> None:
    stopped = exited(6, 1000.9, -9, "STOPPED")
    desk.fail(
        "n2",
        exited(4, 1001.0, kind="COLLECTIVE", error="peer"),
        exited(5, 1001.1, status, kind),
        stopped,
    )
    desk.stop()
    assert desk.job().node_failures == {"n2": 1}
    assert any(
        line.reason == "ATTEMPT_STOPPED" and "rank 5 on node n2" in line.message
        for line in desk.audit
    )


def test_a_damaged_checkpoint_is_refused_and_blames_no_node(desk: Desk) -> None:
    job = desk.job()
    desk.state = replace(
        desk.state,
        jobs={"a": job_with(job, restore=RestorePlan(RestoreSource.STORAGE, 30, 1, "m"))},
    )
    desk.fail(
        "n2",
        exited(5, 1001.0, -9),
        exited(4, 1002.0, kind="CHECKPOINT_CORRUPT", error="shard-4 damaged"),
    )
    desk.stop()
    job = desk.job()
    assert (job.refused_steps, job.node_failures, job.evicted, job.restarts) == ((30,), {}, (), 1)
    assert job.restarts_without_progress == 0 and "CHECKPOINT_REFUSED" in desk.reasons()


def test_an_attempt_that_fell_to_an_older_checkpoint_says_so_and_goes_on(desk: Desk) -> None:
    older = RestorePlan(RestoreSource.STORAGE, 20, 1, "m20", checked=False)
    oldest = replace(older, step=10, manifest_uri="m10")
    plan = RestorePlan(RestoreSource.STORAGE, 30, 1, "m30", older=(older, oldest))
    desk.state = replace(desk.state, jobs={"a": job_with(desk.job(), restore=plan)})
    attempt = desk.job().attempt
    for node in ("n1", "n2"):
        workers = (WorkerReport(0, restored_step=20, restore_problem="step 30: f is damaged"),)
        desk.report(node, AttemptPhase.RUNNING, workers=workers)
    job = desk.job()
    assert job.current.restore == replace(older, older=(oldest,))
    assert (job.attempt, job.refused_steps, job.restarts) == (attempt, (30,), 0)
    (line,) = [line for line in desk.audit if line.reason == "CHECKPOINT_REFUSED"]
    assert "step 30: f is damaged" in line.message
    assert line.outcome == "the same attempt continues from step 20"
    # A step that no plan names changes nothing.
    workers = (WorkerReport(0, restored_step=5, restore_problem="?"),)
    desk.report("n1", AttemptPhase.RUNNING, workers=workers)
    assert desk.job().current.restore == job.current.restore


def test_what_differs_from_the_run_that_wrote_the_checkpoint_is_said_once(desk: Desk) -> None:
    notes = "the learning-rate schedule is another one"
    for _ in range(3):
        workers = (WorkerReport(0, restore_notes=notes), WorkerReport(1, restore_notes=notes))
        desk.report("n1", AttemptPhase.RUNNING, workers=workers)
        desk.report("n2", AttemptPhase.RUNNING, workers=(WorkerReport(4, restore_notes=notes),))
    (line,) = [line for line in desk.audit if line.reason == "RESUME_DIFFERS"]
    assert (line.message, line.subject) == (notes, "jobs/a")


def test_a_job_leaves_a_node_that_fails_repeatedly_and_ends_with_its_budget(desk: Desk) -> None:
    for attempt in range(1, 4):
        desk.fail("n2", exited(5, 1001.0, -11))
        desk.stop()
        assert desk.job().attempt == attempt + 1
        if attempt < 3:
            desk.run()
    assert [slot.node for slot in desk.job().slots] == ["n1", "n3"] and desk.job().evicted == (
        "n2",
    )
    assert desk.state.nodes["n2"].disposition is Disposition.SCHEDULABLE
    limit = desk.job().config.recovery.max_restarts_without_progress
    state = desk.state
    desk.state = replace(state, jobs={"a": replace(desk.job(), restarts_without_progress=limit)})
    desk.run()
    desk.fail("n1", exited(0, 1001.0, error="ValueError: the job's own mistake"))
    desk.stop()
    assert desk.job().phase is JobPhase.FAILED
    assert (
        "max_restarts_without_progress" in desk.job().reason and "own mistake" in desk.job().reason
    )


def test_progress_clears_what_was_counted_in_a_row(desk: Desk) -> None:
    for step in (0, 0, 50):
        desk.feed(Tick(desk.now_s, (("a", desk.job().attempt, step),)))
        desk.fail("n2", exited(5, 1001.0, -11))
        desk.stop()
        desk.run()
    assert (
        desk.job().restarts,
        desk.job().restarts_without_progress,
        desk.job().node_failures,
    ) == (3, 0, {"n2": 1})


@pytest.mark.parametrize(
    ("phase", "limit_s"), [(JobPhase.PREPARING, 300.0), (JobPhase.STARTING, 900.0)]
)
def test_a_phase_that_takes_too_long_names_the_late_nodes(phase: JobPhase, limit_s: float) -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit()
    if phase is JobPhase.STARTING:
        for name in ("n1", "n2"):
            desk.report(name, AttemptPhase.PREPARED)
    ready = AttemptPhase.PREPARED if phase is JobPhase.PREPARING else AttemptPhase.RUNNING
    waited_s = 0.0
    while waited_s < limit_s - 5.0:
        desk.report("n1", ready)
        desk.report(
            "n2", AttemptPhase.PREPARING if phase is JobPhase.PREPARING else AttemptPhase.STARTING
        )
        desk.wait(5.0)
        waited_s += 5.0
    assert desk.job().phase is phase
    desk.wait(5.0)
    assert desk.job().phase is JobPhase.STOPPING
    assert desk.job().stop_reason.endswith("not ready: n2")


def test_if_all_nodes_are_late_none_is_blamed() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit()
    for _ in range(61):
        desk.report("n1", AttemptPhase.PREPARING)
        desk.report("n2", AttemptPhase.PREPARING)
        desk.wait(5.0)
    assert desk.job().stop_reason.endswith("not ready: n1, n2")
    desk.stop()
    assert desk.job().node_failures == {} and desk.job().restarts == 1


def test_a_node_that_answers_but_never_links_is_given_up(desk: Desk) -> None:
    desk.feed(StreamReset(desk.now_s, "n3", "n3-1"))
    for _ in range(50):
        desk.wait(2.0)
        desk.feed(ProbeResult(desk.now_s, "n3", "n3-1", "alive"))
        desk.report("n1", AttemptPhase.RUNNING)
        desk.report("n2", AttemptPhase.RUNNING)
        if desk.now_s < 1000.0 + POLICY.dead_uncorroborated_after_s:
            assert desk.liveness("n3") != "DEAD"
    assert desk.liveness("n3") == "DEAD" and desk.job().phase is JobPhase.RUNNING


def answers(desk: Desk, seconds: float, mute: str, **said: Any) -> None:
    """``mute`` answers probes and sends nothing; the other nodes send heartbeats."""
    until_s = desk.now_s + seconds
    while desk.now_s < until_s:
        desk.effects.clear()
        desk.wait(2.0)
        if any(isinstance(effect, Probe) and effect.node == mute for effect in desk.effects):
            desk.feed(ProbeResult(desk.now_s, mute, f"{mute}-1", "alive", **said))
        for name in ("n1", "n2", "n3"):
            if name != mute and desk.job().phase is JobPhase.RUNNING:
                busy = desk.job().slot_of(name) is not None
                desk.report(name, AttemptPhase.RUNNING if busy else AttemptPhase.IDLE)


def test_a_node_that_answers_on_an_open_link_without_heartbeats_is_given_up(desk: Desk) -> None:
    """Its answers are signs of life for a while only: nobody can command it."""
    answers(desk, 56.0, "n3")
    assert desk.liveness("n3") != "DEAD" and desk.state.nodes["n3"].connected
    answers(desk, 24.0, "n3")
    assert desk.liveness("n3") == "DEAD"
    line = next(line for line in desk.audit if line.reason == "NODE_DEAD")
    assert "its agent answers probes but has sent nothing for" in line.message
    desk.report("n3", AttemptPhase.IDLE)
    assert desk.liveness("n3") == "ALIVE", "it sends heartbeats again"


def test_a_mute_node_that_says_it_has_no_workers_is_dead_soon(desk: Desk) -> None:
    """As after a full disk: the agent lives, its link does not, and its ranks have ended."""
    desk.feed(StreamReset(desk.now_s, "n2", "n2-1"))
    desk.feed(LeaderStarted(desk.now_s, "next"))
    said = {"job": "a", "attempt": 1, "phase": AttemptPhase.FAILED}
    answers(desk, 58.0, "n2", **said)
    assert desk.job().phase is JobPhase.RUNNING
    answers(desk, 12.0, "n2", **said)
    assert desk.liveness("n2") == "DEAD" and desk.job().phase is not JobPhase.RUNNING
    line = next(line for line in desk.audit if line.reason == "NODE_DEAD")
    assert "has no workers of attempt 1" in line.message and line.policy == "mute"
    assert line.evidence[1].digest == "attempt 1 of job a is FAILED"


def test_a_mute_node_that_trains_is_no_hard_fact(desk: Desk) -> None:
    """A network that lets through one way only: it is given up as any silent node, later."""
    said = {"job": "a", "attempt": 1, "phase": AttemptPhase.RUNNING}
    desk.feed(StreamReset(desk.now_s, "n2", "n2-1"))
    answers(desk, 64.0, "n2", **said)
    assert desk.job().phase is JobPhase.RUNNING
    answers(desk, 16.0, "n2", **said)
    line = next(line for line in desk.audit if line.reason == "NODE_DEAD")
    assert line.policy == "silence"


def test_a_job_without_any_worker_is_found_whatever_the_cause(desk: Desk) -> None:
    """The breaker holds back all verdicts on nodes; the job is not RUNNING for ever."""
    began_s = desk.now_s
    while desk.now_s - began_s < POLICY.no_workers_after_s - 10.0:
        desk.state = replace(desk.state, breaker=Breaker(tripped_at_s=desk.now_s))
        desk.wait(5.0)
    assert desk.job().phase is JobPhase.RUNNING
    while desk.now_s - began_s < POLICY.no_workers_after_s + 10.0:
        desk.state = replace(desk.state, breaker=Breaker(tripped_at_s=desk.now_s))
        desk.wait(5.0)
    assert desk.job().phase is not JobPhase.RUNNING
    [line] = [line for line in desk.audit if line.reason == "WORKERS_MISSING"]
    assert line.message == "no node reports workers of attempt 1 for 600 s"
    assert (line.policy, line.mode) == ("no-workers", "ENFORCE")


def test_one_node_that_reports_workers_is_enough(desk: Desk) -> None:
    began_s = desk.now_s
    while desk.now_s - began_s < 2 * POLICY.no_workers_after_s:
        desk.state = replace(desk.state, breaker=Breaker(tripped_at_s=desk.now_s))
        desk.wait(5.0)
        desk.report("n1", AttemptPhase.RUNNING)
    assert "WORKERS_MISSING" not in desk.reasons() and desk.job().phase is JobPhase.RUNNING


def test_missing_workers_are_only_reported_while_the_rule_is_observed(desk: Desk) -> None:
    began_s = desk.now_s
    while desk.now_s - began_s < 2 * POLICY.no_workers_after_s:
        breaker = Breaker(tripped_at_s=desk.now_s, modes={"no-workers": "OBSERVE"})
        desk.state = replace(desk.state, breaker=breaker)
        desk.wait(5.0)
    assert desk.job().phase is JobPhase.RUNNING
    assert [line.mode for line in desk.audit if line.reason == "WORKERS_MISSING"] == ["OBSERVE"]


def test_a_restarted_executor_ends_the_attempt_but_keeps_its_node(desk: Desk) -> None:
    desk.hello("n2", boot=2)
    assert desk.job().phase is JobPhase.STOPPING and "NODE_RESTARTED" in desk.reasons()
    desk.report("n2", AttemptPhase.IDLE)
    desk.report("n1", AttemptPhase.IDLE)
    assert [slot.node for slot in desk.job().slots] == ["n1", "n2"] and desk.job().attempt == 2


def silent_node(desk: Desk, *, until_s: float, unreachable: dict[str, str] | None) -> None:
    """n3 falls silent, its link open and its port without an answer yet; others go on."""
    silent_s = desk.now_s
    while desk.now_s - silent_s < until_s:
        desk.wait(2.0)
        desk.report("n1", AttemptPhase.RUNNING)
        desk.report("n2", AttemptPhase.RUNNING)
        if unreachable is not None:
            desk.feed(PlatformReport(desk.now_s, unreachable, "platform"))


def test_a_platform_that_does_not_reach_a_silent_node_is_a_second_witness(desk: Desk) -> None:
    """DEAD at 14 s instead of 60 s."""
    notready = {"n3": "machine m3: NotReady (NodeStatusUnknown)", "n9": "not known here"}
    silent_node(desk, until_s=12.0, unreachable=notready)
    assert desk.liveness("n3") == "SUSPECT"
    silent_node(desk, until_s=2.0, unreachable=notready)
    assert desk.liveness("n3") == "DEAD" and desk.job().phase is JobPhase.RUNNING
    (line,) = [line for line in desk.audit if line.reason == "NODE_DEAD"]
    assert (
        "its platform does not reach it: machine m3: NotReady (NodeStatusUnknown)" in line.message
    )
    assert line.evidence[-1].kind == "corroboration"
    assert line.evidence[-1].digest.endswith("reported by platform"), "who reported it"


@pytest.mark.parametrize("unreachable", [None, {}, {"n2": "NotReady"}])
def test_without_that_witness_a_silent_node_has_its_time(
    desk: Desk, unreachable: dict[str, str] | None
) -> None:
    silent_node(desk, until_s=58.0, unreachable=unreachable)
    assert desk.liveness("n3") == "SUSPECT", "no sign of its own"
    assert desk.liveness("n2") == "ALIVE", "a platform alone decides nothing"
    silent_node(desk, until_s=4.0, unreachable=unreachable)
    assert desk.liveness("n3") == "DEAD"


def test_what_a_platform_said_counts_until_the_node_is_heard_or_it_is_old(desk: Desk) -> None:
    desk.feed(PlatformReport(desk.now_s, {"n3": "NotReady"}, "platform"))
    desk.report("n3", AttemptPhase.IDLE)  # heard after the report
    silent_node(desk, until_s=20.0, unreachable=None)
    assert desk.liveness("n3") == "SUSPECT"
    desk.report("n3", AttemptPhase.IDLE)
    desk.wait(1.0)
    desk.feed(PlatformReport(desk.now_s, {"n3": "NotReady"}, "platform"))
    desk.feed(PlatformReport(desk.now_s, {}, "platform"))  # it is reached again
    silent_node(desk, until_s=20.0, unreachable=None)
    assert desk.liveness("n3") == "SUSPECT"
    old_s = desk.now_s - POLICY.platform_report_s - 1.0
    sign = PlatformSign(old_s, "NotReady")
    nodes = {**desk.state.nodes, "n3": replace(desk.state.nodes["n3"], unreachable=sign)}
    desk.state = replace(desk.state, nodes=nodes)
    desk.wait(1.0)
    assert desk.liveness("n3") == "SUSPECT", "nobody has repeated it"


def test_a_node_that_comes_back_before_the_verdict_is_alive_again(desk: Desk) -> None:
    desk.feed(StreamReset(desk.now_s, "n2", "n2-1"))
    desk.feed(ProbeResult(desk.now_s, "n2", "n2-1", "timeout"))
    desk.wait(9.0)
    assert desk.liveness("n2") == "SUSPECT"
    desk.hello("n2")
    desk.report("n2", AttemptPhase.RUNNING)
    desk.wait(6.0)
    assert desk.liveness("n2") == "ALIVE" and desk.job().attempt == 1


def test_a_refused_probe_proves_nothing_while_the_link_is_open(desk: Desk) -> None:
    desk.feed(ProbeResult(desk.now_s, "n2", "n2-1", "refused"))
    assert desk.state.nodes["n2"].liveness is Liveness.ALIVE
    desk.feed(StreamReset(desk.now_s, "n2", "an older incarnation"))
    desk.feed(ProbeResult(desk.now_s, "n2", "an older incarnation", "refused"))
    assert (
        desk.state.nodes["n2"].liveness is Liveness.ALIVE and desk.job().phase is JobPhase.RUNNING
    )


def test_commits_count_only_of_attempts_that_were_issued(desk: Desk) -> None:
    desk.report(
        "n1", AttemptPhase.RUNNING, progress=(Progress("a", (), 40, 7), Progress("ghost", (), 9, 1))
    )
    assert desk.job().committed_step == 0
    desk.report("n1", AttemptPhase.RUNNING, progress=(Progress("a", (), 40, 1, "file:///m"),))
    desk.report("n1", AttemptPhase.RUNNING, progress=(Progress("a", (), 30, 1),))
    assert (desk.job().committed_step, desk.job().manifest_uri) == (40, "file:///m")
    assert desk.reasons().count("CHECKPOINT_COMMITTED") == 1


def test_completed_steps_prove_that_silent_nodes_are_alive(desk: Desk) -> None:
    for step in range(1, 30):
        desk.now_s += 1.0
        desk.feed(Tick(desk.now_s, (("a", 1, step),)))
    assert desk.job().attempt == 1
    assert all(desk.state.nodes[name].liveness is Liveness.ALIVE for name in ("n1", "n2"))
    assert desk.state.nodes["n3"].liveness is Liveness.SUSPECT, "it takes no part in the job"


def test_a_blocked_loop_suspends_verdicts_over_silence(desk: Desk) -> None:
    desk.now_s += 100.0
    desk.feed(Tick(desk.now_s, (), loop_blocked=True))
    assert all(node.liveness is Liveness.ALIVE for node in desk.state.nodes.values())
    desk.wait(POLICY.heartbeat_interval_s + 0.1)
    assert all(node.liveness is not Liveness.ALIVE for node in desk.state.nodes.values())


def test_the_committer_is_called_again_and_then_given_up() -> None:
    desk = Desk("n1", "n2")
    desk.feed(JobSubmitted(desk.now_s, demo_job("a", spares=0), "me"))
    for name in ("n1", "n2"):
        desk.report(name, AttemptPhase.PREPARED)
    for tries in range(1, 4):
        asked = [e for e in desk.effects if isinstance(e, OpenAttempt)]
        assert len(asked) == tries and asked[-1].node == "n1"
        desk.feed(OpenFailed(desk.now_s, "a", 1, "disk is gone"))
        desk.wait(1.1)
    assert desk.job().phase is JobPhase.STOPPING and "disk is gone" in desk.job().stop_reason
    late = AttemptOpened(desk.now_s, "a", 1, RestorePlan(), "n1:2")
    desk.feed(late)
    assert desk.job().phase is JobPhase.STOPPING, "a late answer starts nothing"


def test_only_a_snapshot_that_every_rank_still_holds_counts_as_sealed(desk: Desk) -> None:
    job = job_with(desk.job(), number=2)

    def hold(node: str, ranks: range, *steps: tuple[int, int], digest: str = "d") -> None:
        sealed = tuple(
            SealedSnapshot(rank, attempt, step, digest) for rank in ranks for step, attempt in steps
        )
        desk.report(node, AttemptPhase.RUNNING, progress=(Progress("a", sealed),))

    hold("n1", range(4), (10, 1), (20, 1))
    assert sealed_everywhere(job, desk.state.nodes) == (0, 0)
    hold("n2", range(4, 8), (10, 1), (20, 1))
    assert sealed_everywhere(job, desk.state.nodes) == (20, 1)
    assert sealed_everywhere(replace(job, refused_steps=(20,)), desk.state.nodes) == (10, 1)
    hold("n2", range(4, 8), (10, 1), (20, 2))
    assert sealed_everywhere(job, desk.state.nodes) == (10, 1), (
        "another attempt's snapshot is not the same state"
    )
    hold("n2", range(4, 7), (10, 1))
    assert sealed_everywhere(job, desk.state.nodes) == (0, 0)
    hold("n2", range(4, 8), (10, 1), digest="")
    assert sealed_everywhere(job, desk.state.nodes) == (0, 0)
    desk.hello("n2", boot=2)
    assert sealed_everywhere(job, desk.state.nodes) == (0, 0), "a restarted node holds nothing"


def test_a_request_is_carried_out_once(desk: Desk) -> None:
    key = RequestKey("r1", "digest")
    event = JobSubmitted(desk.now_s, demo_job("b"), "me", key)
    assert desk.feed(event) == "" and desk.feed(event) == ""
    assert (
        desk.feed(JobSubmitted(desk.now_s, demo_job("c"), "me", RequestKey("r1", "other")))
        == "REQUEST_ID_REUSED"
    )
    assert desk.feed(JobSubmitted(desk.now_s, demo_job("b"), "me")) == "JOB_EXISTS"
    assert desk.feed(EvictRequested(desk.now_s, "nobody", "x", "me")) == "NODE_NOT_FOUND"
    assert "c" not in desk.state.jobs
    desk.wait(POLICY.request_memory_s + 1.0)
    assert not desk.state.requests


def refused_as_known(desk: Desk) -> str:
    outcome = desk.ask(JobSubmitted(desk.now_s, demo_job("a"), "me"))[1]
    assert outcome.refusal == "JOB_EXISTS"
    return outcome.refusal_detail


def test_a_name_that_is_taken_is_refused_with_the_phase_and_what_may_be_done(desk: Desk) -> None:
    running = refused_as_known(desk)
    assert running.startswith("job a exists already and is running; ")
    for command in ("update JOB.YAML --reason REASON", "clone a"):
        assert f"`megascale {command}`" in running
    assert "restart" not in running and "delete" not in running
    desk.feed(CancelRequested(desk.now_s, "a", "enough", "me"))
    desk.stop()
    cancelled = refused_as_known(desk)
    assert cancelled.startswith("job a exists already and was cancelled; ")
    for order in ("update JOB.YAML", "restart a", "delete a"):
        assert f"`megascale {order} --reason REASON`" in cancelled


def test_cancel_stops_at_once_and_for_good(desk: Desk) -> None:
    assert desk.feed(CancelRequested(desk.now_s, "a", "enough", "me")) == ""
    assert all(desk.state.nodes[name].desired.phase is DesiredPhase.IDLE for name in ("n1", "n2"))
    assert desk.feed(CancelRequested(desk.now_s, "a", "while it stops", "me")) == ""
    desk.stop()
    assert desk.job().phase is JobPhase.CANCELLED and "enough" in desk.job().reason
    assert desk.feed(CancelRequested(desk.now_s, "a", "when it has ended", "me")) == ""
    assert [line.reason for line in desk.audit].count("CANCEL_REQUESTED") == 1
    desk.wait(1.0)
    assert desk.job().attempt == 1


def test_explain_names_what_a_waiting_job_waits_for(desk: Desk) -> None:
    desk.feed(EvictRequested(desk.now_s, "n3", "bad fan", "me"))
    desk.feed(JobSubmitted(desk.now_s, demo_job("b"), "me"))
    assert explain(desk.state, "b", desk.now_s, POLICY) == (
        "job b is waiting: it needs 2 nodes with 4 cpu devices, 0 schedulable nodes are idle; "
        "n1 runs job a; n2 runs job a; n3 is quarantined (bad fan) (waiting for nodes (it needs 8 "
        "devices in groups of 2 on one node, 0 of 8 are free until job a ends or leaves))"
    )
    assert (
        explain(desk.state, "a", desk.now_s, POLICY)
        == "job a runs attempt 1 on n1, n2; its last known step is 0"
    )


def test_higher_priority_goes_first() -> None:
    desk = Desk()
    for name, priority in (("low", 0), ("high", 5)):
        desk.feed(
            JobSubmitted(desk.now_s, replace(demo_job(name, spares=0), priority=priority), "me")
        )
    desk.hello("n1")
    desk.hello("n2")
    desk.report("n1", AttemptPhase.IDLE)
    desk.report("n2", AttemptPhase.IDLE)
    desk.wait(0.25)
    assert (desk.job("high").phase, desk.job("low").phase) == (JobPhase.PREPARING, JobPhase.QUEUED)


def test_a_new_leader_places_nothing_before_the_known_nodes_had_time_to_return() -> None:
    desk = Desk("n1", "n2", "n3", "n4")
    unknown = {
        name: replace(node, liveness=Liveness.UNKNOWN, connected=False)
        for name, node in desk.state.nodes.items()
    }
    desk.state = replace(desk.state, nodes=unknown)
    desk.feed(LeaderStarted(desk.now_s, "there"))
    desk.submit()
    for name in ("n3", "n4"):
        desk.hello(name)
        desk.report(name, AttemptPhase.IDLE)
    desk.wait(5.0)
    assert desk.job().phase is JobPhase.QUEUED
    for name in ("n3", "n4"):
        desk.report(name, AttemptPhase.IDLE)
    desk.wait(5.1)
    assert [slot.node for slot in desk.job().slots] == ["n3", "n4"]


def test_a_step_that_was_refused_counts_again_when_a_later_attempt_commits_it(desk: Desk) -> None:
    job = job_with(
        desk.job(), refused_steps=(30, 40), committed_step=40, committed_by_attempt=1, number=2
    )
    desk.state = replace(desk.state, jobs={**desk.state.jobs, "a": job})
    desk.report("n1", AttemptPhase.RUNNING, progress=(Progress("a", (), 40, 1, "file:///old"),))
    assert desk.job().refused_steps == (30, 40)
    desk.report("n1", AttemptPhase.RUNNING, progress=(Progress("a", (), 30, 2, "file:///30"),))
    assert (desk.job().refused_steps, desk.job().committed_step) == ((40,), 40)
    desk.report("n1", AttemptPhase.RUNNING, progress=(Progress("a", (), 40, 2, "file:///new"),))
    assert (desk.job().refused_steps, desk.job().manifest_uri) == ((), "file:///new")


def test_stacks_of_a_hang_are_written_with_the_suspect_first(desk: Desk) -> None:
    message = "no rank has advanced"
    fault = Fault(FaultKind.HANG, "n2", desk.now_s, message, 5, hard=False)
    job = desk.job()
    stopping = replace(
        job,
        phase=JobPhase.STOPPING,
        after_stop=JobPhase.QUEUED,
        timer_s=desk.now_s,
        stop_reason=message,
        current=replace(job.current, faults=(fault,)),
    )
    desk.state = replace(desk.state, jobs={"a": stopping})
    waiting = "all_reduce (parallel/groups.py:1) < step (process/step_loop.py:2)"
    first = StoppedReport("a", 1, stacks=tuple((rank, waiting) for rank in range(4)))
    culprit = "read (data/client.py:9) < take (data/device_batches.py:4)"
    second = StoppedReport("a", 1, stacks=((4, waiting), (5, culprit), (6, "inner (x.py:1)")))
    desk.report("n1", AttemptPhase.IDLE, stopped=first)
    desk.report("n2", AttemptPhase.IDLE, stopped=second)
    desk.stop(search=False)
    (line,) = [line for line in desk.audit if line.reason == "HANG_STACKS"]
    assert line.message == (f"rank 5: {culprit}; 5 of 6 others: all_reduce (parallel/groups.py:1)")
    assert [(item.source, item.digest) for item in line.evidence][:3] == [
        ("nodes/n2/ranks/5", culprit),
        ("nodes/n2/ranks/6", "inner (x.py:1)"),
        ("nodes/n1/ranks/0", waiting),
    ]
    assert {item.kind for item in line.evidence} == {"stack"}

"""The core: a job succeeds only with its last checkpoint, and troubles on the way have events."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tests.harness.desk import POLICY, Desk, job_with
from tests.harness.simulated_cluster import demo_job

from megascale.v1 import driver_pb2
from megascale_driver.core.orders.orders import origin, restart_consequence
from megascale_driver.core.queue.explain import explain
from megascale_driver.core.values.cluster import AttemptPhase, CheckpointFailure, Node, Progress
from megascale_driver.core.values.events import (
    AttemptOpened,
    JobSubmitted,
    LeaderStarted,
    SuspendRequested,
    Tick,
    utc,
)
from megascale_driver.core.values.job import ConditionType, Job, JobPhase
from megascale_driver.journal import codec
from megascale_driver.service import admission
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.sizes.parameter_table import checkpoint_bytes

STEPS = 400
NODES = ("n1", "n2")
FULL = "[Errno 28] No space left on device"


def desk_with_job(**checkpoint: Any) -> Desk:
    """Two nodes that run a job with checkpoints: its first attempt."""
    desk = prepared(**checkpoint)
    opened(desk, RestorePlan())
    for node in NODES:
        desk.report(node, AttemptPhase.RUNNING)
    assert desk.job().phase is JobPhase.RUNNING
    return desk


def prepared(**checkpoint: Any) -> Desk:
    desk = Desk(*NODES)
    config = demo_job("a", steps=STEPS, spares=0)
    config = replace(config, checkpoint=replace(config.checkpoint, **checkpoint))
    desk.feed(JobSubmitted(desk.now_s, config, "me"))
    for node in NODES:
        desk.report(node, AttemptPhase.PREPARED)
    return desk


def opened(desk: Desk, plan: RestorePlan) -> None:
    desk.feed(AttemptOpened(desk.now_s, "a", 1, plan, "n1:2"))


def failure(step: int, *, attempt: int = 1, rank: int = 3) -> Progress:
    return Progress("a", failure=CheckpointFailure(attempt, step, rank, FULL))


def committed(step: int, **more: Any) -> Progress:
    return Progress(
        "a", committed_step=step, committed_by_attempt=1, manifest_uri=f"/m/{step}", **more
    )


def finish(desk: Desk, *progress: Progress, why: str = "") -> None:
    for node in NODES:
        desk.report(node, AttemptPhase.FINISHED, progress=progress, failure=why)


def lines(desk: Desk, reason: str) -> list[str]:
    return [line.message for line in desk.audit if line.reason == reason]


def test_a_job_succeeds_with_the_checkpoint_of_its_last_step() -> None:
    desk = desk_with_job()
    finish(desk, committed(STEPS))
    assert (desk.job().phase, desk.job().conditions) == (JobPhase.SUCCEEDED, ())


def test_a_job_whose_last_step_is_not_saved_fails_with_the_cause() -> None:
    desk = desk_with_job()
    finish(desk, failure(STEPS), why="other ranks are missing")
    job = desk.job()
    assert job.phase is JobPhase.FAILED and job.restarts == 0
    assert job.reason == (
        f"all {STEPS} steps are done, but the checkpoint of step {STEPS} was not saved: {FULL}"
    )
    assert lines(desk, "JOB_FAILED") == [job.reason]


def test_the_worker_gives_the_cause_where_no_daemon_does() -> None:
    desk = desk_with_job()
    finish(desk, failure(STEPS - 5), why="the checkpoint daemon is gone")
    assert desk.job().reason.endswith("was not saved: the checkpoint daemon is gone")


def test_a_job_that_may_end_without_it_has_a_condition_that_is_stored() -> None:
    desk = desk_with_job(require_final=False)
    finish(desk, failure(STEPS), why="given up")
    job = desk.job()
    assert job.phase is JobPhase.SUCCEEDED
    (condition,) = job.conditions
    assert condition.type is ConditionType.NOT_SAVED and FULL in condition.message
    stored = codec.load(Job, codec.dump(job), config=job.config, attempts=job.attempts)
    assert stored.conditions == job.conditions


def test_the_commit_may_be_reported_after_the_end() -> None:
    desk = desk_with_job()
    finish(desk, committed(STEPS - 5))
    desk.wait(POLICY.commit_report_s / 2)
    assert desk.job().phase is JobPhase.RUNNING, "a worker saw the commit: wait for its report"
    desk.report("n1", AttemptPhase.FINISHED, progress=(committed(STEPS),))
    desk.wait(0.25)
    assert (desk.job().phase, desk.job().manifest_uri) == (JobPhase.SUCCEEDED, f"/m/{STEPS}")


def test_a_commit_that_a_worker_saw_counts_when_its_daemon_is_gone() -> None:
    desk = desk_with_job()
    desk.report("n1", AttemptPhase.FINISHED, failure="the checkpoint daemon is gone")
    desk.report("n2", AttemptPhase.FINISHED)
    assert desk.job().phase is JobPhase.RUNNING
    desk.wait(POLICY.commit_report_s)
    assert (desk.job().phase, desk.job().committed_step) == (JobPhase.SUCCEEDED, STEPS)


def test_a_refused_checkpoint_of_the_last_step_does_not_count() -> None:
    desk = desk_with_job()
    desk.report("n1", AttemptPhase.RUNNING, progress=(committed(STEPS),))
    job = replace(desk.job(), refused_steps=(STEPS,))
    desk.state = replace(desk.state, jobs={"a": job})
    finish(desk, why="given up")
    assert desk.job().phase is JobPhase.FAILED


def test_a_full_disk_at_the_last_step_says_what_is_missing_and_until_when() -> None:
    desk = desk_with_job(uri="/mnt/small", final_timeout_s=300.0)
    desk.feed(Tick(desk.now_s, (("a", 1, STEPS),)))
    done_s = desk.now_s
    desk.wait(5.0)
    for node in NODES:
        desk.report(node, AttemptPhase.RUNNING, progress=(failure(STEPS),))
    size_mib = checkpoint_bytes(desk.job().config) / 2**20
    (condition,) = desk.job().conditions
    assert condition.message.endswith(
        f"{FULL}. All {STEPS} steps are done, and the save is tried again until "
        f"{utc(done_s + 300)}: make room for {size_mib:,.1f} MiB (a whole checkpoint) below "
        "/mnt/small before that, or the job fails"
    )
    # It saves, so nobody holds it up, however long that takes.
    for _ in range(12):
        desk.wait(5.0)
        for node in NODES:
            desk.report(node, AttemptPhase.RUNNING, progress=(failure(STEPS),))
    said = explain(desk.state, "a", desk.now_s, POLICY)
    assert condition.message in said and "has completed a step for" not in said
    line = next(line for line in desk.audit if line.reason == "CHECKPOINT_FAILED")
    assert line.outcome == f"the last step: it is tried again until {utc(done_s + 300)}"


def test_where_an_attempt_begins_is_what_has_been_saved() -> None:
    desk = desk_with_job(uri="/mnt/a")
    assert origin(desk.job()) == "begins at step 0: nothing is saved yet"
    assert origin(desk.job(), replicated_step=7).startswith("continues from step 7")
    desk.report("n1", AttemptPhase.RUNNING, progress=(committed(40),))
    assert origin(desk.job()).startswith("continues from step 40")
    fresh = desk_with_job(uri="/mnt/a", load_uri="/mnt/other")
    assert origin(fresh.job()) == "begins from /mnt/other: nothing of its own is saved yet"
    assert "step 0: nothing is saved yet" in restart_consequence(
        desk_with_job(uri="/mnt/a").job(), None, now=True
    )


@pytest.mark.parametrize(
    ("steps_held", "said"),
    [
        ([], None),
        ([6, 3], "holds step 6 of an earlier job of this name, which is restored: training cont"),
        ([STEPS, 6], f"with trainer.training.steps {STEPS} nothing is left to train"),
    ],
)
async def test_a_submit_says_what_the_folder_of_the_job_holds(
    steps_held: list[int], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "EARLIER_TIMEOUT_S", 0.05)
    desk = Desk("n1", "n2")
    config = demo_job("a", steps=STEPS)
    asked: list[tuple[str, str, str]] = []

    async def listed(node: Node, job: str, uri: str) -> list[driver_pb2.Checkpoint]:
        asked.append((node.name, job, uri))
        if node.name == "n1":
            await asyncio.Event().wait()  # its storage hangs, and the submit goes on
        return [driver_pb2.Checkpoint(step=step) for step in steps_held]

    found = await admission.earlier_checkpoints(config, desk.state, listed)
    assert [name for name, *_ in asked] == ["n1", "n2"]
    assert set(asked) == {(name, "a", config.checkpoint.uri) for name in ("n1", "n2")}
    assert (said in found[0]) if said else not found


def test_an_earlier_checkpoint_that_fails_needs_room_and_has_no_deadline() -> None:
    desk = desk_with_job(uri="/mnt/small")
    desk.report("n1", AttemptPhase.RUNNING, progress=(failure(STEPS - 5),))
    (condition,) = desk.job().conditions
    assert condition.message.endswith("MiB (a whole checkpoint) below /mnt/small")
    assert "until" not in condition.message
    # Also while the job saves to leave its nodes.
    desk.feed(SuspendRequested(desk.now_s, "a", "later", "ada"))
    assert condition.message in explain(desk.state, "a", desk.now_s, POLICY)


def test_a_save_that_fails_for_another_reason_asks_for_no_room() -> None:
    desk = desk_with_job()
    broken = CheckpointFailure(1, STEPS - 5, 3, "[Errno 5] Input/output error")
    desk.report("n1", AttemptPhase.RUNNING, progress=(Progress("a", failure=broken),))
    assert desk.job().conditions[0].message.endswith("Input/output error")
    broken = replace(broken, step=STEPS)
    desk.report("n1", AttemptPhase.RUNNING, progress=(Progress("a", failure=broken),))
    assert "repair its storage before that, or the job fails" in desk.job().conditions[0].message


def test_state_of_an_earlier_job_of_the_name_is_named_as_such() -> None:
    desk = prepared()
    opened(desk, RestorePlan(RestoreSource.STORAGE, 6, 4, "/m/6"))
    (line,) = lines(desk, "ATTEMPT_OPENED")
    assert line.endswith(", which an earlier job of this name (or a run by hand) wrote")
    # The same numbers, once the job has taken a step of its own.
    own = prepared()
    own.state = replace(own.state, jobs={"a": job_with(own.job(), best_step=9)})
    opened(own, RestorePlan(RestoreSource.STORAGE, 6, 4, "/m/6"))
    assert "earlier job" not in lines(own, "ATTEMPT_OPENED")[0]


def test_a_job_that_finds_its_last_step_in_an_old_folder_says_that_it_trained_nothing() -> None:
    desk = prepared()
    opened(desk, RestorePlan(RestoreSource.STORAGE, STEPS, 4, f"/m/{STEPS}"))
    for node in NODES:
        desk.report(node, AttemptPhase.IDLE)
    job = desk.job()
    assert job.phase is JobPhase.SUCCEEDED
    assert job.reason.startswith("nothing was left to train: ")
    assert "another folder" in job.reason
    # The daemons still have it in memory: the workers start and commit it once more.
    sealed = prepared()
    opened(sealed, RestorePlan(RestoreSource.MEMORY, STEPS, 1))
    for node in NODES:
        sealed.report(node, AttemptPhase.RUNNING)
    finish(sealed, committed(STEPS))
    assert sealed.job().reason.startswith("nothing was left to train: ")


def test_a_job_without_checkpoints_succeeds_as_before() -> None:
    desk = Desk(*NODES)
    desk.submit()
    desk.run()
    finish(desk)
    assert desk.job().phase is JobPhase.SUCCEEDED


@pytest.mark.parametrize(
    ("step", "written_by", "phase", "words"),
    [
        (STEPS, 1, JobPhase.SUCCEEDED, "nothing was left to train"),
        (STEPS, 0, JobPhase.FAILED, f"restored step {STEPS} is not below"),
        (STEPS + 100, 0, JobPhase.FAILED, f"restored step {STEPS + 100} is not below"),
        (STEPS + 100, 1, JobPhase.FAILED, f"trainer.training.steps {STEPS}"),
    ],
)
def test_nothing_is_started_from_a_stored_step_at_or_beyond_the_last(
    step: int, written_by: int, phase: JobPhase, words: str
) -> None:
    desk = prepared()
    opened(desk, RestorePlan(RestoreSource.STORAGE, step, written_by, "/m"))
    desk.stop()
    job = desk.job()
    assert job.phase is phase and words in job.reason
    assert (job.attempt, job.restarts) == (1, 0)
    assert "ATTEMPT_STARTED" not in desk.reasons()
    assert job.committed_step == (STEPS if phase is JobPhase.SUCCEEDED else 0)


def test_a_last_step_in_memory_is_still_committed_by_workers() -> None:
    desk = prepared()
    opened(desk, RestorePlan(RestoreSource.MEMORY, STEPS, 1))
    assert desk.job().phase is JobPhase.STARTING


def test_the_verdict_is_the_same_under_the_next_driver() -> None:
    desk = desk_with_job()
    desk.report("n1", AttemptPhase.FINISHED, progress=(committed(STEPS),))
    job = desk.job()
    stored = codec.load(Job, codec.dump(job), config=job.config, attempts=job.attempts)
    desk.state = replace(desk.state, jobs={"a": stored})
    desk.feed(LeaderStarted(desk.now_s, "next"))
    for node in NODES:
        desk.hello(node)
    finish(desk)
    assert desk.job().phase is JobPhase.SUCCEEDED


def test_each_failed_step_has_one_event_and_a_long_row_has_few() -> None:
    desk = desk_with_job()
    for step in range(1, 151):
        for node in NODES:
            for _ in range(2):  # a heartbeat repeats the newest failure
                desk.report(node, AttemptPhase.RUNNING, progress=(failure(step),))
    found = lines(desk, "CHECKPOINT_FAILED")
    assert len(found) == 11 and "of step 100 " in found[-1] and FULL in found[-1]
    assert "(100 in a row)" in found[-1]
    desk.report("n1", AttemptPhase.RUNNING, progress=(committed(151),))
    desk.report("n1", AttemptPhase.RUNNING, progress=(failure(152),))
    assert "(1 in a row)" in lines(desk, "CHECKPOINT_FAILED")[-1]


def test_the_events_of_failures_are_not_repeated_by_the_next_driver() -> None:
    desk = desk_with_job()
    desk.report("n1", AttemptPhase.RUNNING, progress=(failure(20),))
    job = desk.job()
    stored = codec.load(Job, codec.dump(job), config=job.config, attempts=job.attempts)
    desk.state = replace(desk.state, jobs={"a": stored})
    desk.feed(LeaderStarted(desk.now_s, "next"))
    desk.hello("n1")
    desk.report("n1", AttemptPhase.RUNNING, progress=(failure(20),))
    assert len(lines(desk, "CHECKPOINT_FAILED")) == 1


def skipped(count: int, step: int) -> Progress:
    return Progress("a", skipped_snapshots=count, skipped_step=step, skipped_by_attempt=1)


def test_skipped_snapshots_have_a_line_for_each_power_of_ten() -> None:
    desk = desk_with_job()
    for count in range(1, 121):
        for node in NODES:  # all ranks skip a step together
            progress = (skipped(count, 2 * count),)
            desk.report(node, AttemptPhase.RUNNING, progress=progress)
    found = lines(desk, "CHECKPOINT_SKIPPED")
    assert [line.split()[0] for line in found] == ["1", "10", "100"]
    assert "after step 20:" in found[1]


def test_the_last_step_waits_for_a_slot_and_is_not_skipped() -> None:
    desk = desk_with_job()
    desk.report("n1", AttemptPhase.RUNNING, progress=(skipped(1, STEPS),))
    assert lines(desk, "CHECKPOINT_SKIPPED") == []


def test_a_restarted_daemon_has_an_event_in_the_log_of_its_job() -> None:
    desk = desk_with_job()
    for _ in range(2):
        desk.report("n2", AttemptPhase.RUNNING, daemon_restarts=1, daemon_exit_status=-9)
    (found,) = [line for line in desk.audit if line.reason == "CHECKPOINT_DAEMON_RESTARTED"]
    assert (found.log, found.subject) == ("a", "nodes/n2")
    assert "status -9" in found.message


def test_a_failing_checkpoint_is_in_status_and_explanation_until_the_next_commit() -> None:
    desk = desk_with_job()
    desk.report("n1", AttemptPhase.RUNNING, progress=(committed(10),))
    committed_at_s = desk.job().committed_at_s
    assert committed_at_s == desk.now_s and desk.job().conditions == ()
    desk.now_s += 60.0
    desk.report("n1", AttemptPhase.RUNNING, progress=(committed(10, failure=failure(20).failure),))
    (condition,) = desk.job().conditions
    assert condition.type is ConditionType.CHECKPOINT_FAILING and FULL in condition.message
    explained = explain(desk.state, "a", desk.now_s, POLICY)
    assert "the checkpoint of step 20 is not saved by rank 3" in explained
    assert "that of step 10, 60 s old" in explained
    desk.report("n1", AttemptPhase.RUNNING, progress=(committed(30),))
    assert desk.job().conditions == ()
    # The other node has not learned of the commit yet.
    desk.report("n2", AttemptPhase.RUNNING, progress=(failure(25),))
    assert desk.job().conditions == ()


def test_a_damaged_snapshot_has_one_line() -> None:
    desk = desk_with_job()
    found = CheckpointFailure(1, 30, 3, "/staging/slot-1: q (master) changed after it was sealed")
    seen = Progress("a", damaged=(found,))
    for _ in range(2):
        desk.report("n1", AttemptPhase.RUNNING, progress=(seen,))
    other = replace(found, rank=2)
    desk.report("n1", AttemptPhase.RUNNING, progress=(replace(seen, damaged=(found, other)),))
    found_lines = lines(desk, "SNAPSHOT_DAMAGED")
    assert len(found_lines) == 2
    assert "step 30 in the memory of n1 is damaged (rank 3): /staging/slot-1" in found_lines[0]
    job = desk.job()
    assert job.phase is JobPhase.RUNNING
    stored = codec.load(Job, codec.dump(job), config=job.config, attempts=job.attempts)
    assert stored.damaged_snapshots == ((1, 30, 3), (1, 30, 2))

"""ExplainJob: the cause first, what was done, what may be done, for every phase and every fault."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest
import typer
from tests.harness.desk import POLICY, Desk, exited
from tests.harness.kernel_lines import gpu_falls_off
from tests.harness.simulated_cluster import demo_job

from megascale_cli.app import build_app
from megascale_driver.analysis.progress import RankStatus
from megascale_driver.core.queue.explain import Explanation, explanation
from megascale_driver.core.signs.hang import SHOWN_AFTER
from megascale_driver.core.values.attempt import FaultKind
from megascale_driver.core.values.cluster import AttemptPhase, Check, WorkerReport
from megascale_driver.core.values.events import (
    Audit,
    CancelRequested,
    CordonRequested,
    EvictRequested,
    JobSubmitted,
    OpenAttempt,
    OpenFailed,
    ProbeResult,
    StreamReset,
    SuspendRequested,
    Tick,
)
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.reasons import is_routine
from megascale_driver.wire import messages as wire

COMMANDS = typer.main.get_command(build_app())


def explained(desk: Desk, name: str = "a") -> Explanation:
    log = [line for line in desk.audit if line.log == name]
    found = explanation(desk.state, name, log, desk.now_s, POLICY)
    for suggestion in found.suggestions:
        check_command(suggestion.command)
    assert found.text.startswith(found.sentence)
    message = wire.explanation_message(found, wire.types_pb2.Epoch())
    assert len(message.suggestions) == len(found.suggestions) and message.text == found.text
    return found


def check_command(command: str) -> None:
    """The command exists, and takes the options that stand there."""
    program, *words = shlex.split(command)
    assert program == "megascale"
    if words[:2] == ["node", "start"] and len(words) == 3:
        return  # an installed package adds it
    found = COMMANDS
    while isinstance(found, typer.core.TyperGroup):
        found = found.commands[words.pop(0)]
    with found.make_context(command, words, resilient_parsing=False):
        pass


def prepared(desk: Desk) -> None:
    for slot in desk.job().slots:
        desk.report(slot.node, AttemptPhase.PREPARED)


def worker(kind: str = "", status: int = 1) -> Callable[[Desk], None]:
    def happen(desk: Desk) -> None:
        desk.run()
        report: WorkerReport = exited(5, desk.now_s, status, kind, "it went wrong")
        desk.fail("n2", report)

    return happen


def failed_check(name: str) -> Callable[[Desk], None]:
    def happen(desk: Desk) -> None:
        check = Check(name, "FAIL", "cpu 0", "40 GiB of 24 GiB")
        desk.report("n2", AttemptPhase.FAILED, checks=(check,))

    return happen


def node_dies(desk: Desk) -> None:
    desk.run()
    incarnation = desk.state.nodes["n2"].identity.incarnation
    desk.feed(StreamReset(desk.now_s, "n2", incarnation))
    desk.feed(ProbeResult(desk.now_s, "n2", incarnation, "refused"))


def node_restarts(desk: Desk) -> None:
    desk.run()
    desk.hello("n2", boot=2)


def node_is_evicted(desk: Desk) -> None:
    desk.run()
    desk.feed(EvictRequested(desk.now_s, "n2", "its fan is loud", "ada"))


def preparing_takes_too_long(desk: Desk) -> None:
    desk.report("n1", AttemptPhase.PREPARED)
    while desk.job().phase is JobPhase.PREPARING:
        desk.wait(1.0)
        for node, phase in (("n1", AttemptPhase.PREPARED), ("n2", AttemptPhase.PREPARING)):
            if desk.job().phase is JobPhase.PREPARING:
                desk.report(node, phase)


def job_hangs(desk: Desk) -> None:
    desk.run()
    began_s = desk.now_s
    desk.feed(Tick(desk.now_s, (("a", 1, 1),)))
    while desk.job().phase is JobPhase.RUNNING:
        desk.wait(5.0)
        for slot in desk.job().slots:
            if desk.job().phase is JobPhase.RUNNING:
                age_s = desk.now_s - began_s
                pages = tuple(RankStatus(rank, 1, "STEP", age_s) for rank in slot.ranks)
                desk.report(slot.node, AttemptPhase.RUNNING, statuses=pages)


def kernel_reports(desk: Desk) -> None:
    desk.run()
    gpu_falls_off(desk, "n2")


def opening_fails(desk: Desk) -> None:
    prepared(desk)
    while desk.job().phase is JobPhase.PREPARING:
        assert any(isinstance(effect, OpenAttempt) for effect in desk.effects)
        desk.feed(OpenFailed(desk.now_s, "a", 1, "no space left on device"))
        desk.wait(2.0)
        if desk.job().phase is JobPhase.PREPARING:
            prepared(desk)


FAULTS: dict[str, tuple[Callable[[Desk], None], str, str]] = {
    FaultKind.NODE_DEAD: (node_dies, "NODE_DEAD", "megascale node start n2"),
    FaultKind.NODE_RESTARTED: (node_restarts, "NODE_RESTARTED", "megascale events a --json"),
    FaultKind.NODE_EVICTED: (
        node_is_evicted, "NODE_EVICTED", "megascale uncordon n2 --reason REASON",
    ),
    FaultKind.CHECK_FAILED: (
        failed_check("gemm"), "NODE_EVICTED", "megascale uncordon n2 --reason REASON",
    ),
    FaultKind.JOB_TOO_BIG: (failed_check("memory_room"), "", "megascale plan FILE"),
    FaultKind.WORKER_EXITED: (
        worker(), "WORKER_EXITED", "megascale logs a --rank 5 --attempt 1",
    ),
    FaultKind.WORKER_SYMPTOM: (
        worker("COLLECTIVE"), "WORKER_EXITED", "megascale logs a --rank 5 --attempt 1",
    ),
    FaultKind.CHECKPOINT_CORRUPT: (
        worker("CHECKPOINT_CORRUPT"), "WORKER_EXITED", "megascale logs a --rank 5 --attempt 1",
    ),
    "BAD_JOB": (worker("BAD_JOB"), "WORKER_EXITED", "megascale logs a --rank 5 --attempt 1"),
    "OUT_OF_MEMORY": (worker("OUT_OF_MEMORY"), "WORKER_OUT_OF_MEMORY", "megascale plan FILE"),
    FaultKind.DEADLINE: (preparing_takes_too_long, "", "megascale nodes"),
    FaultKind.HANG: (job_hangs, "HANG_SUSPECTED", "megascale logs a --rank 0 --attempt 1"),
    FaultKind.KERNEL_FAULT: (kernel_reports, "KERNEL_FAULT", "megascale diagnose n2"),
    FaultKind.OPEN_FAILED: (opening_fails, "", "megascale checkpoint list a"),
}  # fmt: skip


def test_every_kind_of_fault_is_in_the_table() -> None:
    assert set(FAULTS) >= set(FaultKind)


@pytest.mark.parametrize("kind", FaultKind)
def test_a_fault_is_the_cause_from_its_detection_on_until_the_job_runs_again(
    kind: FaultKind,
) -> None:
    happen, reason, command = FAULTS[kind]
    desk = Desk("n1", "n2", "n3")
    if kind is FaultKind.OPEN_FAILED:
        desk.feed(JobSubmitted(desk.now_s, demo_job("a", spares=0), "me"))
    else:
        desk.submit()
    happen(desk)
    assert desk.job().phase is JobPhase.STOPPING
    assert [fault.kind for fault in desk.job().current.faults] == [kind]
    message = desk.job().current.faults[0].message

    stopping = explained(desk)
    check_cause(stopping, message)
    assert stopping.cause is not None and stopping.cause.reason == (reason or kind)
    assert command in [suggestion.command for suggestion in stopping.suggestions]
    desk.now_s += 1.0
    desk.stop()
    after = explained(desk)
    check_cause(after, message)
    assert after.cause is not None and after.cause.reason == (reason or "ATTEMPT_STOPPED")
    assert command in [suggestion.command for suggestion in after.suggestions]
    ended = desk.job().terminal
    assert ended == (kind in (FaultKind.JOB_TOO_BIG, "BAD_JOB")), (
        "no other attempt would fare better"
    )
    if not ended and kind is not FaultKind.OPEN_FAILED:
        desk.run()
        running = explained(desk)
        check_cause(running, message)
        assert running.actions[-1].reason == "ATTEMPT_STARTED"
        assert "PLACED" in [line.reason for line in running.actions]


def check_cause(found: Explanation, message: str) -> None:
    """What happened stands first, then what the system did, then the suggestions."""
    assert found.cause is not None and found.suggestions
    assert message in found.cause.message
    headings = [line for line in found.text.splitlines()[1:] if line and line[0] != " "]
    more = any(line.message not in found.sentence for line in found.actions)
    did = ["what the system did"] if more else []
    assert headings == ["what happened", *did, "what you can do"]
    lines = found.text.splitlines()
    assert found.cause.message in lines[lines.index("what happened") + 1]
    notable = [not is_routine(line.reason) for line in found.events]
    assert notable == sorted(notable, reverse=True), "routine lines come last"


def test_the_error_of_a_peer_is_not_the_cause() -> None:
    desk = Desk("n1", "n2")
    desk.submit()
    desk.run()
    desk.fail("n1", exited(0, desk.now_s, kind="COLLECTIVE", error="connection closed by peer"))
    desk.fail("n2", exited(5, desk.now_s - 1, error="CUDA error"))
    first = explained(desk)
    assert first.cause is not None and "rank 5" in first.cause.message
    desk.stop()
    found = explained(desk)
    assert found.cause == first.cause
    assert [line.reason for line in found.actions][:2] == ["ATTEMPT_STOPPED", "PLACED"]


def submitted(*nodes: str) -> Desk:
    desk = Desk(*nodes)
    desk.submit()
    return desk


def started(phase: AttemptPhase) -> Desk:
    desk = submitted("n1", "n2")
    prepared(desk)
    if phase is not AttemptPhase.PREPARED:
        for slot in desk.job().slots:
            desk.report(slot.node, phase)
    return desk


def cancelled() -> Desk:
    desk = started(AttemptPhase.RUNNING)
    desk.feed(CancelRequested(desk.now_s, "a", "wrong data", "ada"))
    return desk


def suspended() -> Desk:
    desk = submitted("n1")
    desk.feed(SuspendRequested(desk.now_s, "a", "later", "ada"))
    return desk


def ended_by(make: Callable[[], Desk]) -> Desk:
    desk = make()
    desk.stop()
    return desk


def failed() -> Desk:
    desk = Desk("n1", "n2")
    desk.submit(max_restarts=0)
    desk.run()
    desk.fail("n2", exited(5, desk.now_s, error="assertion failed"))
    desk.stop()
    return desk


PHASES: dict[JobPhase, tuple[Callable[[], Desk], str, str]] = {
    JobPhase.QUEUED: (lambda: submitted("n1"), "", "megascale node start NAME"),
    JobPhase.PREPARING: (lambda: submitted("n1", "n2"), "", "megascale watch a"),
    JobPhase.STARTING: (lambda: started(AttemptPhase.PREPARED), "", "megascale watch a"),
    JobPhase.RUNNING: (lambda: started(AttemptPhase.RUNNING), "", ""),
    JobPhase.STOPPING: (cancelled, "CANCEL_REQUESTED", "megascale watch a"),
    JobPhase.SUSPENDED: (suspended, "SUSPEND_REQUESTED", "megascale resume a --reason REASON"),
    JobPhase.SUCCEEDED: (lambda: started(AttemptPhase.FINISHED), "", ""),
    JobPhase.FAILED: (failed, "WORKER_EXITED", "megascale logs a --rank 5 --attempt 1"),
    JobPhase.CANCELLED: (
        lambda: ended_by(cancelled), "CANCEL_REQUESTED", "megascale restart a --reason REASON",
    ),
}  # fmt: skip


@pytest.mark.parametrize("phase", JobPhase)
def test_every_phase_has_its_cause_and_what_may_be_done(phase: JobPhase) -> None:
    make, reason, command = PHASES[phase]
    desk = make()
    assert desk.job().phase is phase
    found = explained(desk)
    assert (found.cause.reason if found.cause is not None else "") == reason
    if command:
        assert command in [suggestion.command for suggestion in found.suggestions]
    else:
        assert not found.suggestions, "nothing needs to be done"
    if reason:
        check_cause(found, "")


def test_a_queued_job_is_shown_how_to_get_each_node_that_it_lacks() -> None:
    desk = Desk("n1", "n2", "n3")
    desk.submit()  # on n1 and n2
    desk.feed(CordonRequested(desk.now_s, "n3", "its link flaps", "ada"))
    config = replace(demo_job("b", spares=0), name="b")
    desk.feed(JobSubmitted(desk.now_s, config, "me"))
    assert desk.job("b").phase is JobPhase.QUEUED
    found = explained(desk, "b")
    commands = [suggestion.command for suggestion in found.suggestions]
    assert commands == [
        "megascale cancel a --reason REASON",
        "megascale uncordon n3 --reason REASON",
        "megascale nodes",
    ]
    assert "cordoned: its link flaps" in found.suggestions[1].text
    assert "it needs 2 nodes with 4 cpu devices" in found.sentence


def test_a_trouble_that_ends_no_attempt_is_the_cause_until_it_is_over() -> None:
    desk = started(AttemptPhase.RUNNING)
    seq = desk.job().log_seq

    def line(offset: int, reason: str) -> Audit:
        return Audit("a", seq + offset, desk.now_s, "driver", "jobs/a", reason, reason, attempt=1)

    desk.audit.append(line(1, "CHECKPOINT_FAILED"))
    found = explained(desk)
    assert found.cause is not None and found.cause.reason == "CHECKPOINT_FAILED"
    assert found.suggestions[0].command == "megascale checkpoint list a"
    desk.audit.append(line(2, "CHECKPOINT_COMMITTED"))
    assert explained(desk).cause is None


def test_a_job_that_stands_still_is_not_healthy() -> None:
    desk = started(AttemptPhase.RUNNING)
    desk.feed(Tick(desk.now_s, (("a", 1, 1),)))
    assert not explained(desk).suggestions
    desk.wait(POLICY.suspect_after_s)
    assert explained(desk).suggestions[0].command == "megascale logs a --rank 0"
    for slot in desk.job().slots:
        ages = {rank: 0.0 if rank != 6 else 7.0 for rank in slot.ranks}
        pages = tuple(
            RankStatus(rank, 1 if age_s == 0 else 0, "STEP", age_s) for rank, age_s in ages.items()
        )
        desk.report(slot.node, AttemptPhase.RUNNING, statuses=pages)
    found = explained(desk)
    assert "rank 6 on node n2" in found.sentence
    assert found.stall is not None and found.stall.held_up_by == "rank 6 on n2 holds it up"
    # People are shown it once it lasts: in the beginning a step is only long.
    shown_from_s = found.stall.limit_s * SHOWN_AFTER
    assert found.stall.still_s < shown_from_s
    message = wire.explanation_message(found, wire.types_pb2.Epoch())
    assert (message.still_s, message.held_up_by) == (0.0, "")
    desk.now_s += shown_from_s
    still = explained(desk)
    assert still.stall is not None
    message = wire.explanation_message(still, wire.types_pb2.Epoch())
    assert message.still_s == pytest.approx(still.stall.still_s)
    assert message.held_up_by == "rank 6 on n2 holds it up"
    assert found.suggestions[0].command == "megascale logs a --rank 6"


def test_a_node_that_is_not_alive_says_why() -> None:
    desk = submitted("n1", "n2", "n3")
    assert wire.node_message(desk.state, desk.state.nodes["n2"]).liveness_reason == ""
    node_dies(desk)
    found = wire.node_message(desk.state, desk.state.nodes["n2"])
    assert found.liveness_reason == "its link broke and its port refuses connections"
    desk.hello("n2", boot=2)
    assert wire.node_message(desk.state, desk.state.nodes["n2"]).liveness_reason == ""


def test_a_failed_job_names_the_way_out_in_its_row() -> None:
    desk = failed()
    (line,) = [line for line in desk.audit if line.reason == "JOB_FAILED"]
    assert "`megascale restart a --reason REASON` continues it at step 0" in line.outcome
    assert "`megascale update JOB.YAML --reason REASON`" in line.outcome


def test_no_sentence_stands_twice_in_an_explanation() -> None:
    desk = failed()
    found = explained(desk)
    assert found.cause is not None and found.cause.message in found.sentence
    body = found.text.partition("\n")[2]
    assert body.count(found.cause.message) == 1, "once as what happened"
    assert desk.job().reason not in body, "the end of the job stands in the first sentence"
    assert "ATTEMPT_STOPPED attempt 1 has stopped\n" in body


def test_a_failed_job_with_checkpoints_may_be_continued_from_them() -> None:
    desk = failed()
    job: Job = replace(desk.job(), committed_step=70)
    desk.state = replace(desk.state, jobs={"a": job})
    found = explained(desk).suggestions
    texts, commands = zip(*((each.text, each.command) for each in found), strict=True)
    assert "let it continue from step 70, once the cause is gone" in texts
    # The way out is the job itself: changed if it must be, then restarted.
    update, restart = "megascale update JOB.YAML --reason REASON", "megascale restart a"
    assert commands.index(update) < commands.index(f"{restart} --reason REASON")
    assert not any(command.startswith("megascale submit") for command in commands)


def failed_again(desk: Desk, step: int) -> None:
    """The attempt comes to ``step``, and rank 5 fails there."""
    desk.run()
    for number in range(1, step + 1):
        desk.feed(Tick(desk.now_s, (("a", desk.job().attempt, number),)))
    desk.fail("n2", exited(5, desk.now_s, error="vocab_size: 4096 is too small"))
    desk.stop()
    desk.wait(max(0.0, desk.job().not_before_s - desk.now_s))


def test_a_job_has_recovered_once_it_comes_further_than_before() -> None:
    desk = submitted("n1", "n2")
    assert explained(desk).setback is None
    failed_again(desk, 23)
    desk.run()
    first = explained(desk).setback
    assert first is not None and (first.failures, first.step) == (1, 23)
    assert "rank 5" in first.why and "has not come past step 23 again" in str(first)
    for step in (1, 23):
        desk.feed(Tick(desk.now_s, (("a", 2, step),)))
        assert explained(desk).setback is not None, "it repeats what it had done before"
    desk.feed(Tick(desk.now_s, (("a", 2, 24),)))
    assert explained(desk).setback is None


def test_repeated_failures_at_one_step_are_counted_with_their_cause() -> None:
    desk = submitted("n1", "n2")
    for _ in range(3):
        failed_again(desk, 23)
    desk.run()
    desk.feed(Tick(desk.now_s, (("a", 4, 20),)))
    found = explained(desk)
    assert found.setback is not None and found.setback.failures == 3
    said = "3 attempts in a row came no further than step 23; the newest failed because rank 5"
    assert said in found.sentence and "vocab_size: 4096 is too small" in found.sentence
    message = wire.explanation_message(found, wire.types_pb2.Epoch())
    assert (message.setback.failures, message.setback.step) == (3, 23)


def test_a_job_that_never_took_a_step_counts_each_attempt_once() -> None:
    desk = submitted("n1", "n2")
    failed_again(desk, 0)
    failed_again(desk, 0)
    desk.run()
    found = explained(desk).setback
    assert found is not None and (found.failures, found.step) == (2, 0)

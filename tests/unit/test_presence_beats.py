"""From a heartbeat to what the core gets: evidence, corrected clocks, values that are not known."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.harness.desk import Desk
from tests.harness.presence import arrived

from megascale.v1 import link_pb2, types_pb2
from megascale_driver.core.faults import blame
from megascale_driver.core.values.cluster import AttemptPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.presence import evidence, reports
from megascale_driver.presence.intake import ClockOffset, Intake, Seat
from megascale_driver.presence.lane import SLOW_PER_S, News

EPOCH = types_pb2.Epoch(cluster_generation=1, create_revision=3)
NS = 1_000_000_000


def working(ranks: int = 8) -> link_pb2.Heartbeat:
    """A node that trains."""
    beat = link_pb2.Heartbeat(
        epoch_seen=EPOCH, desired_version=2, job="a", attempt=1,
        phase=link_pb2.ATTEMPT_PHASE_RUNNING,
    )  # fmt: skip
    beat.logs.add(signature="x", role="root", count=1)
    item = beat.checkpoints.add(job="a")
    for rank in range(ranks):
        beat.workers.add(rank=rank, state=link_pb2.WORKER_STATE_RUNNING, pid=9, phase="STEP")
        item.sealed.add(rank=rank, attempt=1, step=1, layout_digest="d")
    return beat


def test_counters_times_steps_and_status_pages_are_no_evidence() -> None:
    beat = working()
    before = evidence.of(beat)
    beat.seq, beat.sent_at.seconds, beat.host.network_sent_bytes = 7, 5, 10**9
    beat.ack_received_at.seconds = 5
    beat.logs[0].count, beat.logs[0].last_at.seconds = 9, 7
    for worker in beat.workers:
        worker.step, worker.phase, worker.status_age.seconds = 99, "EVAL", 3
        worker.operations.add(group="dp", entered=4, completed=3)
    assert evidence.of(beat) == before


def changed(path: str) -> link_pb2.Heartbeat:
    beat = working()
    if path == "phase":
        beat.phase = link_pb2.ATTEMPT_PHASE_FINISHED
    elif path == "exit":
        beat.workers[3].state = link_pb2.WORKER_STATE_EXITED
    elif path == "error":
        beat.workers[3].error_kind = "BAD_JOB"
    elif path == "check":
        beat.checks.add(name="compute", verdict=types_pb2.CHECK_VERDICT_FAIL)
    elif path == "log":
        beat.logs.add(signature="y", role="secondary", count=1)
    elif path == "log of another rank":
        beat.logs[0].first_rank = 3
    elif path == "trace":
        beat.traces.add(profile="p", rank=1)
    elif path == "daemon":
        beat.checkpoint_daemon.restarts = 1
    elif path == "failure of a checkpoint":
        beat.checkpoints[0].failure.step = 4
    elif path == "failure of a replica":
        beat.checkpoints[0].replica_failure.step = 4
    elif path == "damage":
        beat.checkpoints[0].damaged.add(rank=1)
    else:
        setattr(beat, path, {"failure": "why", "store_endpoint": "h:1", "job": "b"}.get(path, 9))
    return beat


@pytest.mark.parametrize(
    "path",
    [
        *("phase", "exit", "error", "check", "trace", "daemon", "failure of a checkpoint"),
        *("failure of a replica", "damage", "failure", "store_endpoint", "job", "attempt"),
        *("log", "log of another rank"),
    ],
)
def test_whatever_decides_is_evidence(path: str) -> None:
    assert evidence.of(changed(path)).prompt != evidence.of(working()).prompt


@pytest.mark.parametrize("path", ["desired_version", "epoch"])
def test_which_order_a_node_has_seen_decides_while_it_is_idle(path: str) -> None:
    """The report of an idle node counts as its stop only if it has seen the order to stop."""
    for phase in link_pb2.AttemptPhase.values():
        beats = [working(), working()]
        for beat in beats:
            beat.phase = phase
        if path == "epoch":
            beats[1].epoch_seen.create_revision = 4
        else:
            beats[1].desired_version = 9
        before, after = (evidence.of(beat).prompt for beat in beats)
        idle = phase in (link_pb2.ATTEMPT_PHASE_UNSPECIFIED, link_pb2.ATTEMPT_PHASE_IDLE)
        assert (before != after) is idle, link_pb2.AttemptPhase.Name(phase)


def test_a_phase_that_passes_is_news_only_if_it_is_repeated() -> None:
    intake, seat = Intake(Policy()), Seat("n", "i", 100.0)
    intake.lane.opened(100.0, "n", "i")
    beat, at_s = link_pb2.Heartbeat(epoch_seen=EPOCH), [100.0]

    def news(phase: int, **changes: Any) -> News:
        at_s[0] += 5.0
        beat.phase, beat.seq = phase, beat.seq + 1  # type: ignore[assignment]
        for name, value in changes.items():
            setattr(beat, name, value)
        return intake.take(seat, arrived(beat), at_s[0])

    assert news(link_pb2.ATTEMPT_PHASE_IDLE) is News.DECIDES
    for phase in (link_pb2.ATTEMPT_PHASE_PREPARING, link_pb2.ATTEMPT_PHASE_STARTING):
        assert news(phase, job="a", attempt=1) is News.NONE
        assert news(phase) is News.PROGRESS, "it lasts"
        assert [news(phase) for _ in range(3)] == [News.NONE] * 3
        assert news(link_pb2.ATTEMPT_PHASE_PREPARED) is News.DECIDES
        assert news(phase) is News.NONE
        assert news(link_pb2.ATTEMPT_PHASE_PREPARED) is News.NONE, "the core has that already"
        assert news(phase) is News.NONE
        assert news(phase, failure="why") is News.NONE, "another state that passes"
        assert news(link_pb2.ATTEMPT_PHASE_FAILED) is News.DECIDES
        beat.failure = ""


def test_workers_that_end_one_after_the_other_decide_with_the_phase_that_follows() -> None:
    intake, seat, beat = Intake(Policy()), Seat("n", "i", 100.0), working()
    intake.lane.opened(100.0, "n", "i")
    found = [intake.take(seat, arrived(beat), 100.0)]
    for worker in beat.workers:
        worker.state, worker.exit_status = link_pb2.WORKER_STATE_EXITED, -15
        found.append(intake.take(seat, arrived(beat), 100.0 + len(found) / 10))
    assert found == [News.DECIDES] + [News.NONE] * 8
    beat.phase = link_pb2.ATTEMPT_PHASE_FAILED
    assert intake.take(seat, arrived(beat), 102.0) is News.DECIDES


def test_a_silent_node_is_heard_again_whatever_it_does() -> None:
    lane = Intake(Policy()).lane
    lane.opened(100.0, "n", "i")
    assert lane.beat(100.0, "n", "idle") is News.DECIDES
    assert [found.node for found in lane.due(109.0, {})] == ["n"]
    assert lane.beat(110.0, "n", "prepares", passing=True) is News.DECIDES


def variants(message: Any) -> Iterator[Any]:
    """Copies of the message, each with another value in one field, at any depth."""
    for field in message.DESCRIPTOR.fields:
        parts = []
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            copied = type(message)()
            copied.CopyFrom(message)
            getattr(copied, field.name)["key"] = "x"
            yield copied
        elif field.message_type is not None:
            parts = list(getattr(message, field.name)) if field.is_repeated else []
            if not field.is_repeated:
                parts = [getattr(message, field.name)]
            if field.is_repeated:
                copied = type(message)()
                copied.CopyFrom(message)
                getattr(copied, field.name).add()
                yield copied
            for at, part in enumerate(parts):
                for other in variants(part):
                    copied = type(message)()
                    copied.CopyFrom(message)
                    held = getattr(copied, field.name)
                    (held[at] if field.is_repeated else held).CopyFrom(other)
                    yield copied
        elif not field.is_repeated:
            value = getattr(message, field.name)
            copied = type(message)()
            copied.CopyFrom(message)
            setattr(copied, field.name, value + "x" if isinstance(value, str) else value + 1)
            yield copied


@pytest.mark.parametrize("phase", ["RUNNING", "PREPARED"])
@pytest.mark.parametrize("slow_due", [True, False])
def test_no_evidence_hides_behind_an_equal_signature(phase: str, slow_due: bool) -> None:
    beat = working(2)
    beat.phase = link_pb2.AttemptPhase.Value(f"ATTEMPT_PHASE_{phase}")
    beat.workers[1].state, beat.workers[1].error_kind = link_pb2.WORKER_STATE_EXITED, "DATA"
    beat.checks.add(name="compute", verdict=types_pb2.CHECK_VERDICT_FAIL)
    beat.traces.add(profile="p", rank=1)
    beat.checkpoints[0].damaged.add(rank=1)
    beat.checkpoints[0].replicas.add(rank=1)
    beat.checkpoints[0].skipped_step = 3

    def signature(of: link_pb2.Heartbeat) -> bytes:
        found = arrived(of)
        return found.signature(memory=slow_due or not found.at_work)

    hidden = different = 0
    for other in variants(beat):
        if evidence.of(other, slow_due) != evidence.of(beat, slow_due):
            different += 1
            assert signature(other) != signature(beat), f"not among the signs: {other}"
        elif signature(other) == signature(beat):
            hidden += 1
    assert different > 30 and hidden > 15, "counters, times and status pages change no signature"


def test_a_heartbeat_that_repeats_the_one_before_is_not_evaluated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluated = [0]
    original = evidence.of

    def counted(*arguments: Any) -> evidence.Evidence:
        evaluated[0] += 1
        return original(*arguments)

    monkeypatch.setattr(evidence, "of", counted)
    intake = Intake(Policy())
    seats = {name: Seat(name, "i", 100.0) for name in "ab"}
    for name in seats:
        intake.lane.opened(100.0, name, "i")

    def news(name: str, beat: link_pb2.Heartbeat, now_s: float) -> News:
        beat.seq += 1
        beat.sent_at.seconds, beat.workers[0].step = int(now_s), beat.seq
        return intake.take(seats[name], arrived(beat), now_s)

    beats = {name: working() for name in seats}
    for second in range(20):
        for name in seats:
            assert news(name, beats[name], 100.0 + second) is (
                News.NONE if second else News.DECIDES
            )
    assert evaluated[0] == 2, "the first of each"
    # A fact that the other reported is lost with its link: it is news again.
    for beat in beats.values():
        beat.checkpoints[0].committed_step = 7
    assert [news(name, beats[name], 120.0) for name in seats] == [News.PROGRESS, News.NONE]
    intake.lane.closed("a", "i")
    assert news("b", beats["b"], 121.0) is News.PROGRESS
    assert news("b", beats["b"], 122.0) is News.NONE
    before = evaluated[0]
    intake.lane.forget("b")
    assert news("b", beats["b"], 123.0) is News.DECIDES and evaluated[0] == before + 1


def test_what_lies_in_memory_decides_only_between_attempts() -> None:
    beat = working()
    beat.checkpoints[0].sealed[0].step = 2
    assert evidence.of(beat).prompt == evidence.of(working()).prompt
    assert evidence.of(beat).slow != evidence.of(working()).slow
    idle = working()
    idle.phase = beat.phase = link_pb2.ATTEMPT_PHASE_PREPARED
    assert evidence.of(beat).prompt != evidence.of(idle).prompt


def test_what_lies_in_memory_is_not_even_read_while_it_is_not_due() -> None:
    beat = working()
    assert evidence.of(beat, slow_due=False).slow is evidence.UNREAD
    beat.phase = link_pb2.ATTEMPT_PHASE_IDLE
    assert evidence.of(beat, slow_due=False) == evidence.of(beat), "between attempts it decides"
    beat.phase = link_pb2.ATTEMPT_PHASE_RUNNING
    intake, seat = Intake(Policy()), Seat("n", "i", 100.0)
    intake.lane.opened(100.0, "n", "i")

    def news(step: int, now_s: float) -> News:
        beat.checkpoints[0].sealed[0].step = step
        return intake.take(seat, arrived(beat), now_s)

    pause_s = 1.0 / SLOW_PER_S  # with one link
    assert news(1, 100.0) is News.DECIDES, "the first"
    assert news(2, 100.0 + pause_s / 2) is News.NONE
    assert news(3, 100.0 + pause_s * 1.1) is News.PROGRESS
    assert news(4, 100.0 + pause_s * 1.2) is News.NONE
    assert news(5, 100.0 + pause_s * 2.2) is News.PROGRESS


def test_evidence_costs_little() -> None:
    beat = working()
    began_s = time.process_time()
    for _ in range(2000):
        evidence.of(beat)
    assert time.process_time() - began_s < 0.2, "100 us each; here about 10"


@pytest.mark.parametrize("skew_s", [-30.0, 0.0, 3600.0])
def test_the_offset_is_that_of_the_shortest_round_trip(skew_s: float) -> None:
    rng, clock = random.Random(5), ClockOffset()
    now_ns = 10**18
    for number in range(30):
        there, back = (int(rng.uniform(1e-4, 0.2) * NS) for _ in range(2))
        if number == 25:
            there = back = NS // 10_000
        node_sent_ns = now_ns - int(skew_s * NS)
        received_ns, sent_ns = now_ns + there, now_ns + there + 1000
        clock.acknowledged(node_sent_ns, received_ns)
        clock.returned(received_ns, sent_ns, sent_ns + back - int(skew_s * NS))
        now_ns += NS
    assert clock.offset_s == pytest.approx(skew_s, abs=1e-4)


def test_timestamps_that_do_not_fit_give_no_offset() -> None:
    clock = ClockOffset()
    clock.returned(5, 6, 7)
    clock.acknowledged(0, 10)
    clock.returned(10, 11, 12)
    clock.acknowledged(100, 20)
    clock.returned(20, 21, 50)  # the node's clock went back meanwhile
    assert clock.offset_s == 0.0
    for number in range(1000):
        clock.acknowledged(1, number)
    assert len(clock._pending) < 10, "acknowledgements that never return are forgotten"


def heard(
    intake: Intake, seat: Seat, skew_s: float, now_s: float, beat: link_pb2.Heartbeat
) -> None:
    """Two heartbeats of a node whose clock is ``skew_s`` ahead, the second after the answer."""
    beat.sent_at.FromNanoseconds(int((now_s - 0.001 + skew_s) * NS))
    intake.take(seat, arrived(beat), now_s)
    second = link_pb2.Heartbeat()
    second.CopyFrom(beat)
    second.sent_at.FromNanoseconds(int((now_s + 1 + skew_s) * NS))
    second.ack_driver_received_at.FromNanoseconds(int(now_s * 1e9))
    second.ack_driver_sent_at.FromNanoseconds(int(now_s * 1e9))
    second.ack_received_at.FromNanoseconds(int((now_s + 0.001 + skew_s) * NS))
    intake.take(seat, arrived(second), now_s + 1.002)


def test_the_culprit_is_the_first_by_the_drivers_clock_whatever_the_nodes_clocks_say() -> None:
    desk = Desk("n1", "n2")
    desk.submit()
    desk.run()
    intake = Intake(Policy())
    # n2 failed first. n1, which failed a second later, has a clock that is 30 s behind.
    for name, failed_s, skew_s in (("n1", 1.0, -30.0), ("n2", 0.0, 0.0)):
        node = desk.state.nodes[name]
        seat = Seat(name, node.identity.incarnation, desk.now_s)
        intake.lane.opened(desk.now_s, name, seat.incarnation)
        beat = link_pb2.Heartbeat(
            epoch_seen=EPOCH, desired_version=node.desired_version, job="a", attempt=1,
            phase=link_pb2.ATTEMPT_PHASE_FAILED,
        )  # fmt: skip
        worker = beat.workers.add(rank=0, state=link_pb2.WORKER_STATE_EXITED, exit_status=1)
        worker.exited_at.FromNanoseconds(int((desk.now_s + failed_s + skew_s) * NS))
        heard(intake, seat, skew_s, desk.now_s + 2.0, beat)
        event = intake.report(seat, EPOCH, desk.now_s)
        assert event is not None and event.report.phase is AttemptPhase.FAILED
        assert event.report.workers[0].exited_at_s == pytest.approx(desk.now_s + failed_s, abs=0.01)
        desk.feed(event)
    cause = blame.culprit(desk.job().current.faults)
    assert cause is not None and cause.node == "n2"


def test_an_oversized_heartbeat_keeps_its_node_alive() -> None:
    intake = Intake(Policy())
    seat = Seat("n1", "i", 100.0)
    intake.lane.opened(100.0, "n1", "i")
    assert intake.take(seat, arrived(working()), 101.0) is News.DECIDES
    assert [intake.take(seat, None, 102.0 + i) for i in range(20)] == [News.NONE] * 20
    assert intake.lane.last_beat_s("n1") == 121.0 and seat.beat is not None


def test_a_value_that_this_build_does_not_know_is_refused() -> None:
    beat = working()
    beat.phase = 77  # type: ignore[assignment]
    with pytest.raises(ValueError, match="77"):
        reports.report(beat, EPOCH)


def test_what_a_node_reports_loses_what_a_terminal_would_obey() -> None:
    hostile = "\x1b[2J\x9b31m\u202eend\x07"
    beat = link_pb2.Heartbeat(job="a", attempt=1, phase=link_pb2.ATTEMPT_PHASE_FAILED)
    beat.failure = hostile
    beat.workers.add(rank=0, error=f"first\n{hostile}", error_kind=hostile * 100)
    beat.checks.add(name="x", detail=hostile)
    beat.logs.add(signature="x", sample_line=hostile)
    found = reports.report(beat, types_pb2.Epoch())
    assert hostile not in (found.failure, found.workers[0].error)
    assert found.failure == "\\x1b[2J\\x9b31m\\u202eend\\x07"
    assert found.workers[0].error == f"first\n{found.failure}"
    assert len(found.workers[0].error_kind) <= 4 * reports.MAX_LABEL
    told = (found.checks[0].detail, found.workers[0].error_kind, found.logs[0].finding.sample)
    assert not {"\x1b", "\x9b", "\u202e"} & set("".join(told))

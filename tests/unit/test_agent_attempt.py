"""The node's state machine: fencing, idempotence, and that it reaches the newest desired state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.v1 import link_pb2, types_pb2
from megascale_common.service.errors import StaleStateError
from megascale_executor.agent import attempt
from megascale_executor.agent.attempt import NO_ATTEMPT, AttemptAction, AttemptKey, AttemptState

PHASES = {
    "IDLE": link_pb2.DESIRED_PHASE_IDLE,
    "PREPARE": link_pb2.DESIRED_PHASE_PREPARE,
    "START": link_pb2.DESIRED_PHASE_START,
}


def desired(
    phase: str, number: int = 1, *, version: int = 1, revision: int = 1
) -> link_pb2.DesiredState:
    made = link_pb2.DesiredState(
        epoch=types_pb2.Epoch(cluster_generation=1, create_revision=revision),
        version=version,
        phase=PHASES[phase],
    )
    if phase != "IDLE":
        made.assignment.job, made.assignment.attempt = "job", number
    return made


def carry_out(state: AttemptState) -> list[AttemptAction]:
    """Do what the state asks for until it asks for nothing; everything succeeds."""
    done: list[AttemptAction] = []
    while (action := state.next_action()) is not AttemptAction.NOTHING:
        assert len(done) < 5, f"never comes to rest: {done}"
        done.append(action)
        if action is AttemptAction.STOP:
            state.stopped()
        elif action is AttemptAction.PREPARE:
            state.begin(attempt.PREPARING)
            state.prepared("host:1", ())
        elif action is AttemptAction.START:
            state.begin(attempt.STARTING)
            state.running()
        else:
            state.begin(attempt.PREPARING)
            state.fail("not prepared")
    return done


def test_happy_path_and_idempotence() -> None:
    state = AttemptState()
    assert carry_out(state) == []
    state.accept(desired("PREPARE", version=1))
    assert carry_out(state) == [AttemptAction.PREPARE] and state.phase == attempt.PREPARED
    state.accept(desired("PREPARE", version=2))
    assert carry_out(state) == []
    state.accept(desired("START", version=3))
    assert carry_out(state) == [AttemptAction.START] and state.phase == attempt.RUNNING
    state.accept(desired("START", version=4))
    assert carry_out(state) == []
    state.finished()
    assert carry_out(state) == [] and state.phase == attempt.FINISHED
    state.accept(desired("IDLE", version=5))
    assert carry_out(state) == [AttemptAction.STOP] and state.phase == attempt.IDLE


def test_a_node_that_finishes_reports_why_the_last_step_is_not_saved() -> None:
    state = AttemptState()
    state.accept(desired("PREPARE", version=1))
    carry_out(state)
    state.accept(desired("START", version=2))
    carry_out(state)
    state.finished("the disk is full")
    assert (state.phase, state.failure) == (attempt.FINISHED, "the disk is full")
    state.accept(desired("IDLE", version=3))
    carry_out(state)
    assert state.failure == ""


def test_start_waits_for_a_preparation_under_way() -> None:
    state = AttemptState()
    state.accept(desired("PREPARE"))
    state.begin(attempt.PREPARING)
    state.accept(desired("START", version=2))
    assert state.next_action() is AttemptAction.NOTHING
    state.prepared("", ())
    assert state.next_action() is AttemptAction.START


def test_newer_attempt_stops_the_older_first() -> None:
    state = AttemptState()
    state.accept(desired("PREPARE", 1))
    carry_out(state)
    state.accept(desired("PREPARE", 2, version=2))
    assert carry_out(state) == [
        AttemptAction.STOP,
        AttemptAction.PREPARE,
    ] and state.key == AttemptKey("job", 2)


def test_start_of_an_attempt_never_prepared_fails() -> None:
    state = AttemptState()
    state.accept(desired("START", 4))
    assert carry_out(state) == [AttemptAction.REFUSE_START] and state.phase == attempt.FAILED
    state.accept(desired("START", 4, version=2))
    assert carry_out(state) == []


def test_first_failure_stands_and_late_news_do_not_undo_it() -> None:
    state = AttemptState()
    state.accept(desired("PREPARE"))
    carry_out(state)
    state.fail("first")
    state.fail("second")
    state.running()
    state.finished()
    assert (state.phase, state.failure) == (attempt.FAILED, "first")


@pytest.mark.parametrize(("revision", "version"), [(4, 9), (5, 6)])
def test_stale_desired_states_are_refused(revision: int, version: int) -> None:
    state = AttemptState()
    state.accept(desired("PREPARE", version=7, revision=5))
    with pytest.raises(StaleStateError):
        state.accept(desired("IDLE", version=version, revision=revision))
    assert state.wanted == AttemptKey("job", 1)


def test_a_new_epoch_counts_versions_anew() -> None:
    state = AttemptState()
    state.accept(desired("PREPARE", version=70, revision=5))
    state.accept(desired("IDLE", version=1, revision=6))
    assert state.wanted == NO_ATTEMPT


@pytest.mark.parametrize(
    "phase", [link_pb2.DESIRED_PHASE_UNSPECIFIED, link_pb2.DESIRED_PHASE_PREPARE]
)
def test_senseless_desired_states_are_refused(phase: link_pb2.DesiredPhase.ValueType) -> None:
    with pytest.raises(ValueError, match="desired state"):
        AttemptState().accept(link_pb2.DesiredState(version=1, phase=phase))


wishes = st.tuples(
    st.sampled_from(sorted(PHASES)), st.integers(1, 3), st.integers(1, 3), st.integers(1, 6)
)


@given(st.lists(st.tuples(wishes, st.booleans(), st.booleans()), max_size=12))
def test_comes_to_what_the_newest_epoch_and_version_want(
    steps: list[tuple[tuple[str, int, int, int], bool, bool]],
) -> None:
    state, newest = AttemptState(), (0, 0)
    for (phase, number, revision, version), work_now, break_down in steps:
        wish = desired(phase, number, version=version, revision=revision)
        if (revision, version) >= newest:
            state.accept(wish)
            newest, last = (revision, version), wish
        else:
            with pytest.raises(StaleStateError):
                state.accept(wish)
        assert (state.epoch_seen.create_revision, state.desired.version) == newest
        if work_now:
            carry_out(state)
        if break_down and state.key != NO_ATTEMPT:
            state.fail("broken")
    if not steps:
        return
    carry_out(state)
    if last.phase == link_pb2.DESIRED_PHASE_IDLE:
        assert (state.key, state.phase) == (NO_ATTEMPT, attempt.IDLE)
    else:
        assert state.key == AttemptKey("job", last.assignment.attempt)
        assert state.phase in (attempt.PREPARED, attempt.RUNNING, attempt.FAILED)

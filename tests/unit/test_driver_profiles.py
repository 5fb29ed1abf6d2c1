"""Profiles in the driver's core: steps, commands to nodes, refusals, the end of each trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.desk import POLICY, Desk, exited

from megascale_driver.core.nodes.profiles import STEPS_IN_PROGRESS
from megascale_driver.core.values.cluster import AttemptPhase, ProfileCommand, TraceReport
from megascale_driver.core.values.events import (
    CancelRequested,
    ProfileCancelRequested,
    ProfileRequested,
    RequestKey,
    Tick,
)
from megascale_driver.core.values.job import Job, JobPhase, Profile, TraceState
from megascale_driver.journal import codec

RUNNING = AttemptPhase.RUNNING
STEP_S = 0.5


def running() -> Desk:
    """Job a runs ranks 0-3 on n1 and 4-7 on n2."""
    desk = Desk("n1", "n2")
    desk.submit()
    desk.run()
    return desk


def asked(desk: Desk, **changes: Any) -> ProfileRequested:
    """Two steps of ranks 1 and 6, asked for after step 10."""
    event = ProfileRequested(desk.now_s, "a", 0, 2, (1, 6), 10, STEP_S, "slow", "ada")
    return replace(event, **changes)


def profile(desk: Desk) -> Profile:
    found = desk.job().profile
    assert found is not None
    return found


def command(desk: Desk, node: str) -> ProfileCommand | None:
    return desk.state.nodes[node].desired.profile


def report_traces(desk: Desk, node: str, *reports: TraceReport) -> None:
    desk.report(node, RUNNING, traces=reports)


def states(desk: Desk) -> list[TraceState]:
    return [trace.state for trace in profile(desk).traces]


def test_the_ranks_nodes_get_the_command_and_each_trace_is_settled_once() -> None:
    desk = running()
    assert desk.feed(asked(desk)) == ""
    found = profile(desk)
    assert (found.first_step, found.last_step) == (
        10 + STEPS_IN_PROGRESS + 4,
        10 + STEPS_IN_PROGRESS + 5,
    )
    assert [(trace.rank, trace.node) for trace in found.traces] == [(1, "n1"), (6, "n2")]
    assert PurePosixPath(found.traces[1].path).name == "trace-steps-16-17-rank-00006.json.gz"
    first, second = command(desk, "n1"), command(desk, "n2")
    assert first is not None and second is not None
    assert (first.ranks, second.ranks) == ((1,), (6,))
    assert (first.id, first.first_step, first.last_step) == (
        second.id,
        second.first_step,
        second.last_step,
    )

    written = TraceReport(found.id, 1, TraceState.WRITTEN, 1234)
    for _ in range(3):  # heartbeats repeat it
        report_traces(desk, "n1", written)
    assert states(desk) == [TraceState.WRITTEN, TraceState.PENDING] and command(desk, "n1") is None
    report_traces(
        desk, "n2", TraceReport(found.id, 6, TraceState.SKIPPED, detail="the command came late")
    )
    assert states(desk) == [TraceState.WRITTEN, TraceState.SKIPPED] and command(desk, "n2") is None
    lines = [line for line in desk.audit if line.reason.startswith("PROFILE_")]
    assert [(line.reason, line.actor) for line in lines] == [
        ("PROFILE_REQUESTED", "ada"),
        ("PROFILE_WRITTEN", "nodes/n1"),
        ("PROFILE_MISSED", "nodes/n2"),
    ]
    assert "steps 16 to 17 on ranks 1, 6: slow" in lines[0].message
    assert (
        "node n1" in lines[1].message and f"{found.traces[0].path} (1234 bytes)" in lines[1].message
    )
    assert (
        lines[1].evidence[0].uri == found.traces[0].path
        and "the command came late" in lines[2].message
    )
    assert desk.feed(asked(desk, newest_step=20)) == "", "the next profile may be requested now"


def test_reports_of_foreign_ranks_or_older_profiles_change_nothing() -> None:
    desk = running()
    desk.feed(asked(desk))
    own_id = profile(desk).id
    report_traces(desk, "n2", TraceReport(own_id, 1, TraceState.WRITTEN))
    report_traces(desk, "n1", TraceReport("older", 1, TraceState.WRITTEN))
    report_traces(desk, "n1", TraceReport(own_id, 0, TraceState.WRITTEN))
    report_traces(desk, "n1", TraceReport(own_id, 1, TraceState.PENDING))
    assert states(desk) == [TraceState.PENDING] * 2
    assert "PROFILE_WRITTEN" not in desk.reasons()


@pytest.mark.parametrize(
    ("refusal", "words", "changes"),
    [
        ("JOB_NOT_FOUND", "", {"job": "b"}),
        ("NO_STEP_YET", "attempt 1", {"newest_step": 0}),
        ("NO_STEP_YET", "attempt 1", {"step_time_s": 0.0}),
        ("FIRST_STEP_PASSED", "step 10 is done, and the request reaches all ranks in time from "
         "step 16 on", {"first_step": 15}),
        ("STEPS_BEYOND_END", "ends with step 100000", {"newest_step": 99_998}),
        ("STEPS_TOO_FAR", "within 60", {"first_step": 9000}),
    ],
)  # fmt: skip
def test_what_cannot_be_profiled_is_refused_with_the_numbers(
    refusal: str, words: str, changes: dict[str, Any]
) -> None:
    desk = running()
    lines = len(desk.audit)
    _, outcome = desk.ask(asked(desk, **changes))
    assert outcome.refusal == refusal and words in outcome.refusal_detail
    assert desk.feed(asked(desk, **changes)) == refusal
    assert desk.job().profile is None and len(desk.audit) == lines


def test_one_at_a_time_on_a_running_job_and_a_repeated_request_is_the_same_one() -> None:
    desk = Desk("n1", "n2")
    desk.submit()
    assert desk.feed(asked(desk)) == "JOB_NOT_RUNNING"
    desk.run()
    key = RequestKey("r1", "d1")
    assert desk.feed(asked(desk, request=key)) == "" == desk.feed(asked(desk, request=key))
    assert profile(desk).id == "r1" and desk.reasons().count("PROFILE_REQUESTED") == 1
    assert desk.feed(asked(desk, request=RequestKey("r2", "d1"))) == "PROFILE_PENDING"


def test_an_attempt_that_ends_loses_missing_traces_and_the_next_does_not_inherit_them() -> None:
    desk = running()
    desk.feed(asked(desk))
    report_traces(desk, "n1", TraceReport(profile(desk).id, 1, TraceState.WRITTEN, 1))
    desk.fail("n2", exited(5, desk.now_s))
    assert desk.job().phase is JobPhase.STOPPING
    assert states(desk) == [TraceState.WRITTEN, TraceState.LOST]
    (line,) = [line for line in desk.audit if line.reason == "PROFILE_MISSED"]
    assert "rank 6: attempt 1 ended first" in line.message
    desk.stop()
    desk.run()
    assert (desk.job().attempt, command(desk, "n1"), command(desk, "n2")) == (2, None, None)
    assert desk.feed(asked(desk)) == "" and profile(desk).attempt == 2


def until(desk: Desk, at_s: float) -> None:
    """Time passes in which the nodes are alive and report no trace."""
    while desk.now_s + 1.0 <= at_s:
        desk.wait(1.0)
        for node in ("n1", "n2"):
            desk.report(node, RUNNING)


def test_a_cancelled_job_loses_its_profile() -> None:
    desk = running()
    desk.feed(asked(desk))
    desk.feed(CancelRequested(desk.now_s, "a", "enough", "ada"))
    assert states(desk) == [TraceState.LOST] * 2


def test_silent_ranks_are_given_up_at_once_where_they_cannot_have_begun() -> None:
    desk = running()
    desk.feed(asked(desk))
    limit_s = profile(desk).not_after_s + POLICY.profile_grace_s
    until(desk, limit_s - 1.0)
    assert states(desk) == [TraceState.PENDING] * 2
    assert desk.feed(asked(desk)) == "PROFILE_PENDING"
    until(desk, limit_s + 1.0)
    assert states(desk) == [TraceState.SKIPPED] * 2 and command(desk, "n1") is None
    assert "step 16 was not reached in time" in profile(desk).traces[0].detail
    assert desk.feed(asked(desk)) == "", "the next profile may be requested now"


def test_silent_ranks_that_may_have_begun_get_the_time_to_write() -> None:
    desk = running()
    desk.feed(asked(desk))
    desk.feed(Tick(desk.now_s, (("a", 1, profile(desk).first_step),)))
    limit_s = profile(desk).not_after_s + POLICY.profile_write_s
    until(desk, limit_s - 1.0)
    assert states(desk) == [TraceState.PENDING] * 2
    until(desk, limit_s + 1.0)
    assert states(desk) == [TraceState.LOST] * 2 and command(desk, "n1") is None
    assert desk.feed(asked(desk, newest_step=30)) == ""


def test_a_profile_is_cancelled_once_and_the_next_may_follow() -> None:
    desk = running()
    cancel = ProfileCancelRequested(desk.now_s, "a", "wrong steps", "ada", RequestKey("c1", "d"))
    assert desk.feed(cancel) == "NO_PROFILE"
    desk.feed(asked(desk))
    report_traces(desk, "n1", TraceReport(profile(desk).id, 1, TraceState.WRITTEN, 1))
    for _ in range(2):  # the client sends it again
        assert desk.feed(cancel) == ""
    assert states(desk) == [TraceState.WRITTEN, TraceState.SKIPPED]
    assert command(desk, "n2") is None, "its workers are ordered not to begin"
    (line,) = [line for line in desk.audit if line.reason == "PROFILE_CANCELLED"]
    assert "on rank 6: wrong steps" in line.message and line.actor == "ada"
    assert desk.feed(asked(desk)) == ""
    assert desk.feed(replace(cancel, job="other", request=None)) == "JOB_NOT_FOUND"


def test_a_profile_outlives_the_leader() -> None:
    desk = running()
    desk.feed(asked(desk))
    job = desk.job()
    again = codec.load(Job, codec.dump(job), config=job.config, attempts=job.attempts)
    assert again.profile == job.profile


@given(
    newest=st.integers(1, 10**6),
    step_s=st.floats(1e-4, 120.0),
    steps=st.integers(1, 20),
    later=st.integers(-5, 2000),
)
def test_the_chosen_steps_are_ahead_of_any_rank_when_the_command_arrives(
    newest: int, step_s: float, steps: int, later: int
) -> None:
    desk = running()
    event = asked(desk, newest_step=newest, step_time_s=step_s, steps=steps)
    if desk.feed(event):
        return
    found = profile(desk)
    assert found.last_step - found.first_step + 1 == steps
    lead = found.first_step - newest - STEPS_IN_PROGRESS
    assert lead * step_s >= POLICY.profile_lead_s > (lead - 1) * step_s
    assert found.not_after_s > desk.now_s + (found.last_step - newest) * step_s
    other = running()
    named = replace(event, first_step=max(found.first_step + later, 1), now_s=other.now_s)
    refusal = other.feed(named)
    assert (refusal == "FIRST_STEP_PASSED") == (later < 0)
    if not refusal:
        assert profile(other).first_step == named.first_step

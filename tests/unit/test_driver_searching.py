"""The core's search for a culprit that no fault names: rounds, verdicts, over-eviction, its end."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

import pytest
from tests.harness.desk import POLICY, Desk, exited

from megascale_driver.analysis.divergence import Divergence, DivergenceKind, StepSample
from megascale_driver.analysis.group_search import Answer
from megascale_driver.core.jobs.timers import next_s
from megascale_driver.core.values.cluster import AttemptPhase, Node
from megascale_driver.core.values.events import (
    CancelRequested,
    CheckGroup,
    GroupChecked,
    LeaderStarted,
    LossDiverged,
    PolicyRequested,
)
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.journal import codec

SYMPTOM = {"kind": "COLLECTIVE", "error": "peer closed"}


def started(*nodes: str, spares: int = 0) -> Desk:
    """A job that runs on the first nodes, and loses all its peers at once."""
    desk = Desk(*nodes)
    desk.submit(spares=spares)
    desk.run()
    return desk


def all_fail(desk: Desk) -> None:
    for slot in desk.job().slots:
        desk.fail(slot.node, exited(slot.ranks[0], desk.now_s, **SYMPTOM))  # type: ignore[arg-type]
    desk.stop(search=False)


def idle(desk: Desk, seconds: float) -> None:
    """Time passes; every node beats."""
    until_s = desk.now_s + seconds
    while desk.now_s < until_s:
        desk.wait(min(4.0, until_s - desk.now_s))
        for name in desk.state.nodes:
            if desk.job().phase in (JobPhase.STOPPING, JobPhase.QUEUED):
                desk.report(name, AttemptPhase.IDLE)


def asked(desk: Desk) -> list[CheckGroup]:
    """The groups of the newest round."""
    groups = [effect for effect in desk.effects if isinstance(effect, CheckGroup)]
    return [each for each in groups if each.round == groups[-1].round]


def answer(
    desk: Desk,
    bad: Collection[str] = (),
    links: Collection[tuple[str, str]] = (),
    silent: Collection[str] = (),
) -> None:
    """Answer all groups of the round."""
    for group in asked(desk):
        names = {member.node for member in group.members}
        broken = bool(names & {*bad, *silent}) or any(set(link) <= names for link in links)
        answers = dict.fromkeys(names, Answer.FAIL if broken else Answer.PASS)
        answers |= dict.fromkeys(names & set(silent), Answer.SILENT)
        details = {name: "a known sum is wrong" for name in names & set(bad)}
        key = (group.job, group.attempt, group.round, group.group)
        desk.feed(GroupChecked(desk.now_s, *key, answers, details))


def search(desk: Desk, bad: Collection[str] = (), **faults: Collection[object]) -> int:
    """Answer until the search is over; the number of rounds."""
    for rounds in range(1, 30):
        answer(desk, bad, **faults)  # type: ignore[arg-type]
        if desk.job().phase is not JobPhase.STOPPING:
            return rounds
    raise AssertionError("the search does not end")


def line(desk: Desk, reason: str) -> str:
    (found,) = [each for each in desk.audit if each.reason == reason]
    return f"{found.mode} {found.policy}: {found.message} -> {found.outcome}"


def enforce(desk: Desk, rule: str, mode: str = "ENFORCE") -> None:
    desk.feed(PolicyRequested(desk.now_s, rule, mode, "we trust it", "ops"))


def test_nodes_that_all_pass_cost_one_round_and_the_next_attempt_follows() -> None:
    desk = started("n1", "n2")
    all_fail(desk)
    assert desk.job().phase is JobPhase.STOPPING
    assert "check each other (round 1)" in desk.job().reason
    (group,) = asked(desk)
    assert [(m.node, m.incarnation, m.devices) for m in group.members] == [
        ("n1", "n1-1", (0, 1, 2, 3)),
        ("n2", "n2-1", (0, 1, 2, 3)),
    ]
    assert search(desk) == 1
    assert (desk.job().phase, desk.job().attempt) == (JobPhase.PREPARING, 2)
    assert "no node and no link fails now" in line(desk, "GROUP_CHECK_ENDED")
    assert desk.reasons().index("GROUP_CHECK_ENDED") < desk.reasons().index("ATTEMPT_STOPPED")


@pytest.mark.parametrize("how", ["bad", "silent"])
def test_the_node_that_fails_with_everybody_is_quarantined_and_a_spare_takes_over(
    how: str,
) -> None:
    desk = started("n1", "n2", "n3", spares=1)
    all_fail(desk)
    assert search(desk, **{how: {"n2"}}) <= 4
    assert desk.disposition("n2") == "QUARANTINED"
    assert {slot.node for slot in desk.job().slots} == {"n1", "n3"}
    evicted = line(desk, "NODE_EVICTED")
    assert evicted.startswith("ENFORCE group-check: node n2 is quarantined: its checks with n1, n3")
    assert ("a known sum is wrong" in evicted) == (how == "bad")
    desk.hello("n2", boot=2)  # what failed may have been fixed by a restart
    assert desk.disposition("n2") == "SCHEDULABLE"


def test_a_bad_node_is_only_logged_while_the_rule_is_observed() -> None:
    desk = started("n1", "n2", "n3", spares=1)
    enforce(desk, "group-check", "OBSERVE")
    all_fail(desk)
    search(desk, {"n2"})
    assert desk.disposition("n2") == "SCHEDULABLE" and not desk.job().evicted
    assert line(desk, "NODE_EVICTED").startswith("OBSERVE group-check: node n2 is not evicted")


def test_a_bad_link_is_said_and_nobody_is_evicted() -> None:
    desk = started("n1", "n2", "n3", spares=1)
    all_fail(desk)
    search(desk, links={("n1", "n2")})
    assert not desk.job().evicted
    assert "nodes n1 and n2 fail together, and each passes" in line(desk, "LINK_SUSPECTED")
    assert "NODE_EVICTED" not in desk.reasons()


def test_of_two_nodes_without_a_third_the_group_is_named_and_nothing_follows() -> None:
    desk = started("n1", "n2")
    enforce(desk, "over-eviction")
    all_fail(desk)
    search(desk, {"n2"})
    assert "too few nodes stand by" in line(desk, "GROUP_OVER_EVICTED")
    assert "among n1, n2; 0 nodes stand by" in line(desk, "GROUP_OVER_EVICTED")
    assert not desk.job().evicted and desk.job().attempt == 2


@pytest.mark.parametrize("enforced", [False, True])
def test_over_eviction_is_observed_until_an_operator_has_it_enforced(enforced: bool) -> None:
    desk = started("n1", "n2", "n3", "n4")  # two that stand by, and are no spares of the job
    if enforced:
        enforce(desk, "over-eviction")
    all_fail(desk)
    search(desk, {"n2"})
    said = line(desk, "GROUP_OVER_EVICTED")
    assert "2 nodes stand by" in said
    assert said.startswith("ENFORCE" if enforced else "OBSERVE")
    assert set(desk.job().evicted) == ({"n1", "n2"} if enforced else set())
    expected = {"n3", "n4"} if enforced else {"n1", "n2"}
    assert {slot.node for slot in desk.job().slots} == expected
    assert desk.disposition("n2") == "SCHEDULABLE"  # other jobs may still use it


def test_the_time_cap_ends_a_search_with_the_group_that_is_left() -> None:
    desk = Desk(*(f"n{i:02}" for i in range(16)))
    desk.submit(dp=16)
    desk.run()
    assert len(desk.job().slots) == 16
    all_fail(desk)
    answer(desk, {"n05"})
    begun_s = desk.now_s
    while desk.now_s < begun_s + POLICY.search_cap_s - 110.0:
        idle(desk, 80.0)  # rounds take their time, each within its own limit
        answer(desk, {"n05"})
    assert desk.job().phase is JobPhase.STOPPING
    assert next_s(desk.state, desk.now_s, POLICY) <= begun_s + POLICY.search_cap_s
    idle(desk, begun_s + POLICY.search_cap_s - desk.now_s)
    assert desk.job().phase is not JobPhase.STOPPING
    said = line(desk, "GROUP_CHECK_ENDED")
    assert "the culprit is among n0" in said and "the limit of 300 s" in said


def test_a_round_without_answers_ends_the_search() -> None:
    desk = started("n1", "n2")
    all_fail(desk)
    idle(desk, POLICY.group_check_timeout_s - 1.0)
    assert desk.job().phase is JobPhase.STOPPING
    desk.wait(1.0)
    assert desk.job().phase is JobPhase.PREPARING
    assert "round 1 took longer than 120 s" in line(desk, "GROUP_CHECK_ENDED")


def test_a_fault_that_names_a_node_ends_the_search() -> None:
    desk = started("n1", "n2", "n3")
    all_fail(desk)
    desk.crash("n2")
    assert desk.liveness("n2") == "DEAD"
    assert {slot.node for slot in desk.job().slots} == {"n1", "n3"}
    late = asked(desk)[0]
    answers = dict.fromkeys(("n1", "n2"), Answer.FAIL)
    desk.feed(GroupChecked(desk.now_s, late.job, late.attempt, late.round, 0, answers))
    assert desk.job().attempt == 2 and "GROUP_CHECK_ENDED" not in desk.reasons()


def test_a_named_culprit_needs_no_search() -> None:
    desk = started("n1", "n2")
    desk.fail("n1", exited(0, desk.now_s, status=-11))
    desk.stop()
    assert desk.job().attempt == 2
    assert not [effect for effect in desk.effects if isinstance(effect, CheckGroup)]


def test_a_cancelled_job_does_not_wait_for_its_search() -> None:
    desk = started("n1", "n2")
    all_fail(desk)
    desk.feed(CancelRequested(desk.now_s, "a", "enough", "me"))
    assert desk.job().phase is JobPhase.CANCELLED


def new_leader(desk: Desk, gone: Collection[str] = ()) -> None:
    """Another driver leads, with what is stored; every node dials it but those that are gone."""
    stored = codec.load(Job, codec.dump(desk.job()), config=desk.job().config)
    assert stored.current.searching is None
    nodes = {n: codec.load(Node, codec.dump(node)) for n, node in desk.state.nodes.items()}
    desk.state = replace(desk.state, jobs={"a": stored}, nodes=nodes)
    desk.effects.clear()
    desk.feed(LeaderStarted(desk.now_s, "there"))
    for name in list(desk.state.nodes):
        if name not in gone:
            desk.hello(name)
            desk.report(name, AttemptPhase.IDLE)


def of_eight() -> Desk:
    desk = Desk(*(f"n{i}" for i in range(8)))
    desk.submit(dp=8)
    desk.run()
    all_fail(desk)
    return desk


def test_a_new_leader_goes_on_with_the_round_that_was_open() -> None:
    desk = of_eight()
    for _ in range(2):
        answer(desk, {"n5"})
    open_round, begun_s = asked(desk), desk.now_s
    idle(desk, 30.0)
    new_leader(desk)
    assert asked(desk) == open_round and open_round[0].round == 3
    search = desk.job().current.searching
    assert search is not None and search.begun_at_s == begun_s, "the time cap goes on, too"
    answer(desk, {"n5"})
    new_leader(desk)
    assert asked(desk)[0].round == 4
    said = [item.message for item in desk.audit if item.reason == "GROUP_CHECK_STARTED"]
    assert len(said) == 3 and "a new leader continues with round 4" in said[-1]
    for _ in range(3):
        if desk.job().phase is JobPhase.STOPPING:
            answer(desk, {"n5"})
    assert desk.disposition("n5") == "QUARANTINED" and desk.job().attempt >= 1
    assert line(desk, "GROUP_CHECK_ENDED").startswith("ENFORCE group-check: ")


def test_a_new_leader_waits_for_all_nodes_and_a_restarted_one_ends_the_search() -> None:
    desk = of_eight()
    for _ in range(2):
        answer(desk, {"n5"})
    new_leader(desk, gone=("n1",))
    assert not [each for each in desk.effects if isinstance(each, CheckGroup)], "n1 is waited for"
    desk.hello("n1", boot=2)
    desk.report("n1", AttemptPhase.IDLE)
    assert not [each for each in desk.effects if isinstance(each, CheckGroup)]
    assert desk.job().phase is not JobPhase.STOPPING and "NODE_RESTARTED" in desk.reasons()


def test_a_new_leader_without_the_helper_of_the_round_begins_anew() -> None:
    desk = started("n1", "n2", "n3", spares=1)
    all_fail(desk)
    answer(desk, {"n1", "n2"})
    assert any("n3" in [m.node for m in group.members] for group in asked(desk))
    begun_s = desk.job().current.search_log.begun_at_s
    idle(desk, 10.0)
    new_leader(desk, gone=("n3",))
    (group,) = asked(desk)
    assert group.round == 1 and [m.node for m in group.members] == ["n1", "n2"]
    assert desk.job().current.search_log.begun_at_s == begun_s, "within the same time"


def test_a_search_among_values_that_are_not_finite_survives_the_leader() -> None:
    desk = started("n1", "n2", "n3", spares=1)
    sample = StepSample(1, 12, math.nan, math.nan, 0)
    found = Divergence(DivergenceKind.NON_FINITE, 3, 10, sample, 5.0)
    desk.feed(LossDiverged(desk.now_s, "a", found))
    desk.stop(search=False)
    new_leader(desk)
    assert desk.job().phase is JobPhase.STOPPING
    search(desk, {"n2"})
    assert desk.job().phase is JobPhase.FAILED and desk.disposition("n2") == "QUARANTINED"


def test_values_that_are_not_finite_end_the_job_and_the_device_behind_them_is_looked_for() -> None:
    desk = started("n1", "n2", "n3", spares=1)
    sample = StepSample(1, 12, math.nan, math.nan, 0)
    found = Divergence(DivergenceKind.NON_FINITE, 3, 10, sample, 5.0)
    desk.feed(LossDiverged(desk.now_s, "a", found))
    desk.stop(search=False)
    assert desk.job().phase is JobPhase.STOPPING and asked(desk)
    search(desk, {"n2"})
    assert desk.job().phase is JobPhase.FAILED and desk.disposition("n2") == "QUARANTINED"
    assert line(desk, "GROUP_CHECK_ENDED").endswith("-> the job ends")

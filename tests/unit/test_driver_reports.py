"""Reports of nodes in a row are decided on together, and lead to the same as one by one."""

from __future__ import annotations

import random

import pytest
from tests.harness.desk import POLICY, Desk, exited

from megascale_driver.core import machine
from megascale_driver.core.draft import Draft
from megascale_driver.core.nodes import nodes
from megascale_driver.core.values.cluster import AttemptPhase, Cluster, Report
from megascale_driver.core.values.events import NodeReport, Outcome
from megascale_driver.core.values.job import Job, JobPhase
from megascale_driver.core.values.policy import Policy
from megascale_driver.shell import decisions

NODES = tuple(f"n{number}" for number in range(1, 6))


def one_by_one(state: Cluster, events: list[NodeReport]) -> tuple[Cluster, list[Outcome]]:
    outcomes = []
    for event in events:
        state, outcome = machine.step(state, event, POLICY)
        outcomes.append(outcome)
    return state, outcomes


def drawn(rng: random.Random, desk: Desk, count: int) -> list[NodeReport]:
    """Reports of the newest attempt or none, as nodes send them, and some that nobody expects."""
    found = []
    for _ in range(count):
        name = rng.choice((*NODES, "unknown"))
        node = desk.state.nodes.get(name)
        phase = rng.choice(list(AttemptPhase))
        report = Report(desired_version=rng.choice((0, 1, 2, 3, 9)), phase=phase)
        if phase is not AttemptPhase.IDLE and rng.random() < 0.9:
            workers = (exited(0, desk.now_s),) if phase is AttemptPhase.FAILED else ()
            report = Report(node.desired_version if node else 1, "a", desk.job().attempt,
                            phase, workers=workers, store_endpoint="h:9")  # fmt: skip
        incarnation = node.identity.incarnation if node and rng.random() < 0.9 else "other"
        found.append(NodeReport(desk.now_s + len(found) * 0.001, name, incarnation, report))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_reports_together_lead_to_what_they_lead_to_one_by_one(seed: int) -> None:
    rng, desk = random.Random(seed), Desk(*NODES)
    desk.submit(spares=1, max_restarts=50, max_restarts_without_progress=50)
    phases: set[JobPhase] = set()
    for _ in range(40):
        events = drawn(rng, desk, rng.randint(1, 12))
        if rng.random() < 0.5:  # what the nodes of an attempt really send, in some order
            wanted = rng.choice((AttemptPhase.PREPARED, AttemptPhase.RUNNING, AttemptPhase.IDLE))
            events = []
            for slot in rng.sample(desk.job().slots, len(desk.job().slots)):
                node = desk.state.nodes[slot.node]
                of = ("a", desk.job().attempt) if wanted is not AttemptPhase.IDLE else ("", 0)
                report = Report(node.desired_version, *of, wanted, store_endpoint="h:9")
                events.append(NodeReport(desk.now_s, slot.node, node.identity.incarnation, report))
        expected = one_by_one(desk.state, events)
        assert decisions.decide(desk.state, events, POLICY) == expected
        desk.state = expected[0]
        phases.add(desk.job().phase)
        desk.wait(rng.choice((0.1, 1.0, 3.0)))
        phases.add(desk.job().phase)
    assert len(phases) >= 3, phases


def test_a_report_on_which_the_core_fails_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk, original = Desk(*NODES), nodes.report
    desk.submit()

    def fails(draft: Draft, event: NodeReport) -> Job | None:
        job = original(draft, event)
        if event.node == "n3":
            raise ZeroDivisionError("a defect")
        return job

    monkeypatch.setattr(nodes, "report", fails)
    events = [
        NodeReport(desk.now_s, name, f"{name}-1", Report(daemon_restarts=3)) for name in NODES
    ]
    state, outcomes = decisions.decide(desk.state, events, POLICY)
    assert [isinstance(found, ZeroDivisionError) for found in outcomes] == [
        name == "n3" for name in NODES
    ]
    reports = {name: state.nodes[name].report for name in NODES}
    assert {name for name, found in reports.items() if found and found.daemon_restarts} == {
        "n1", "n2", "n4", "n5",
    }  # fmt: skip


def test_reports_that_decide_nothing_share_one_working_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fleet that prepares costs one decision for each batch, not one for each node."""
    desk, made = Desk(*NODES), [0]
    desk.submit()

    class Counted(Draft):
        def __init__(self, state: Cluster, policy: Policy, now_s: float) -> None:
            made[0] += 1
            super().__init__(state, policy, now_s)

    monkeypatch.setattr(machine, "Draft", Counted)
    waiting = [slot.node for slot in desk.job().slots][:-1]
    report = Report(2, "a", 1, AttemptPhase.PREPARED)
    events = [NodeReport(desk.now_s, n, f"{n}-1", report) for _ in range(50) for n in waiting]
    decisions.decide(desk.state, events, POLICY)
    assert made[0] == 1

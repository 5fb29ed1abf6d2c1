"""Nodes that have left are forgotten by rule: which, when, and what is left of them."""

from __future__ import annotations

from dataclasses import replace

from tests.harness.desk import POLICY, Desk

from megascale_driver.core.jobs import timers
from megascale_driver.core.nodes import nodes
from megascale_driver.core.values.cluster import Identity, Liveness, Node
from megascale_driver.core.values.events import NodeHello, Tick
from megascale_driver.presence import lane as lanes
from megascale_driver.presence.lane import Lane

HOURS_S = POLICY.forget_dead_s


def later(desk: Desk, seconds: float) -> None:
    """Let time pass for the driver alone: who is dead stays dead, who is alive beats."""
    desk.now_s += seconds
    for name, node in desk.state.nodes.items():
        if node.liveness is Liveness.ALIVE:
            seen = replace(node, last_seen_s=desk.now_s)
            desk.state = replace(desk.state, nodes={**desk.state.nodes, name: seen})
    desk.state, outcome = desk.ask(Tick(desk.now_s))
    desk.audit += outcome.audit


def forgotten(desk: Desk) -> list[str]:
    return [line.message for line in desk.audit if line.reason == "NODE_FORGOTTEN"]


def test_a_node_that_is_dead_for_a_day_is_forgotten_and_comes_back_as_a_new_one() -> None:
    desk = Desk("n1", "n2")
    desk.crash("n2")
    assert desk.liveness("n2") == "DEAD"
    later(desk, HOURS_S - 60.0)
    assert set(desk.state.nodes) == {"n1", "n2"}, "not before its time"
    later(desk, 2 * nodes.LOOK_S)
    assert set(desk.state.nodes) == {"n1"}
    (message,) = forgotten(desk)
    assert message == "node n2 is forgotten: dead for more than 24 hours, and no job needs it"
    later(desk, 2 * HOURS_S)
    assert set(desk.state.nodes) == {"n1"} and len(forgotten(desk)) == 1, "who is alive stays"
    desk.feed(NodeHello(desk.now_s, "n2", Identity("n2-9")))
    assert desk.liveness("n2") == "ALIVE" and desk.audit[-1].reason == "NODE_JOINED"


def test_many_are_forgotten_a_few_at_a_time_with_one_line_for_each_decision() -> None:
    desk = Desk()
    dead = {f"n{at:03d}": Node(f"n{at:03d}", liveness=Liveness.DEAD) for at in range(150)}
    desk.state = replace(desk.state, nodes=dead)
    later(desk, 2 * HOURS_S)
    assert len(desk.state.nodes) == 150 - nodes.MAX_AT_ONCE
    for _ in range(3):
        later(desk, nodes.AGAIN_S)
    assert not desk.state.nodes
    lines = [line for line in desk.audit if line.reason == "NODE_FORGOTTEN"]
    assert [len(line.evidence) for line in lines] == [64, 64, 22]
    assert "and 56 more are forgotten" in lines[0].message and lines[0].subject == "cluster"


def test_time_alone_makes_it_due() -> None:
    desk = Desk("n1")
    later(desk, 1.0)
    due_s = desk.state.forget_due_s
    assert desk.now_s < due_s <= desk.now_s + nodes.LOOK_S
    assert timers.next_s(desk.state, due_s - 0.5, POLICY) <= due_s


def test_the_lane_forgets_a_dead_node_that_the_core_has_forgotten() -> None:
    lane = Lane(POLICY)
    lane.opened(1000.0, "n1", "i")
    lane.closed("n1", "i")
    dead = {"n1": Node("n1", liveness=Liveness.DEAD)}
    assert lane.due(1100.0, dead) == () and "n1" in lane._nodes
    assert lane.due(1100.0 + lanes.FORGOTTEN_S, dead) == () and "n1" in lane._nodes
    assert lane.due(1101.0 + 2 * lanes.FORGOTTEN_S, {}) == () and "n1" not in lane._nodes

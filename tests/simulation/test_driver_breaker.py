"""The breaker counts what the driver decides by inference, by fleet and by switch."""

from __future__ import annotations

import pytest
from tests.harness.desk import POLICY, Desk
from tests.harness.simulated_cluster import SimulatedCluster, demo_job

from megascale_driver.core.values.cluster import AttemptPhase, Check, Disposition
from megascale_driver.core.values.events import EvictRequested, JobSubmitted
from megascale_driver.core.values.job import JobPhase


def test_an_operators_evictions_do_not_hold_back_the_verdict_on_a_stopped_node() -> None:
    world = SimulatedCluster(3, nodes=12, switches=3)
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a", spares=1), "test"))
    world.run(10.0)
    job = world.state.jobs["a"]
    used = {slot.node for slot in job.slots} | set(job.spares)
    for name in [name for name in world.nodes if name not in used][:5]:
        world.feed(EvictRequested(world.now_s, name, "new firmware", "ada"))
    at_s = world.now_s
    victim = job.slots[1].node
    world.pause(victim, 1000.0)
    world.run(30.0)
    dead = [line.at_s for line in world.audit if line.reason == "NODE_DEAD"]
    assert dead and dead[0] - at_s <= 20.0, "today only after the window of the breaker: 328 s"
    assert world.state.jobs["a"].phase is JobPhase.RUNNING


def test_the_nodes_of_a_lost_switch_are_replaced_although_they_are_many() -> None:
    world = SimulatedCluster(5, nodes=24, switches=3)
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a", dp=8, spares=0), "test"))
    world.run(15.0)
    job = world.state.jobs["a"]
    assert job.phase is JobPhase.RUNNING
    lost = [name for name, node in world.nodes.items() if node.switch == "s0"]
    assert len(lost) == 8 and {slot.node for slot in job.slots} & set(lost)
    for name in lost:
        world.partition(name, 3000.0)
    world.run(150.0)
    job = world.state.jobs["a"]
    assert job.phase is JobPhase.RUNNING, job.reason
    assert not {slot.node for slot in job.slots} & set(lost)
    assert any(line.reason == "SWITCH_LOST" and "s0" in line.message for line in world.audit)


def test_a_switch_whose_nodes_only_go_silent_is_observed_first() -> None:
    """Half of a switch at once may be its management network: longer silence is asked for."""
    world = SimulatedCluster(6, nodes=24, switches=3)
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a", dp=8, spares=0), "test"))
    world.run(15.0)
    held = [slot.node for slot in world.state.jobs["a"].slots]
    switch = world.nodes[held[0]].switch
    lost = [name for name, node in world.nodes.items() if node.switch == switch]
    for name in lost:
        world.pause(name, 40.0)
    world.run(80.0)
    dead = [line for line in world.audit if line.reason == "NODE_DEAD"]
    assert len(dead) < POLICY.switch_nodes, [line.subject for line in dead]
    tripped = [line for line in world.audit if line.reason == "BREAKER_TRIPPED"]
    assert tripped and switch in tripped[0].message


def test_silence_of_several_switches_holds_back_the_verdict_on_a_node_of_another() -> None:
    """Found by a seed: the driver was cut off while one node had been silent for some time."""
    world = SimulatedCluster(6, nodes=24, switches=3)
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a", dp=8, spares=0), "test"))
    world.run(15.0)
    victim = world.state.jobs["a"].slots[0].node
    others = [node for node in world.nodes.values() if node.switch != world.nodes[victim].switch]
    world.pause(victim, 60.0)
    world.run(3.0)
    for node in others:
        world.partition(node.name, 60.0)
    world.run(30.0)
    given_up = [line for line in world.audit if line.reason == "NODE_DEAD" and line.log == "a"]
    assert not given_up, "idle nodes alone may be declared dead"
    assert "BREAKER_TRIPPED" in [line.reason for line in world.audit]


def test_self_checks_that_fail_alike_on_many_nodes_are_not_about_the_nodes() -> None:
    desk = Desk(*(f"n{i}" for i in range(1, 9)))
    desk.submit(max_restarts_without_progress=50)
    for _ in range(12):
        if desk.job().phase is JobPhase.PREPARING:
            check = Check("network", "FAIL", "eth0", "libfabric.so.1: cannot open shared object")
            desk.report(desk.job().slots[0].node, AttemptPhase.FAILED, checks=(check,))
            desk.stop()
    gone = [n.name for n in desk.state.nodes.values() if n.disposition is Disposition.QUARANTINED]
    assert len(gone) == POLICY.software_checks - 1
    assert len(desk.job().evicted) == len(gone), "nor does the job leave the others one by one"
    assert "SOFTWARE_SUSPECTED" in desk.reasons()


@pytest.mark.parametrize(("nodes", "limit"), [(24, 4), (300, 6)])
def test_scattered_losses_beyond_the_share_of_the_fleet_are_only_observed(
    nodes: int, limit: int
) -> None:
    """Nodes of many switches go silent: a number in a small fleet, a share of a large one."""
    world = SimulatedCluster(8, nodes=nodes, switches=nodes)
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a", dp=10, spares=0), "test"))
    world.run(20.0)
    held = [slot.node for slot in world.state.jobs["a"].slots]
    assert world.state.jobs["a"].phase is JobPhase.RUNNING and len(held) == 10
    for name in held[:8]:
        world.pause(name, 400.0)
    world.run(60.0)
    dead = [line for line in world.audit if line.reason == "NODE_DEAD"]
    assert len([line for line in dead if line.outcome == "job a loses it"]) == limit
    (tripped,) = [line for line in world.audit if line.reason == "BREAKER_TRIPPED"]
    assert tripped.mode == "OBSERVE" and f"{limit} nodes were lost" in tripped.message

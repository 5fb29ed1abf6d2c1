"""Jobs that hang with all processes alive, in the simulated cluster."""

from __future__ import annotations

from tests.harness.simulated_cluster import SimulatedCluster, demo_job

from megascale_driver.core.queue.explain import explain
from megascale_driver.core.values.cluster import Disposition
from megascale_driver.core.values.events import JobSubmitted, PolicyRequested
from megascale_driver.core.values.job import Job, JobPhase


def running(
    nodes: int, *, step_s: float = 0.5, run_s: float = 20.0, **recovery: int
) -> SimulatedCluster:
    """A world in which job ``a`` has run for a while."""
    world = SimulatedCluster(1, nodes=nodes, switches=1)
    world.step_s = step_s
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a", spares=0, **recovery), "test"))
    world.run(run_s)
    assert job_of(world).phase is JobPhase.RUNNING
    return world


def job_of(world: SimulatedCluster) -> Job:
    return world.state.jobs["a"]


def times_of(world: SimulatedCluster, reason: str) -> list[float]:
    return [line.at_s for line in world.audit if line.reason == reason]


def test_a_job_that_stands_still_is_restarted_and_no_node_is_evicted() -> None:
    world = running(3)
    nodes = [slot.node for slot in job_of(world).slots]
    world.nodes[nodes[1]].stalled_until_attempt = 1
    stalled_at_s = world.now_s
    world.run(50.0)
    assert not times_of(world, "HANG_SUSPECTED")
    text = explain(world.state, "a", world.now_s, world.policy)
    assert (
        "no rank has completed a step for 50 s (limit 60 s); rank 4 on node" in text
        and "in phase STEP" in text
    )
    world.run(40.0)
    (line,) = [line for line in world.audit if line.reason == "HANG_SUSPECTED"]
    assert 60.0 <= line.at_s - stalled_at_s <= 60.0 + 2 * world.policy.heartbeat_interval_s
    assert (
        f"rank 4 on node {nodes[1]} is in phase STEP" in line.message
        and "rank 0" not in line.message
    )
    assert line.evidence[0].source == f"nodes/{nodes[1]}/ranks/4" and len(line.evidence) == 8
    job = job_of(world)
    assert (job.phase, job.attempt, job.restarts) == (JobPhase.RUNNING, 2, 1)
    assert [slot.node for slot in job.slots] == nodes and not job.evicted
    assert all(node.disposition is Disposition.SCHEDULABLE for node in world.state.nodes.values())
    assert "no rank" not in explain(world.state, "a", world.now_s, world.policy)


def test_a_hang_that_is_only_observed_ends_no_attempt_and_has_one_line() -> None:
    world = running(3)
    world.feed(PolicyRequested(world.now_s, "hang", "OBSERVE", "a slow profile", "ada"))
    world.nodes[job_of(world).slots[1].node].stalled_until_attempt = 1
    world.run(120.0)
    (line,) = [line for line in world.audit if line.reason == "HANG_SUSPECTED"]
    assert (line.mode, line.outcome) == ("OBSERVE", "nothing: the rule is observed")
    assert (job_of(world).phase, job_of(world).attempt) == (JobPhase.RUNNING, 1)


def test_a_job_leaves_a_node_that_holds_it_up_twice_in_a_row() -> None:
    world = running(3)
    nodes = [slot.node for slot in job_of(world).slots]
    world.nodes[nodes[1]].stalled_until_attempt = 10
    world.run(90.0)
    assert len(times_of(world, "HANG_SUSPECTED")) == 1 and not job_of(world).evicted
    world.run(1000.0)  # the second attempt never leaves its warm-up, which has a longer limit
    job = job_of(world)
    assert len(times_of(world, "HANG_SUSPECTED")) == 2
    assert job.evicted == (nodes[1],) and nodes[1] not in [slot.node for slot in job.slots]
    assert (job.phase, job.attempt) == (JobPhase.RUNNING, 3)
    assert world.state.nodes[nodes[1]].disposition is Disposition.SCHEDULABLE, (
        "other jobs may still use it"
    )


def test_budgets_end_a_job_that_hangs_again_and_again() -> None:
    world = running(2, max_restarts=1)
    world.nodes[job_of(world).slots[0].node].stalled_until_attempt = 10
    world.run(2500.0)
    assert job_of(world).phase is JobPhase.FAILED and "no rank has advanced" in job_of(world).reason


def test_slow_steps_of_a_known_pace_are_no_hang() -> None:
    world = running(2, step_s=50.0, run_s=400.0)
    assert len(job_of(world).step_times) >= 3
    world.nodes[job_of(world).slots[0].node].stalled_until_attempt = 1
    world.run(200.0)
    assert not times_of(world, "HANG_SUSPECTED"), "the limit of five step times is not reached"
    world.run(100.0)
    assert len(times_of(world, "HANG_SUSPECTED")) == 1


def test_warm_up_takes_its_time() -> None:
    world = SimulatedCluster(1, nodes=2, switches=1)
    for node in world.nodes.values():
        node.stalled_until_attempt = 1
    world.run(2.0)
    world.feed(JobSubmitted(world.now_s, demo_job("a", spares=0), "test"))
    world.run(800.0)
    assert job_of(world).phase is JobPhase.RUNNING and not times_of(world, "HANG_SUSPECTED")
    world.run(150.0)
    assert len(times_of(world, "HANG_SUSPECTED")) == 1


def test_a_silent_node_is_dead_by_its_silence_and_not_a_hang() -> None:
    world = running(3)
    world.pause(job_of(world).slots[1].node, 300.0)
    world.run(120.0)
    assert times_of(world, "NODE_DEAD") and not times_of(world, "HANG_SUSPECTED")


def test_the_clock_of_a_job_restarts_with_a_new_leader() -> None:
    world = running(2)
    world.nodes[job_of(world).slots[0].node].stalled_until_attempt = 1
    world.run(50.0)
    world.failover()
    failed_over_at_s = world.now_s
    world.run(55.0)
    assert not times_of(world, "HANG_SUSPECTED") and job_of(world).attempt == 1
    world.run(60.0)  # the new leader has the job's pace from the stored step times
    assert times_of(world, "HANG_SUSPECTED")[0] - failed_over_at_s >= world.policy.hang.floor_s

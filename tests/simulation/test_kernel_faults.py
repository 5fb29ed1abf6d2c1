"""GPUs that fall off the bus while ranks hang, in the simulated cluster."""

from __future__ import annotations

from tests.harness.kernel_lines import OFF_BUS, logs
from tests.harness.simulated_cluster import SimulatedCluster, demo_job

from megascale_driver.core.values.cluster import Disposition
from megascale_driver.core.values.events import JobSubmitted
from megascale_driver.core.values.job import JobPhase


def running(nodes: int, jobs: int = 1) -> SimulatedCluster:
    """A world of GPUs in which jobs of two nodes each have run for a while."""
    world = SimulatedCluster(1, nodes=nodes, switches=1)
    for node in world.nodes.values():
        node.kind = "cuda"
    world.run(2.0)
    for number in range(jobs):
        job = demo_job(f"j{number}", spares=0)
        world.feed(JobSubmitted(world.now_s, job, "test"))
    world.run(20.0)
    assert {job.phase for job in world.state.jobs.values()} == {JobPhase.RUNNING}
    return world


def test_a_hang_behind_a_lost_gpu_ends_within_a_heartbeat_and_not_at_the_hangs_limit() -> None:
    world = running(3)
    bad = world.state.jobs["j0"].slots[1].node
    world.nodes[bad].stalled_until_attempt = 1
    world.nodes[bad].kernel_log = logs(OFF_BUS, at_s=world.now_s)
    at_s = world.now_s
    world.run(40.0)
    (line,) = [line for line in world.audit if line.reason == "KERNEL_FAULT"]
    assert line.at_s - at_s <= world.policy.heartbeat_interval_s + 1.0
    assert not [line for line in world.audit if line.reason == "HANG_SUSPECTED"]
    job = world.state.jobs["j0"]
    assert (job.phase, job.attempt, job.evicted) == (JobPhase.RUNNING, 2, (bad,))
    assert world.state.nodes[bad].disposition is Disposition.QUARANTINED


def test_the_breaker_bounds_how_many_nodes_their_kernels_have_evicted() -> None:
    world = running(16, jobs=6)
    bad = [job.slots[0].node for job in world.state.jobs.values()]
    for number, name in enumerate(bad):
        world.nodes[name].kernel_log = logs(OFF_BUS, at_s=world.now_s + number)
    world.run(60.0)
    gone = [
        name
        for name, node in world.state.nodes.items()
        if node.disposition is Disposition.QUARANTINED
    ]
    assert 0 < len(gone) <= world.policy.breaker_nodes
    assert [line for line in world.audit if line.reason == "BREAKER_TRIPPED"]
    evicted = {name for job in world.state.jobs.values() for name in job.evicted}
    assert set(gone) < evicted <= set(bad), "beyond the limit only the job leaves the node"

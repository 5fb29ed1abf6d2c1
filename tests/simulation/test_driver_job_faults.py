"""Faults of the job itself under random histories: it ends once and for all, or it runs again."""

from __future__ import annotations

import pytest
from tests.harness.simulated_cluster import SimulatedCluster, demo_job

from megascale_driver.core.values.cluster import AttemptPhase, WorkerReport
from megascale_driver.core.values.events import JobSubmitted, NodeReport
from megascale_driver.core.values.job import Job, JobPhase

NEVER_S = 1e12  # later than any time of the clock


def started(seed: int, *, step_s: float = NEVER_S, **recovery: int) -> SimulatedCluster:
    """Job ``a`` runs on four of six nodes, with steps of ``step_s``."""
    cluster = SimulatedCluster(seed, nodes=6)
    cluster.step_s = step_s
    cluster.run(10.0)
    cluster.feed(JobSubmitted(cluster.now_s, demo_job("a", dp=4, **recovery), "me"))
    until(cluster, JobPhase.RUNNING)
    return cluster


def job(cluster: SimulatedCluster) -> Job:
    return cluster.state.jobs["a"]


def until(cluster: SimulatedCluster, phase: JobPhase) -> None:
    for _ in range(600):
        if job(cluster).phase is phase:
            return
        cluster.run(0.5)
    pytest.fail(f"{phase} was not reached: {job(cluster).phase} {job(cluster).reason}")


def fail_one(cluster: SimulatedCluster, kind: str) -> None:
    """A worker of a random node of the attempt fails; its peers are victims."""
    name = cluster.random.choice(job(cluster).slots).node
    node = cluster.nodes[name]
    if node.phase in (AttemptPhase.RUNNING, AttemptPhase.STARTING):
        cluster._fail(node, WorkerReport(0, True, 1, "why; remedy", kind, cluster.now_s))
        # Its heartbeat leaves at once, before any order to stop for what its peers report.
        report = NodeReport(cluster.now_s, name, node.incarnation, cluster._report(node))
        cluster.feed(report)


@pytest.mark.parametrize("seed", range(8))
def test_a_job_that_cannot_run_ends_at_once_and_frees_its_nodes(seed: int) -> None:
    cluster = started(seed)
    fail_one(cluster, "BAD_JOB")
    if seed % 2:
        cluster.run(cluster.random.uniform(0.25, 2.0))
        cluster.failover()
    until(cluster, JobPhase.FAILED)
    assert (job(cluster).attempt, job(cluster).restarts, job(cluster).evicted) == (1, 0, ())
    assert job(cluster).reason.endswith("why; remedy")
    cluster.feed(JobSubmitted(cluster.now_s, demo_job("b", dp=4), "me"))
    cluster.run(60.0)
    assert cluster.state.jobs["b"].phase is JobPhase.RUNNING


@pytest.mark.parametrize("seed", range(8))
def test_a_job_that_ran_before_comes_back_from_any_of_these_faults(seed: int) -> None:
    cluster = started(seed, step_s=0.5)
    cluster.run(20.0)
    for _ in range(6):
        before = job(cluster).best_step
        fail_one(cluster, cluster.random.choice(["BAD_JOB", "OUT_OF_MEMORY", "OTHER"]))
        if cluster.random.random() < 0.3:
            cluster.run(cluster.random.uniform(0.25, 2.0))
            cluster.failover()
        cluster.run(90.0)
        assert job(cluster).phase is JobPhase.RUNNING, job(cluster).reason
        assert job(cluster).best_step > before


@pytest.mark.parametrize("seed", range(4))
def test_out_of_memory_before_the_first_step_ends_the_job_at_the_second_time(seed: int) -> None:
    cluster = started(seed)
    fail_one(cluster, "OUT_OF_MEMORY")
    cluster.run(2.0)
    if seed % 2:
        cluster.failover()
    until(cluster, JobPhase.RUNNING)
    assert job(cluster).attempt == 2
    fail_one(cluster, "OUT_OF_MEMORY")
    until(cluster, JobPhase.FAILED)
    assert "2 attempts in a row ran out of memory" in job(cluster).reason

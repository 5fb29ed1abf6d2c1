"""Checks of groups among hundreds of simulated nodes, across changes of leader."""

from __future__ import annotations

import math

import pytest
from tests.harness.simulated_cluster import SimulatedCluster, demo_job

from megascale_driver.core.values.cluster import Disposition, WorkerReport
from megascale_driver.core.values.events import JobSubmitted
from megascale_driver.core.values.job import JobPhase

NODES, SPARES, CULPRIT = 256, 2, "n77"


def searching() -> SimulatedCluster:
    """A job on 256 nodes has lost all its peers at once; one node fails with everybody."""
    cluster = SimulatedCluster(7, NODES + SPARES, switches=16)
    config = demo_job("a", dp=NODES, spares=SPARES)
    cluster.run(1.0)
    cluster.feed(JobSubmitted(cluster.now_s, config, "me"))
    until(cluster, JobPhase.RUNNING)
    cluster.nodes[CULPRIT].fails_with_others = True
    for slot in cluster.state.jobs["a"].slots:
        report = WorkerReport(slot.ranks[0], True, 1, "peer closed", "COLLECTIVE", cluster.now_s)
        cluster._fail(cluster.nodes[slot.node], report)
    return cluster


def until(cluster: SimulatedCluster, phase: JobPhase) -> None:
    for _ in range(2000):
        if cluster.state.jobs["a"].phase is phase:
            return
        cluster.run(0.25)
    raise AssertionError(f"{cluster.state.jobs['a'].phase}: {cluster.state.jobs['a'].reason}")


@pytest.mark.parametrize("failovers", [0, 3])
def test_the_culprit_among_256_nodes_is_found_across_changes_of_leader(failovers: int) -> None:
    cluster = searching()
    begun_s = cluster.now_s
    until(cluster, JobPhase.STOPPING)
    for done in range(failovers):
        rounds = -1
        while rounds < 2 * done + 1:  # each new leader finds what two more rounds have shown
            cluster.run(0.25)
            search = cluster.state.jobs["a"].current.searching
            rounds = len(cluster.state.jobs["a"].current.search_log.rounds)
            assert search is None or not search.over
        cluster.failover()
    until(cluster, JobPhase.RUNNING)
    took_s = cluster.now_s - begun_s
    assert cluster.state.nodes[CULPRIT].disposition is Disposition.QUARANTINED
    out = [n.name for n in cluster.state.nodes.values() if n.disposition.name == "QUARANTINED"]
    assert out == [CULPRIT], "nobody else is evicted"
    assert cluster.state.jobs["a"].attempt == 2
    (ended,) = [item.message for item in cluster.audit if item.reason == "GROUP_CHECK_ENDED"]
    rounds = int(ended.split()[0])
    assert rounds <= math.ceil(math.log2(NODES)) + 3, "no round is done twice"
    resumed = [item for item in cluster.audit if "a new leader continues" in item.message]
    assert len(resumed) == failovers
    assert took_s < cluster.policy.search_cap_s + 60.0
    print(f"{failovers} changes of leader: {rounds} rounds, {took_s:.0f} s (virtual)")

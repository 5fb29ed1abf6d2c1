"""Agent, daemon and `megascale up` are killed in turn: no process and no shared memory is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.chaos_cluster import ChaosCluster, chaos_cluster, measured
from tests.harness.processes import ended, until_gone

ENDLESS_STEPS = 100_000


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ChaosCluster]:
    with chaos_cluster(tmp_path, "--nodes", "3") as running:
        yield running


async def test_nothing_is_left_by_what_is_killed(cluster: ChaosCluster) -> None:
    async with cluster.client() as client:
        spec = cluster.job("doomed", steps=ENDLESS_STEPS, interval_steps=10, spares=1)
        async with cluster.follow(client, spec) as run:
            await run.until_committed()
            first, second = run.job.nodes
            workers = cluster.worker_pids(run.job)

            # The daemon: its agent starts another, and training continues with new snapshots.
            before = cluster.up.node_pids(first)
            os.kill(before["checkpoint"], signal.SIGKILL)
            replaced = (None, before["checkpoint"])
            await run.until(lambda: daemon_of(cluster, first) not in replaced, "another daemon")
            committed = run.job.committed_step
            await run.until(lambda: run.job.committed_step > committed + 20, "commits with it")
            assert cluster.worker_pids(run.job) == workers
            slots = {folder for folder in cluster.shared_memory() if folder.startswith(f"{first}/")}
            assert len(slots) == 1

            # The agent: all processes that it started end with it, and the spare takes over.
            node = cluster.up.node_pids(second)
            assert {"agent", "template", "checkpoint", "loader", "rank-1"} == node.keys()
            assert not any(ended(pid) for pid in node.values())
            os.kill(node["agent"], signal.SIGKILL)
            agent_s = until_gone(node.values(), "processes of the agent gone")
            await run.until_step(1, attempt=2)
            assert second not in run.job.nodes

            # `megascale up`, while the job runs.
            running = cluster.up.processes()
            assert {*cluster.worker_pids(run.job).values(), cluster.up.state["etcd"]["pid"]} <= set(
                running
            )
            cluster.up.process.kill()
            cluster.up.process.wait()
            up_s = until_gone(running, "processes of the cluster gone")
            assert cluster.up.processes() == []

    memory, sockets = cluster.shared_memory(), cluster.socket_folders()
    # What killed daemons leave is removed by the next daemon of any cluster on this host, so a test
    # that runs beside this one may have removed some of it.
    with cluster.start_again() as up:
        assert len(cluster.shared_memory()) == 3
        assert memory.isdisjoint(cluster.shared_memory())
        assert len(cluster.socket_folders()) == 4  # of three agents and of etcd
        assert sockets.isdisjoint(cluster.socket_folders())
        everything = up.processes()
        assert up.stop() == 0
        until_gone(everything, "all processes gone")
    assert (cluster.shared_memory(), cluster.socket_folders()) == (set(), set())
    measured("killed in turn", agent_gone_s=agent_s, up_gone_s=up_s)


def daemon_of(cluster: ChaosCluster, node: str) -> int | None:
    """Process id of a node's checkpoint daemon while there is one."""
    return cluster.up.node_pids(node).get("checkpoint")

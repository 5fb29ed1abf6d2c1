"""Nodes of a local cluster come back: `megascale node start`, `node stop` and `up --add-node`."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.chaos_cluster import ChaosCluster, chaos_cluster
from tests.harness.local_cluster import UpProcess, megascale
from tests.harness.processes import ended, until_gone
from tests.harness.waiting import until

from megascale.v1 import types_pb2
from megascale_client import Client


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ChaosCluster]:
    with chaos_cluster(tmp_path, "--nodes", "2") as running:
        yield running


def liveness(up: UpProcess) -> dict[str, str]:
    """Liveness of the nodes by name, as the driver shows it."""
    with Client.from_run_folder(up.folder) as client:
        names = types_pb2.NodeLiveness.Name
        return {
            node.name: names(node.liveness).removeprefix("NODE_LIVENESS_")
            for node in client.nodes()
        }


def until_event(up: UpProcess, process: subprocess.Popen[str], event: str) -> dict[str, object]:
    """Wait for an event of a command with --json."""
    assert process.stdout is not None
    for line in process.stdout:
        if (values := json.loads(line))["event"] == event:
            return dict(values)
    raise AssertionError(process.communicate()[1])


async def test_a_node_that_ended_comes_back_and_one_more_joins(cluster: ChaosCluster) -> None:
    up = cluster.up
    folder = ("--cluster", str(up.folder))

    # While it is alive, a second one is refused.
    alive = megascale("node", "start", "n2", *folder)
    assert alive.returncode == 5, alive.stderr
    assert "node n2 is alive already" in alive.stderr and "megascale node stop n2" in alive.stderr

    up.kill_node("n2")
    (report,) = until(lambda: up.seen("node_exited"), "end of the node reported")
    assert report["node"] == "n2"
    until(lambda: liveness(up)["n2"] == "DEAD", "the driver sees its end")
    async with cluster.client() as client:
        # It needs both nodes.
        async with cluster.follow(client, cluster.job("waits", steps=4, interval_steps=4)) as run:
            assert run.job.phase == types_pb2.JOB_PHASE_QUEUED
            again = up.beside("node", "start", "n2", "--json", *folder)
            ready = until_event(up, again, "node_ready")
            assert ready["node"] == "n2" and ready["devices"] == [0]
            found = liveness(up)
            assert found.keys() == {"n1", "n2"} and found["n2"] == "ALIVE"
            await run.until(
                lambda: run.job.phase == types_pb2.JOB_PHASE_SUCCEEDED, "the job succeeds"
            )
            assert sorted(run.job.nodes) == ["n1", "n2"]

        # One more node, for a job that needs a spare as well.
        spec = cluster.job("waits-for-three", steps=4, interval_steps=4, spares=1)
        spec.trainer.parallelism.dp, spec.recovery.spare_nodes = 1, 0
        spec.trainer.parallelism.pp, spec.trainer.model.layers = 3, 3
        async with cluster.follow(client, spec) as run:
            added = up.beside("up", "--add-node", "--json", "--run-folder", str(up.folder))
            assert until_event(up, added, "node_ready")["node"] == "n3"
            await run.until(
                lambda: run.job.phase == types_pb2.JOB_PHASE_SUCCEEDED, "the job succeeds"
            )
            assert sorted(run.job.nodes) == ["n1", "n2", "n3"]

    # Its supervisor is killed: nothing of the node is left.
    processes = list(up.node_pids("n3").values())
    assert len(processes) >= 3
    added.kill()
    until_gone(processes, "processes of n3 gone")

    # Ctrl-C ends the other one in order.
    processes = list(up.node_pids("n2").values())
    again.send_signal(signal.SIGINT)
    assert again.wait() == 0
    until_gone(processes, "processes of n2 gone")
    assert not (up.folder / "nodes" / "n2" / "executor.address").exists()


def test_a_detached_node_is_stopped_by_command_or_with_the_cluster(cluster: ChaosCluster) -> None:
    up = cluster.up
    folder = ("--cluster", str(up.folder))
    up.kill_node("n2")
    until(lambda: up.seen("node_exited"), "end of the node reported")

    def detached(name: str) -> list[int]:
        process = up.beside("node", "start", name, "--detach", "--json", *folder)
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        (event,) = map(json.loads, output.splitlines())
        assert liveness(up)[name] == "ALIVE"
        return [event["pid"], *up.node_pids(name).values()]

    processes = detached("n2")
    stopped = megascale("node", "stop", "n2", *folder)
    assert stopped.returncode == 0, stopped.stderr
    until_gone(processes, "processes of n2 gone")
    again = megascale("node", "stop", "n2", *folder)
    assert again.returncode == 4 and "megascale nodes" in again.stderr

    processes = detached("extra")
    assert not any(map(ended, processes))
    assert up.stop() == 0
    until_gone(processes, "processes of the added node gone")


def test_without_a_cluster_the_error_has_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for folder, words in (("nowhere", "there is no cluster at"), ("run", "is down")):
        for command in (
            ("node", "start", "n2", "--cluster", str(tmp_path / folder)),
            ("up", "--add-node", "--run-folder", str(tmp_path / folder)),
        ):
            result = megascale(*command)
            assert result.returncode == 3, result.stderr
            assert words in result.stderr and "megascale up" in result.stderr
            assert len(result.stderr.splitlines()) == 1
    assert megascale("node", "start", "Not_A_Name").returncode == 2

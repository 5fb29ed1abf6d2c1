"""Pods with IPv6 addresses alone: three drivers, nodes and sidecars by the manifests' own commands.

The API server, the scheduler and the kubelets are the tests' own, and the addresses are those of
this network namespace's loopback interface, which are no loopback addresses.
"""

from __future__ import annotations

import subprocess
import urllib.request
from pathlib import Path

import pytest
from tests.harness.job_follower import JobFollower
from tests.harness.kubernetes_cluster import pod_cluster
from tests.harness.namespaces import missing

from megascale.v1 import types_pb2

STEPS = 60
pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(bool(missing()), reason=missing() or "there are hosts"),
    pytest.mark.timeout(300),
]


@pytest.fixture(autouse=True)
def loopback() -> None:
    """A new network namespace has its loopback interface down."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


def metrics_of(address: str) -> str:
    with urllib.request.urlopen(f"http://[{address}]:7790/metrics", timeout=10) as answer:
        return str(answer.read().decode())


async def test_a_job_trains_on_pods_that_have_no_ipv4(tmp_path: Path) -> None:
    async with pod_cluster(tmp_path, machines=3, nodes=2, driver_pods=True, family=6) as cluster:
        nodes = await cluster.nodes()
        for node in nodes.values():
            assert node.executor_endpoint.startswith("[fd77::"), node
            assert node.checkpoint_endpoint.startswith("[fd77::"), node
        async with cluster.client() as client:
            assert (await client.cluster_info()).leader.startswith("[fd77::")
            async with JobFollower(client, cluster.job("six", STEPS), cluster.folder) as run:
                job = await run.until_ended()
        assert (job.phase, job.attempt) == (types_pb2.JOB_PHASE_SUCCEEDED, 1), run.story()
        assert list(run.losses[1]) == list(range(1, STEPS + 1))
        for name in nodes:
            pod = cluster.pod(name)
            assert pod is not None
            address = cluster.machines.pods[pod["metadata"]["uid"]].address
            assert "megascale_build_info" in metrics_of(address)

"""A fault that names no node, in a real cluster: its nodes check each other; the bad one goes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.harness.chaos_cluster import chaos_cluster, measured
from tests.harness.installed_package import install
from tests.harness.job_follower import seconds

from megascale.v1 import types_pb2

STEPS = 60
TIMEOUT_S = 5  # of collectives: how long the peers of a stopped rank wait
FAILS = """
from megascale_executor.diagnostics.diagnostic import Diagnostic
from megascale_executor.diagnostics.finding import Finding

class Cable(Diagnostic):
    name = "cable"
    before_attempts = on_demand = False
    with_nodes = True

    async def run(self, node):
        verdict = "FAIL" if (node.folder / "loose").exists() else "PASS"
        return [Finding(self.name, "nic0", verdict, "symbol errors while the group reduced")]
"""


@pytest.mark.slow
async def test_the_nodes_of_a_job_find_the_one_that_fails_with_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    install(packages, "acme-cable", FAILS, {"cable": "Cable"})
    monkeypatch.setenv("PYTHONPATH", f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with chaos_cluster(tmp_path, "--nodes", "3") as cluster:
        async with cluster.client() as client:
            spec = cluster.job("unknown", steps=STEPS, interval_steps=10, spares=1)
            spec.recovery.collective_timeout_s = TIMEOUT_S
            async with cluster.follow(client, spec) as run:
                await run.until_step(20)
                good, bad = run.job.nodes
                (spare,) = run.job.spare_nodes
                (cluster.up.folder / "nodes" / bad / "loose").touch()
                # The other rank loses its peer; this one can say nothing, and is killed with it.
                os.kill(cluster.worker_pids(run.job)[1], signal.SIGSTOP)
                begun = await run.until_event("GROUP_CHECK_STARTED")
                ended = await run.until_event("GROUP_CHECK_ENDED")
                job = await run.until_ended()
                story = run.story()
            nodes = {node.name: node async for node in client.nodes()}
    assert job.phase == types_pb2.JOB_PHASE_SUCCEEDED, story
    assert (job.attempt, list(job.nodes), list(job.evicted_nodes)) == (2, [good, spare], [bad])
    assert f"found {bad}" in ended.message, story
    evicted = [e for e in run.events if e.reason == "NODE_EVICTED"]
    assert [(e.policy, e.mode) for e in evicted] == [("group-check", "ENFORCE")], story
    assert f"its checks with {min(good, spare)}, {max(good, spare)} fail" in evicted[0].message
    assert "symbol errors" in evicted[0].evidence[0].digest
    assert nodes[bad].disposition == types_pb2.NODE_DISPOSITION_QUARANTINED
    assert sorted(run.newest_losses) == list(range(1, STEPS + 1))
    measured("culprit searched", search_s=seconds(ended) - seconds(begun))

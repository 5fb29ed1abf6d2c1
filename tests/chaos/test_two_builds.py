"""A leader of this build takes over from one of the build before and back, while a job trains."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.harness.builds import previous_build
from tests.harness.chaos_cluster import measured
from tests.harness.ha_cluster import HaCluster, ha_cluster
from tests.harness.job_follower import JobFollower

from megascale.v1 import types_pb2
from megascale_client import AsyncClient

pytestmark = pytest.mark.slow
ENDLESS_STEPS = 100_000
STEPS_BETWEEN = 20
OLDER, NEWER = 0, 1  # the drivers


async def hand_over(cluster: HaCluster, old: int) -> None:
    """The leader ends as for an update; the other build leads, and it comes back as a standby."""
    assert await cluster.leading() == old
    assert await cluster.drivers[old].stop() == 0, cluster.story()
    cluster.paused.add(old)
    assert await cluster.leading(old) == 1 - old
    await cluster.drivers[old].start(leads=False)
    cluster.paused.discard(old)


async def phases(client: AsyncClient) -> dict[str, str]:
    """The phase of each job by name."""
    return {
        job.spec.name: types_pb2.JobPhase.Name(job.phase).removeprefix("JOB_PHASE_")
        async for job in client.jobs()
    }


@pytest.mark.parametrize("nodes", ["older", "newer"])
async def test_builds_lead_in_turn(tmp_path: Path, nodes: str) -> None:
    before = previous_build(tmp_path / "before")
    nodes_code = (before if nodes == "older" else None,) * 2
    async with (
        ha_cluster(tmp_path, (before, None), nodes_code) as cluster,
        cluster.client() as client,
    ):
        assert await cluster.leading() == OLDER
        run = JobFollower(client, cluster.job("long", ENDLESS_STEPS), cluster.folder)
        async with run:
            await run.until_step(STEPS_BETWEEN)
            workers = cluster.worker_pids(run.job)
            waiting: dict[str, str] = {}
            for turn, leaves in enumerate((OLDER, NEWER, OLDER)):
                # What one build decides the other reads: a new job, its end, a cordon.
                name = f"waits-{turn}"
                await client.submit(cluster.job(name, ENDLESS_STEPS))
                for other in [other for other, phase in waiting.items() if phase == "QUEUED"]:
                    await client.cancel(other, reason="tried by a test")
                    waiting[other] = "CANCELLED"
                waiting[name] = "QUEUED"
                await client.cordon("n2", reason=f"turn {turn}")
                await hand_over(cluster, leaves)
                await run.until_step(run.step + STEPS_BETWEEN)
                assert await phases(client) == {"long": "RUNNING", **waiting}
                found = [node async for node in client.nodes()]
                assert [n.name for n in found if "CORDONED" in str(n.disposition)] == ["n2"]
                await client.uncordon("n2", reason=f"turn {turn}")
                assert cluster.worker_pids(run.job) == workers, run.story()
                assert (run.job.attempt, run.job.restarts) == (1, 0), run.story()
            await client.cancel("long", reason="the test is over")
            await run.until_ended()
            measured("two builds", nodes=nodes, steps=run.step)
        # This build leads: it begins an attempt on nodes of the other one.
        last = JobFollower(client, cluster.job("last", 60), cluster.folder)
        async with last:
            await client.cancel(f"waits-{turn}", reason="the nodes are for the last job")
            await last.until_ended()
        assert last.job.phase == types_pb2.JOB_PHASE_SUCCEEDED, last.story()

"""A real job saves and leaves its nodes by order, and goes on at the very next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.harness.chaos_cluster import ChaosCluster, shared_cluster
from tests.harness.job_follower import JobFollower, seconds

from megascale.v1 import types_pb2
from megascale_client import AsyncClient, JobPhase, NotFound, NotPossible

# Far more than run here; the first regular checkpoint is never reached, so that each is by order.
STEPS = 20_000


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], ChaosCluster]]:
    with shared_cluster(lambda: tmp_path_factory.mktemp("suspended"), "--nodes", "2") as ready:
        yield ready


async def until_it_trains(followed: JobFollower) -> None:
    """Its first steps may be known before all its nodes have reported that they run."""
    await followed.until(
        lambda: (
            followed.job.phase == types_pb2.JOB_PHASE_RUNNING
            and len(followed.losses.get(1, {})) > 5
        ),
        "it trains",
    )


def goes_on_after(followed: JobFollower, step: int) -> bool:
    """Whether attempt 2 has begun with the step behind ``step``, and gone some further."""
    steps = sorted(followed.losses.get(2, {}))
    assert not steps or steps[0] == step + 1, "no step is lost, none is done again"
    return len(steps) > 3


async def test_a_suspended_job_frees_its_nodes_and_goes_on_at_the_next_step(
    clusters: Callable[[], ChaosCluster],
) -> None:
    cluster = clusters()
    spec = cluster.job("long", steps=STEPS, interval_steps=STEPS // 2)
    async with cluster.client() as client, cluster.follow(client, spec) as followed:
        await until_it_trains(followed)
        answer = await client.suspend("long", reason="maintenance", validate_only=True)
        assert "saves its state" in answer.consequence
        assert (await client.get("long")).phase == JobPhase.RUNNING
        await client.suspend("long", reason="maintenance")
        await followed.until(
            lambda: followed.job.phase == types_pb2.JOB_PHASE_SUSPENDED, "it is suspended"
        )
        job = await client.get("long")
        saved = job.committed_step
        assert saved == max(followed.losses[1]), "what was done last is what is saved"
        assert not [node.name async for node in client.nodes() if node.job]
        await other_job_runs(cluster, client)
        await client.resume("long", reason="done")
        await followed.until(lambda: goes_on_after(followed, saved), "it goes on")
        job = await client.get("long")
        assert (job.attempt, job.restored_step, job.restarts) == (2, saved, 0)
        with pytest.raises(NotPossible, match="cancel it first"):
            await client.delete("long", reason="tidy")
        await client.cancel("long", reason="enough")
        await followed.until_ended()
        await client.delete("long", reason="tidy")
        with pytest.raises(NotFound):
            await client.get("long")


async def other_job_runs(cluster: ChaosCluster, client: AsyncClient) -> None:
    spec = cluster.job("other", steps=5, interval_steps=5)
    async with cluster.follow(client, spec) as other:
        await other.until_ended()
        assert (await client.get("other")).phase == JobPhase.SUCCEEDED


@pytest.mark.slow
async def test_a_higher_priority_displaces_a_running_job_which_comes_back(
    clusters: Callable[[], ChaosCluster],
) -> None:
    cluster = clusters()
    low = cluster.job("low", steps=STEPS, interval_steps=STEPS // 2)
    high = cluster.job("high", steps=5, interval_steps=5)
    high.priority = 1
    async with cluster.client() as client, cluster.follow(client, low) as followed:
        await until_it_trains(followed)
        async with cluster.follow(client, high) as winner:
            await winner.until_ended()
        assert (await client.get("high")).phase == JobPhase.SUCCEEDED
        saved = max(followed.losses[1])
        await followed.until(lambda: goes_on_after(followed, saved), "it comes back")
        reasons = [event.reason async for event in client.events("jobs/low")]
        assert reasons.index("PREEMPTION_ORDERED") < reasons.index("JOB_PREEMPTED")
        assert (await client.get("low")).restarts == 0
        await client.cancel("low", reason="enough")
        await followed.until_ended()


@pytest.mark.slow
async def test_a_job_that_cannot_save_trains_on(clusters: Callable[[], ChaosCluster]) -> None:
    cluster = clusters()
    folder = cluster.checkpoints("stuck")
    spec = cluster.job("stuck", steps=STEPS, interval_steps=STEPS // 2)
    spec.checkpoint.final_timeout_s = 1.0
    (folder / "attempts").mkdir(parents=True)
    (folder / "attempts" / "attempt-000001").write_text("in the way")
    async with cluster.client() as client, cluster.follow(client, spec) as followed:
        await until_it_trains(followed)
        job = (await client.get("stuck")).proto
        await client.suspend("stuck", reason="maintenance")
        await followed.until(
            lambda: "so training continues" in cluster.rank_log(job, 0), "it could not save"
        )
        withdrawn = await followed.until_event("LEAVE_WITHDRAWN")
        asked = await followed.until_event("SUSPEND_REQUESTED")
        assert "it stays on its nodes: it could not save: " in withdrawn.message
        assert "attempt-000001" in withdrawn.message, "the storage's own error"
        # The driver's own deadline is that of the save and 120 s more.
        assert seconds(withdrawn) - seconds(asked) < 100
        assert followed.job.phase == types_pb2.JOB_PHASE_RUNNING and followed.job.attempt == 1
        step = max(followed.losses[1])
        await followed.until(lambda: max(followed.losses[1]) > step + 5, "and still")
        await client.cancel("stuck", reason="enough")
        await followed.until_ended()

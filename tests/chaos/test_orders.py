"""A real job under the orders of an operator: restart, back to a step, update, drain; the rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from tests.harness.chaos_cluster import ChaosCluster, shared_cluster
from tests.harness.job_follower import JobFollower

from megascale_client import (
    AsyncClient,
    InvalidJob,
    InvalidRequest,
    JobPhase,
    NodeDisposition,
    NotFound,
    PolicyMode,
)

STEPS = 20_000
JOB_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], ChaosCluster]]:
    with shared_cluster(lambda: tmp_path_factory.mktemp("orders"), "--nodes", "3") as ready:
        yield ready


async def attempt_trains(followed: JobFollower, number: int) -> None:
    await followed.until(
        lambda: len(followed.losses.get(number, {})) > 5, f"attempt {number} trains"
    )


async def test_a_job_is_restarted_moved_and_corrected_without_the_loss_of_a_step(
    clusters: Callable[[], ChaosCluster],
) -> None:
    cluster = clusters()
    spec = cluster.job("moved", steps=STEPS, interval_steps=STEPS // 2)
    async with cluster.client() as client, cluster.follow(client, spec) as followed:
        await attempt_trains(followed, 1)
        tried = await client.restart("moved", "new driver", validate_only=True)
        assert "saves its state" in tried.consequence
        await client.restart("moved", "new driver")
        await attempt_trains(followed, 2)
        assert min(followed.losses[2]) == max(followed.losses[1]) + 1
        saved = (await client.get("moved")).restored_step

        node = (await client.get("moved")).nodes[-1]
        await client.drain(node, "new firmware")
        await attempt_trains(followed, 3)
        assert min(followed.losses[3]) == max(followed.losses[2]) + 1
        job = await client.get("moved")
        assert node not in job.nodes and job.restarts == 0
        shown = {each.name: each async for each in client.nodes()}[node]
        assert shown.disposition == NodeDisposition.QUARANTINED
        await client.uncordon(node, "done")

        spec.recovery.max_restarts = 7
        answer = await client.update(spec, "more patience", restart=True)
        assert list(answer.changed_fields) == ["recovery.max_restarts"]
        await attempt_trains(followed, 4)
        job = await client.get("moved")
        assert (job.spec.recovery.max_restarts, job.spec_revision) == (7, 2)
        spec.trainer.model.layers += 1
        with pytest.raises(InvalidJob, match="cannot change"):
            await client.update(spec, "another model")

        with pytest.raises(NotFound, match="no complete checkpoint of step 3;"):
            await client.restart("moved", "back", from_step=3)
        await client.restart("moved", "back", from_step=saved)
        await attempt_trains(followed, 5)
        assert min(followed.losses[5]) == saved + 1, "it went back to the named step"
        assert (await client.get("moved")).restored_step == saved
        await client.cancel("moved", "enough")
        await followed.until_ended()
        await client.restart("moved", "not enough")
        async with asyncio.timeout(JOB_TIMEOUT_S):
            async for seen in client.watch("moved"):
                job = seen.job if seen.job is not None else job
                if (job.attempt, job.phase) == (6, JobPhase.RUNNING):
                    break
        await client.cancel("moved", "now it is")


async def test_rules_are_listed_observed_and_enforced(
    clusters: Callable[[], ChaosCluster],
) -> None:
    async with clusters().client() as client:
        await client.set_policy("hang", "observe", "a profile", validate_only=True)
        assert await modes(client) == {PolicyMode.ENFORCE}
        answer = await client.set_policy("hang", PolicyMode.OBSERVE, "a profile")
        assert answer.rule.mode == PolicyMode.OBSERVE and "only logged" in answer.consequence
        assert await modes(client) == {PolicyMode.ENFORCE, PolicyMode.OBSERVE}
        await client.set_policy("hang", "enforce", "done")
        with pytest.raises(InvalidRequest, match="silence"):
            await client.set_policy("mercy", "observe", "x")
        assert "nothing changes" in (await client.reset_breaker("just to see")).consequence


async def modes(client: AsyncClient) -> set[PolicyMode]:
    return {PolicyMode(rule.mode) for rule in (await client.cluster_info()).rules}

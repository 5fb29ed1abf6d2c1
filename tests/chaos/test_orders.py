"""A real job under the orders of an operator: restart, back to a step, update, drain; the rules."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.harness.chaos_cluster import ChaosCluster, shared_cluster
from tests.harness.installed_package import install
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


CODE = """
import time

from megascale_trainer.optimizer.adamw import AdamW


class Coded(AdamW):
    def __init__(self, setup):
        super().__init__(setup)
        print("code of version {version}", flush=True)

    def update(self, *values):
        time.sleep(0.02)
        super().update(*values)
"""


def write_code(folder: Path, version: int) -> str:
    """The job's own code, as `pip install --target` leaves it: an optimizer with its version."""
    folder.mkdir()
    code = CODE.replace("{version}", str(version))
    install(folder, "acme-coded", code, {"coded": "Coded"}, group="megascale.optimizers")
    return str(folder)


@pytest.mark.slow
async def test_the_next_attempt_runs_the_code_that_the_job_names_then(
    clusters: Callable[[], ChaosCluster],
) -> None:
    cluster = clusters()
    first, second = cluster.folder / "code-1", cluster.folder / "code-2"
    spec = cluster.job("coded", steps=STEPS, interval_steps=STEPS // 2)
    spec.trainer.optimizer.name = "coded"
    spec.trainer.optimizer.ClearField("options")
    spec.code.path = write_code(first, 1)

    def version(attempt: int) -> list[str]:
        job = followed.job
        assert job.attempt == attempt
        logs = [cluster.rank_log(job, rank).splitlines() for rank in (0, 1)]
        return [line for lines in logs for line in lines if line.startswith("code of version")]

    async with cluster.client() as client, cluster.follow(client, spec) as followed:
        await attempt_trains(followed, 1)
        assert version(1) == ["code of version 1"] * 2
        spec.code.path = write_code(second, 2)
        answer = await client.update(spec, "a faster optimizer", restart=True)
        assert list(answer.changed_fields) == ["code.path"]
        await attempt_trains(followed, 2)
        assert version(2) == ["code of version 2"] * 2
        assert min(followed.losses[2]) == max(followed.losses[1]) + 1
        assert (await client.get("coded")).restarts == 0
        await client.cancel("coded", "enough")
        await followed.until_ended()


async def test_rules_are_listed_observed_and_enforced(
    clusters: Callable[[], ChaosCluster],
) -> None:
    async with clusters().client() as client:
        await client.set_policy("hang", "observe", "a profile", validate_only=True)
        before = await modes(client)
        assert {name for name, mode in before.items() if mode == PolicyMode.OBSERVE} == {
            "log-root",
            "over-eviction",  # inferred, so observed until somebody has it enforced
            "repeated-check",
            "straggler",
            "traffic",
        }
        answer = await client.set_policy("hang", PolicyMode.OBSERVE, "a profile")
        assert answer.rule.mode == PolicyMode.OBSERVE and "only logged" in answer.consequence
        assert await modes(client) == {**before, "hang": PolicyMode.OBSERVE}
        await client.set_policy("hang", "enforce", "done")
        with pytest.raises(InvalidRequest, match="silence"):
            await client.set_policy("mercy", "observe", "x")
        assert "nothing changes" in (await client.reset_breaker("just to see")).consequence


async def modes(client: AsyncClient) -> dict[str, PolicyMode]:
    rules = (await client.cluster_info()).rules
    return {rule.name: PolicyMode(rule.mode) for rule in rules}

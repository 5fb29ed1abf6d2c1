"""Waits for progress do fail: a standstill is reported within the limit, and does not cascade."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
from tests.harness.chaos_cluster import ChaosCluster, shared_cluster
from tests.harness.waiting import Standstill, until

from megascale_client import TERMINAL_PHASES

LIMIT_S = 3.0
# For a slow machine. The wait must end with its own limit and not with the timeout of the test.
SLACK_S = 30.0
ENDLESS_STEPS = 100_000


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], ChaosCluster]]:
    with shared_cluster(lambda: tmp_path_factory.mktemp("waits"), "--nodes", "2") as shared:
        yield shared


@pytest.fixture
def cluster(ready: Callable[[], ChaosCluster]) -> ChaosCluster:
    return ready()


def test_a_wait_goes_on_while_something_moves_and_ends_when_nothing_does() -> None:
    begun_s = time.monotonic()
    looks = 0

    def moves() -> int:
        """Moves at the first looks, which are a quarter of the limit apart at least."""
        nonlocal looks
        looks += 1
        return min(looks, 4 * 3)

    with pytest.raises(
        Standstill, match=r"the moon: no progress for 0\.4 s; still at \d+\nno cheese"
    ):
        until(lambda: False, "the moon", moves, limit_s=0.4, story=lambda: "no cheese")
    assert time.monotonic() - begun_s > 4 * 0.4 - 0.1
    assert until(lambda: looks or None, "what is there already") == looks


@pytest.mark.slow  # of the tests' own clusters
async def test_a_worker_that_stops_stepping_fails_the_wait_in_its_limit(
    cluster: ChaosCluster,
) -> None:
    async with cluster.client() as client:
        spec = cluster.job("sleepy", steps=ENDLESS_STEPS, interval_steps=10)
        async with cluster.follow(client, spec) as run:
            await run.until_step(5)
            run.limit_s = LIMIT_S
            os.kill(cluster.worker_pids(run.job)[1], signal.SIGSTOP)
            begun_s = time.monotonic()
            with pytest.raises(
                Standstill,
                match=r"step 99999 of attempt 1: no progress for 3 s(.|\n)*RUNNING",
            ):
                await run.until_step(ENDLESS_STEPS - 1)
            assert LIMIT_S <= time.monotonic() - begun_s < LIMIT_S + SLACK_S


@pytest.mark.slow  # of the tests' own clusters
async def test_a_job_that_never_starts_fails_the_wait_and_leaves_none_to_the_next(
    cluster: ChaosCluster,
) -> None:
    """The test before has left its job with a stopped worker.

    This one leaves a job that waits for a third node.
    """
    async with cluster.client() as client:
        assert all([job.phase in TERMINAL_PHASES async for job in client.jobs()])
        (node, *_) = [node.name async for node in client.nodes()]
        await client.cordon(node, reason="not now")
        spec = cluster.job("patient", steps=ENDLESS_STEPS, interval_steps=10)
        async with cluster.follow(client, spec, limit_s=LIMIT_S) as run:
            with pytest.raises(
                Standstill, match=r"step 1 of attempt 1: no progress(.|\n)*waiting for nodes"
            ):
                await run.until_step(1)


@pytest.mark.slow  # of the tests' own clusters
async def test_a_cluster_that_lacks_a_node_is_replaced(
    cluster: ChaosCluster, ready: Callable[[], ChaosCluster]
) -> None:
    """The test before has left a node cordoned: this one gets a complete cluster."""
    async with cluster.client() as client:
        async with cluster.follow(client, cluster.job("whole", steps=2, interval_steps=0)) as run:
            await run.until_ended()
    assert ready() is cluster, "a complete and idle one is kept"

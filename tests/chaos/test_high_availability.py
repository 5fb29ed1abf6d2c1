"""Leaders of drivers and of etcd are lost while a job trains: control returns, no step is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.harness.chaos_cluster import measured
from tests.harness.ha_cluster import HaCluster, ha_cluster
from tests.harness.job_follower import JobFollower
from tests.harness.waiting import eventually

from megascale.v1 import types_pb2
from megascale_client import AsyncClient

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the proxies live in its loop
ENDLESS_STEPS = 100_000
STEPS_BETWEEN = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HaCluster]:
    folder: Path = tmp_path_factory.mktemp("ha")
    async with ha_cluster(folder) as running:
        yield running


async def check_training(
    cluster: HaCluster, client: AsyncClient, run: JobFollower, workers: dict[str, int]
) -> None:
    """The same processes train on in the first attempt, and orders are carried out."""
    await run.until_step(run.step + STEPS_BETWEEN)
    assert cluster.worker_pids(run.job) == workers
    assert (run.job.phase, run.job.attempt, run.job.restarts) == (
        types_pb2.JOB_PHASE_RUNNING, 1, 0,
    ), run.story()  # fmt: skip
    await cluster.control_works(client)
    await run.until_step(run.step + STEPS_BETWEEN)
    assert run.first_event("NODE_DEAD") is None, run.story()


async def kill_the_leader(cluster: HaCluster) -> float:
    """SIGKILL; the driver comes back as a standby."""
    old = await cluster.leading()
    began_s = time.monotonic()
    await cluster.drivers[old].kill()
    cluster.paused.add(old)
    await cluster.leading(old)
    took_s = time.monotonic() - began_s
    await cluster.drivers[old].start(leads=False)
    cluster.paused.discard(old)
    return took_s


async def kill_the_leader_of_etcd(cluster: HaCluster) -> float:
    """SIGKILL; the member comes back."""
    name = await cluster.etcd.leader()
    began_s = time.monotonic()
    cluster.etcd.members[name].kill()
    await cluster.leading()
    took_s = time.monotonic() - began_s
    await cluster.etcd.members[name].start()
    return took_s


async def stop_the_leader(cluster: HaCluster) -> float:
    """SIGSTOP: its keeper renews for 15 s more, then the lease ends; SIGCONT: it leads no more."""
    old = await cluster.leading()
    pid = cluster.drivers[old].pid
    began_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    cluster.paused.add(old)
    try:
        await cluster.leading(old)
        took_s = time.monotonic() - began_s
    finally:
        os.kill(pid, signal.SIGCONT)
    await until_not_leading(cluster, old)
    cluster.paused.discard(old)
    return took_s


async def cut_the_leader_off(cluster: HaCluster) -> float:
    """Nothing between the leader and etcd arrives, though connections stay; then it does again."""
    old = await cluster.leading()
    began_s = time.monotonic()
    for proxy in cluster.proxies[old]:
        proxy.swallow_requests = proxy.swallow_replies = True
    cluster.paused.add(old)
    new = await cluster.leading(old)
    took_s = time.monotonic() - began_s
    # The nodes leave a driver that has neither a term nor etcd, and find the one that leads.
    await cluster.drivers[new].until_nodes(2)
    for proxy in cluster.proxies[old]:
        proxy.reset()
    await until_not_leading(cluster, old)
    cluster.paused.discard(old)
    return took_s


async def until_not_leading(cluster: HaCluster, number: int) -> None:
    async def standby() -> bool:
        return not await cluster.drivers[number].leads()

    await eventually(standby, "a former leader that stands by", cluster.moves, story=cluster.story)


FAULTS = {
    "driver killed": kill_the_leader,
    "etcd leader killed": kill_the_leader_of_etcd,
    "driver stopped": stop_the_leader,
    "driver cut off": cut_the_leader_off,
}
SHORT = ("driver killed", "etcd leader killed")


@pytest.mark.parametrize(
    "faults", [SHORT, pytest.param(tuple(FAULTS), marks=pytest.mark.slow)], ids=["short", "all"]
)
async def test_a_job_trains_on_while_leaders_are_lost(
    cluster: HaCluster, faults: tuple[str, ...]
) -> None:
    async with cluster.client() as client:
        name = f"job-{len(faults)}"
        run = JobFollower(client, cluster.job(name, ENDLESS_STEPS), cluster.folder)
        async with run:
            await run.until_step(STEPS_BETWEEN)
            workers = cluster.worker_pids(run.job)
            assert len(workers) == 2
            took = {}
            for fault in faults:
                took[fault] = await FAULTS[fault](cluster)
                await check_training(cluster, client, run, workers)
            steps = list(run.losses[1])
            assert steps == sorted(steps) and list(run.losses) == [1]
            measured("high availability", **took, steps=run.step)
            await client.cancel(name, reason="the test is over")
            await run.until_ended()

"""Leaders of drivers and of etcd are lost while a job trains: control returns, no step is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tests.harness.chaos_cluster import measured
from tests.harness.ha_cluster import HaCluster, ha_cluster
from tests.harness.job_follower import JobFollower
from tests.harness.snippets import BACKUP, RAISE_GENERATION, RESTORE_MEMBER, block
from tests.harness.waiting import eventually

from megascale.v1 import types_pb2
from megascale_client import AsyncClient
from megascale_common.node.process import child_environment

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
    # A leader that is lost early has not stored that the job runs: the next one finds it out.
    await run.until(lambda: run.job.phase == types_pb2.JOB_PHASE_RUNNING, "the job runs")
    assert (run.job.attempt, run.job.restarts) == (1, 0), run.story()
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


@pytest.mark.slow
async def test_a_backup_is_restored_below_a_job_that_trains_on(cluster: HaCluster) -> None:
    """All members of etcd lose their data; the commands of docs/operations.md bring it back."""
    async with cluster.client() as client:
        run = JobFollower(client, cluster.job("restored", ENDLESS_STEPS), cluster.folder)
        async with run:
            await run.until_step(STEPS_BETWEEN)
            workers = cluster.worker_pids(run.job)
            await client.cordon("n1", reason="before the backup")
            save = block(*BACKUP).code.partition("\n")[2]  # behind the line that finds the endpoint
            await page_runs(cluster, save, ENDPOINT=cluster.etcd.endpoints[0])
            await client.cordon("n2", reason="after the backup")
            before = (await client.cluster_info()).epoch.cluster_generation
            began_s = time.monotonic()
            await lose_the_control_plane(cluster)
            lost_at = run.step
            await restore(cluster)
            for number, driver in enumerate(cluster.drivers):
                await driver.start(leads=number == 0)
            await cluster.leading()
            took_s = time.monotonic() - began_s
            assert (await client.cluster_info()).epoch.cluster_generation > before
            await run.until_step(lost_at + STEPS_BETWEEN)
            nodes = {node.name: str(node.disposition) async for node in client.nodes()}
            assert "CORDONED" in nodes["n1"] and "SCHEDULABLE" in nodes["n2"], nodes
            await client.uncordon("n1", reason="the test is over")
            await check_training(cluster, client, run, workers)
            measured("backup of three members", restored_s=took_s, steps=run.step)
            await client.cancel("restored", reason="the test is over")
            await run.until_ended()


async def lose_the_control_plane(cluster: HaCluster) -> None:
    """The drivers are stopped, the members of etcd killed, and their data is gone."""
    for driver in cluster.drivers:
        assert await driver.stop() == 0
    cluster.etcd.kill()
    for member in cluster.etcd.members.values():
        shutil.rmtree(member.data_dir)


async def restore(cluster: HaCluster) -> None:
    """As on the page: each member from the one file, then a higher generation."""
    peers = cluster.etcd.peers
    everyone = ",".join(f"{name}={url}" for name, url in peers.items())
    for name, member in cluster.etcd.members.items():
        own = {"NAME": name, "PEER": peers[name], "DATA": str(member.data_dir)}
        await page_runs(
            cluster, block(*RESTORE_MEMBER).code, MEMBERS=everyone, TOKEN="restored-1", **own
        )
    await cluster.etcd.start()
    endpoints = ",".join(cluster.etcd.endpoints)
    await page_runs(
        cluster, block(*RAISE_GENERATION).code, ENDPOINTS=endpoints, PREFIX=cluster.prefix
    )


async def page_runs(cluster: HaCluster, code: str, **variables: str) -> None:
    """Paste code into a shell that knows etcdctl; every line must succeed."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-euo", "pipefail", "-c", code], cwd=cluster.folder,
        env=child_environment({"PATH": path, **variables}), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"

"""The driver, then etcd, is lost under a running job: training continues, and control returns."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.harness.chaos_cluster import ChaosCluster, chaos_cluster, measured
from tests.harness.driver import KEY_REMOVED
from tests.harness.local_cluster import END_REASON
from tests.harness.paced import hold, paced, release
from tests.harness.processes import until_gone
from tests.harness.waiting import eventually, until

from megascale.v1 import driver_pb2, types_pb2
from megascale_common.etcd.server import EtcdServer
from megascale_common.node.status_page import read_status_page

# `make test` has a short form of both in test_high_availability and test_driver_service.
pytestmark = pytest.mark.slow
OUTAGE_S = 20.0
ENDLESS_STEPS = 100_000
STATUS_LOOK_S = 2.0
# Some 100 steps without etcd show as much as a thousand, and a job that outlasts the start of a
# driver needs no more of them.
OUTAGE_PACE_S, DRIVERLESS_PACE_S = 0.2, 0.06


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def etcd(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EtcdServer]:
    """An etcd of this test, because `megascale up` would restart its own within a second."""
    async with EtcdServer(tmp_path_factory.mktemp("etcd") / "data", unsafe_no_fsync=True) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    etcd: EtcdServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ChaosCluster]:
    options = ("--nodes", "2", "--etcd-endpoints", etcd.endpoint)
    with chaos_cluster(tmp_path_factory.mktemp("control"), *options) as running:
        yield running


async def test_a_driver_that_is_killed_costs_no_step(cluster: ChaosCluster) -> None:
    steps = 120
    async with cluster.client() as client:
        # Held, so that it outlasts the start of a driver on any machine.
        pace = paced(DRIVERLESS_PACE_S, held_from_step=steps - 10)
        spec = cluster.job("driverless", steps=steps, interval_steps=10, optimizer=pace)
        async with cluster.follow(client, spec) as run:
            await run.until_step(15)
            workers = cluster.worker_pids(run.job)
            before, driver = run.step, cluster.up.state["driver"]["pid"]
            os.kill(driver, signal.SIGKILL)
            killed_s = time.monotonic()
            await run.until_step(before + 20)
            resumed_s = time.monotonic() - killed_s
            assert cluster.up.state["driver"]["pid"] != driver
            shown = await client.get(run.name)
            assert shown.step >= before and shown.last_record.step >= before
            assert cluster.worker_pids(run.job) == workers
            release(cluster.up.site)
            job = await run.until_ended()
    hold(cluster.up.site)
    assert job.phase == types_pb2.JOB_PHASE_SUCCEEDED, run.story()
    assert (job.attempt, job.restarts) == (1, 0), run.story()
    assert list(run.losses) == [1]
    # Records that the driver had received and not yet sent on are lost with it; every step was
    # still trained, and once.
    missing = sorted(set(range(1, steps + 1)) - set(run.losses[1]))
    assert not missing or (before < missing[0] and missing[-1] - missing[0] < len(missing)), (
        before,
        missing,
    )
    assert list(run.losses[1]) == sorted(run.losses[1])
    assert f"finished: step {steps}" in cluster.rank_log(job, 1)
    await check_figures_stay(cluster, job)
    measured("driver killed", watch_resumed_s=resumed_s, killed_after_step=before)


async def check_figures_stay(cluster: ChaosCluster, ended: driver_pb2.Job) -> None:
    """An ended job shows the same at the next driver, to which no agent reports it any more."""
    assert ended.step == ended.last_record.step == ended.spec.trainer.training.steps
    assert ended.goodput.productive.ToMilliseconds() > 0 == ended.goodput.lost_steps
    os.kill(cluster.up.state["driver"]["pid"], signal.SIGKILL)
    async with cluster.client() as client:
        # At once the driver that is gone may still be named; the client calls until one answers.
        again = await client.get(ended.spec.name)
    assert again == ended


async def test_training_goes_on_without_etcd_and_control_returns(
    cluster: ChaosCluster, etcd: EtcdServer
) -> None:
    async with cluster.client() as client:
        async with cluster.follow(
            client,
            cluster.job("etcdless", steps=ENDLESS_STEPS, interval_steps=10, pace_s=OUTAGE_PACE_S),
        ) as run:
            await run.until_step(10)
            job, workers = run.job, cluster.worker_pids(run.job)
            logged = len((cluster.up.folder / "driver.log").read_text())
            etcd.kill()
            killed_s, steps = time.monotonic(), [step_of(cluster, job)]
            while time.monotonic() - killed_s < OUTAGE_S:
                await asyncio.sleep(STATUS_LOOK_S)
                await eventually(lambda: step_of(cluster, job) > steps[-1], "a further step")
                steps.append(step_of(cluster, job))
            back_s = time.monotonic()
            await etcd.start()

            # Control is back: a new job is accepted, and both are cancelled.
            async with cluster.follow(
                client,
                cluster.job("next", steps=ENDLESS_STEPS, interval_steps=10, pace_s=OUTAGE_PACE_S),
            ) as other:
                control_s = time.monotonic() - back_s
                await run.until_step(steps[-1] + 10)
                assert cluster.worker_pids(run.job) == workers
                assert (run.job.phase, run.job.attempt) == (types_pb2.JOB_PHASE_RUNNING, 1), (
                    run.story()
                )
                assert list(run.losses[1]) == list(range(1, run.step + 1))
                cancelled_s = time.monotonic()
                await client.cancel(run.name, reason=END_REASON)
                until_gone(workers.values(), "workers of the cancelled job gone")
                gone_s = time.monotonic() - cancelled_s
                ended = await run.until_ended()
                await other.until_step(1)
                await client.cancel(other.name, reason=END_REASON)
                await other.until_ended()
    assert (ended.phase, ended.attempt, ended.restarts) == (types_pb2.JOB_PHASE_CANCELLED, 1, 0), (
        run.story()
    )
    assert run.first_event("NODE_DEAD") is None
    measured(
        "etcd killed",
        steps_in_outage=steps[-1] - steps[0],
        control_back_s=control_s,
        cancel_to_gone_s=gone_s,
    )
    assert KEY_REMOVED in (cluster.up.folder / "driver.log").read_text()[logged:]


def step_of(cluster: ChaosCluster, job: driver_pb2.Job) -> int:
    """Last step that rank 0 has completed, read from its status page without any service."""
    path = cluster.status_page(job, 0)
    return int(until(lambda: read_status_page(path), "a reading of the status page").step)

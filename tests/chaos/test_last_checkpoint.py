"""A job succeeds only with the checkpoint of its last step, and short intervals commit, too."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.harness.chaos_cluster import ChaosCluster, shared_cluster
from tests.harness.local_cluster import megascale
from tests.harness.paced import hold, paced, release

from megascale.v1 import driver_pb2, job_pb2, types_pb2
from megascale_client import TERMINAL_PHASES

SLOW_PACE_S = 0.04  # of the steps until several checkpoints are complete
STEPS, HALF, MANY_STEPS = 20, 10, 120
SEVERAL = 6
FINAL_WAIT_S = 1.0
NOT_SAVED = "CHECKPOINT_FAILED"
SUCCEEDED, FAILED = types_pb2.JOB_PHASE_SUCCEEDED, types_pb2.JOB_PHASE_FAILED


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], ChaosCluster]]:
    with shared_cluster(lambda: tmp_path_factory.mktemp("saved"), "--nodes", "2") as found:
        yield found


@pytest.fixture
def clusters(ready: Callable[[], ChaosCluster]) -> Callable[[], ChaosCluster]:
    def held() -> ChaosCluster:
        found = ready()
        hold(found.up.site)
        return found

    return held


async def run(cluster: ChaosCluster, spec: job_pb2.JobSpec) -> tuple[driver_pb2.Job, list[str]]:
    """The job as it ended, and the reasons of its events."""
    async with cluster.client() as client, cluster.follow(client, spec) as followed:
        await followed.until_ended()
        job = await client.get(spec.name)
    return job, [reason for reason, _ in await lines(cluster, spec.name)]


async def lines(cluster: ChaosCluster, name: str) -> list[tuple[str, str]]:
    """The reasons and messages of the events of a job."""
    async with cluster.client() as client:
        return [(line.reason, line.message) async for line in client.events(f"jobs/{name}")]


def succeeds(*command: str | Path) -> bool:
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


async def shown(cluster: ChaosCluster, *command: str) -> subprocess.CompletedProcess[str]:
    """What a command of the CLI prints."""
    return await asyncio.to_thread(megascale, *command, "--cluster", str(cluster.up.folder))


def block(folder: Path) -> None:
    """A file where the first attempt's folder would be: the log can be written, no checkpoint."""
    (folder / "attempts").mkdir(parents=True)
    (folder / "attempts" / "attempt-000001").write_text("in the way")


async def test_a_checkpoint_that_cannot_be_written_fails_the_job(
    clusters: Callable[[], ChaosCluster],
) -> None:
    cluster = clusters()
    spec = cluster.job("unsaved", steps=STEPS, interval_steps=HALF)
    spec.checkpoint.final_timeout_s = FINAL_WAIT_S
    block(cluster.checkpoints("unsaved"))
    job, events = await run(cluster, spec)
    assert job.phase == FAILED, job.phase_reason
    assert f"the checkpoint of step {STEPS} was not saved" in job.phase_reason
    assert "a file is where a folder is needed" in job.phase_reason, "the cause is named"
    assert (job.attempt, job.committed_step, len(job.conditions)) == (1, 0, 0)
    failed = [text for reason, text in await lines(cluster, "unsaved") if reason == NOT_SAVED]
    found = [re.match(r"the checkpoint of step (\d+) was not saved", text) for text in failed]
    unsaved = [int(each[1]) if each else None for each in found]
    # A slow node has no slot for the first of them in time, or reports no more than the last.
    assert unsaved in ([HALF, STEPS], [STEPS]), "one line for each step, not for each rank"
    assert "JOB_SUCCEEDED" not in events
    explained = await shown(cluster, "explain", "unsaved")
    assert "CHECKPOINT_FAILED" in explained.stdout


@pytest.mark.slow
async def test_a_full_disk_fails_the_job(clusters: Callable[[], ChaosCluster]) -> None:
    cluster = clusters()
    folder = cluster.checkpoints("full")
    folder.mkdir(parents=True)
    if not await asyncio.to_thread(
        succeeds, "mount", "-t", "tmpfs", "-o", "size=128k", "none", folder
    ):
        pytest.skip("a small file system can be mounted by root only")
    try:
        spec = cluster.job("full", steps=STEPS, interval_steps=HALF)
        spec.checkpoint.final_timeout_s = FINAL_WAIT_S
        job, _ = await run(cluster, spec)
    finally:
        assert await asyncio.to_thread(succeeds, "umount", "--lazy", folder)
    assert job.phase == FAILED, job.phase_reason
    assert "No space left on device" in job.phase_reason


async def test_a_checkpoint_that_can_be_written_again_in_time_saves_the_job(
    clusters: Callable[[], ChaosCluster],
) -> None:
    cluster = clusters()
    spec = cluster.job("in-time", steps=STEPS, interval_steps=HALF)
    block(cluster.checkpoints("in-time"))
    async with cluster.client() as client, cluster.follow(client, spec) as followed:

        def last_failed() -> bool:
            failures = [e for e in followed.events if e.reason == "CHECKPOINT_FAILED"]
            return any(f"of step {STEPS} " in event.message for event in failures)

        await followed.until(last_failed, "the last checkpoint has failed")
        (cluster.checkpoints("in-time") / "attempts" / "attempt-000001").unlink()
        job = await followed.until_ended()
    assert (job.phase, job.committed_step) == (SUCCEEDED, STEPS), job.phase_reason
    assert (job.attempt, len(job.conditions)) == (1, 0)


@pytest.mark.slow
async def test_a_daemon_that_is_killed_has_an_event_and_costs_no_model(
    clusters: Callable[[], ChaosCluster],
) -> None:
    cluster = clusters()
    # Held, so that it cannot end before the daemon does.
    spec = cluster.job(
        "undaemoned", steps=40, interval_steps=10, optimizer=paced(held_from_step=25)
    )
    async with cluster.client() as client, cluster.follow(client, spec) as followed:
        await followed.until_event("CHECKPOINT_COMMITTED")
        node = followed.job.nodes[1]
        os.kill(cluster.up.node_pids(node)["checkpoint"], signal.SIGKILL)
        event = await followed.until_event("CHECKPOINT_DAEMON_RESTARTED", f"nodes/{node}")
        release(cluster.up.site)
        job = await followed.until_ended()
    assert "status -9" in event.message
    assert (job.phase, job.committed_step, job.attempt) == (SUCCEEDED, 40, 1), job.phase_reason


@pytest.mark.slow
async def test_a_job_that_may_end_without_it_succeeds_with_a_condition(
    clusters: Callable[[], ChaosCluster],
) -> None:
    cluster = clusters()
    spec = cluster.job("allowed", steps=STEPS, interval_steps=HALF)
    spec.checkpoint.final_timeout_s = FINAL_WAIT_S
    spec.checkpoint.require_final = False
    block(cluster.checkpoints("allowed"))
    job, _ = await run(cluster, spec)
    assert job.phase == SUCCEEDED, job.phase_reason
    (condition,) = job.conditions
    assert condition.type == types_pb2.JOB_CONDITION_TYPE_NOT_SAVED
    assert f"the checkpoint of step {STEPS} was not saved" in condition.message
    watched = await shown(cluster, "watch", "allowed")
    assert watched.returncode == 1
    assert "not saved" in watched.stdout


@pytest.mark.parametrize("interval", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_short_intervals_commit_throughout_the_run(
    clusters: Callable[[], ChaosCluster], interval: int
) -> None:
    cluster = clusters()
    name = f"every-{interval}"
    spec = cluster.job(name, steps=MANY_STEPS, interval_steps=interval, pace_s=SLOW_PACE_S)

    def committed() -> list[int]:
        return [record.step for record in cluster.commit_log(name).commits()]

    async with cluster.client() as client, cluster.follow(client, spec) as followed:

        def several() -> bool:
            saved = followed.job.committed_step > 0 and len(committed()) >= SEVERAL
            return saved or followed.job.phase in TERMINAL_PHASES

        await followed.until(several, "several commits while it trains")
        release(cluster.up.site)  # the rest at the usual pace
        job = await followed.until_ended()
    assert (job.phase, job.committed_step) == (SUCCEEDED, MANY_STEPS), job.phase_reason
    before_the_last = [step for step in committed() if step < MANY_STEPS]
    assert len(before_the_last) >= SEVERAL, f"committed: {committed()}"
    reasons = [reason for reason, _ in await lines(cluster, name)]
    assert reasons.count("CHECKPOINT_SKIPPED") <= 3, "a line for each power of ten"


@pytest.mark.slow
async def test_a_run_decides_itself_how_often_it_saves(
    clusters: Callable[[], ChaosCluster],
) -> None:
    cluster = clusters()
    spec = cluster.job("auto", steps=80, interval_steps=0)
    spec.checkpoint.interval = job_pb2.CHECKPOINT_INTERVAL_AUTO
    spec.checkpoint.device_mtbf_hours = 1.0  # often, so that the run of 80 steps has several saves
    job, _ = await run(cluster, spec)
    assert (job.phase, job.committed_step) == (SUCCEEDED, 80), job.phase_reason
    committed = [record.step for record in cluster.commit_log("auto").commits()]
    assert min(committed) == 10 and len(committed) >= 2, f"committed: {committed}"
    record = job.last_record
    assert record.checkpoint_interval_steps >= 4
    assert record.HasField("checkpoint_cost_s"), "it has measured what a save costs"
    assert record.HasField("data_wait") and record.memory_bytes > 0
    shown_text = (await shown(cluster, "job", "auto")).stdout
    assert f"auto: every {record.checkpoint_interval_steps} steps; one costs" in shown_text


async def test_a_warm_start_beyond_the_last_step_is_refused(
    clusters: Callable[[], ChaosCluster],
) -> None:
    cluster = clusters()
    job, _ = await run(cluster, cluster.job("base", steps=6, interval_steps=2))
    assert (job.phase, job.committed_step) == (SUCCEEDED, 6), job.phase_reason
    for steps in (6, 4):
        spec = cluster.job(f"beyond-{steps}", steps=steps, interval_steps=2)
        spec.checkpoint.load_uri = str(cluster.checkpoints("base"))
        job, events = await run(cluster, spec)
        assert job.phase == FAILED, job.phase_reason
        assert f"restored step 6 is not below trainer.training.steps {steps}" in job.phase_reason
        assert (job.attempt, job.restarts) == (1, 0)
        assert "ATTEMPT_STARTED" not in events

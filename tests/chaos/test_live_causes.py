"""Why the MFU fell, on a live job: each cause that CPUs can show is injected and named.

One job of four ranks runs through all of them, with clean steps before each. That clocks fell is
only known from counters, which no CPU here has (tests/unit/test_spans_decline.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import pytest
from tests.harness import caused
from tests.harness.chaos_cluster import ChaosCluster, chaos_cluster, measured
from tests.harness.job_follower import JobFollower
from tests.harness.local_cluster import megascale

from megascale.v1 import driver_pb2
from megascale_client import AsyncClient

pytestmark = pytest.mark.slow

RANKS, RANK = 4, 2
WINDOW = 60  # steps, clean and with the cause
# The loader of one node fills its ring of three steps, then it stands still for so many.
LOADER_RUNS_S, LOADER_STOPS_STEPS = 0.004, 12
WORDS = {
    "slow_host": "a slow host",
    "garbage_collection": "garbage collection holds the slowest rank of a step up",
    "network_wait": "the network: the last rank to enter all_gather_wait dp",
    "checkpoint": "the checkpoint's snapshot holds the slowest rank of a step up",
    "data_wait": "the wait for data holds the slowest rank of a step up",
}
IN_ONE_PLACE = ("slow_host", "garbage_collection", "data_wait")


async def test_each_cause_is_named_on_a_live_job(tmp_path: Path) -> None:
    with chaos_cluster(tmp_path, "--nodes", str(RANKS)) as cluster:
        site = cluster.up.folder.with_name(cluster.up.folder.name + ".site")
        async with cluster.client() as client:
            spec = cluster.job(
                "live", steps=100_000, interval_steps=2, dp=RANKS, optimizer=caused.caused(RANK)
            )
            async with cluster.follow(client, spec) as run:
                await run.until_step(20)
                found = {}
                for cause in get_args(caused.Cause):
                    start = await clean(run)
                    with caused.injected(site, cause):
                        found[cause] = await answer(client, run, start)
                start = await clean(run)
                async with starved(cluster, run):
                    found["data_wait"] = await answer(client, run, start)
                where = ("--cluster", str(cluster.up.folder))
                shown = megascale("why", "live", *where)
                await client.cancel("live", reason="the test is over")
    story = {cause: (each.cause, each.sentence) for cause, each in found.items()}
    assert {cause: each.cause for cause, each in found.items()} == {
        cause: cause for cause in WORDS
    }, story
    for cause, each in found.items():
        assert WORDS[cause] in each.sentence, story
        assert "the MFU fell by" in each.sentence, story
        if cause in IN_ONE_PLACE:
            assert (each.rank, each.node) == (RANK, run.job.nodes[RANK]), story
    assert shown.returncode == 0, shown
    for cause, each in found.items():
        measured(
            f"live cause {cause}",
            before_ms=each.step_before_ms,
            after_ms=each.step_after_ms,
            share=each.shares[cause],
        )


async def clean(run: JobFollower) -> int:
    """Wait for WINDOW steps without a cause; returns the newest step."""
    await run.until_step(run.step + WINDOW + 5)
    return run.step


async def answer(
    client: AsyncClient, run: JobFollower, start: int
) -> driver_pb2.GetMfuDeclineResponse:
    """What the driver says of the WINDOW steps since ``start``, and as many before."""
    split = start + 3  # by then the cause has begun on all ranks
    await run.until_step(split + WINDOW)
    return await client.mfu_decline("live", steps=run.step - split + WINDOW, split_step=split)


@contextlib.asynccontextmanager
async def starved(cluster: ChaosCluster, run: JobFollower) -> AsyncIterator[None]:
    """While the body runs, the loader of RANK's node hardly does."""
    pid = cluster.up.node_pids(run.job.nodes[RANK])["loader"]
    begun_s, ended_s = (run.completed_s[1, run.step - back] for back in (WINDOW, 0))
    stopped_s = LOADER_STOPS_STEPS * (ended_s - begun_s) / WINDOW

    async def pulses() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(stopped_s)
            os.kill(pid, signal.SIGCONT)
            await asyncio.sleep(LOADER_RUNS_S)

    task = asyncio.create_task(pulses())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        os.kill(pid, signal.SIGCONT)

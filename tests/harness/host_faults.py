"""Faults of the network between hosts, under a job that trains; each reports what became of it.

The figures of each fault have ``right``: whether the outcome is what it should be. A partition
drops every packet and answers none, so nobody gets a refusal: only time shows it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.harness.hosts import NODES, HostCluster
from tests.harness.job_follower import JobFollower, seconds
from tests.harness.waiting import eventually

from megascale.v1 import types_pb2
from megascale_checkpoint.commit.commit_log import CommitLog
from megascale_checkpoint.storage import FileStorage
from megascale_client import AsyncClient, JobPhase, MegascaleError

Figures = dict[str, Any]
STEPS = 240
BEFORE = 30  # steps before the fault
LOSS = 0.01
LOST = ("NODE_DEAD", "NODE_EVICTED", "NODE_QUARANTINED")


async def calm(cluster: HostCluster, steps: int = STEPS) -> Figures:
    """No fault, but those of the cluster's cables."""

    async def nothing(run: JobFollower, client: AsyncClient) -> Figures:
        return {}

    return await _with_job(cluster, "calm", steps, nothing, attempts=1)


async def lossy(cluster: HostCluster, steps: int = STEPS) -> Figures:
    """Every host loses LOSS of what arrives, from before the job until its end."""
    for host in cluster.network.hosts.values():
        host.lose(LOSS)
    try:
        return await calm(cluster, steps)
    finally:
        for host in cluster.network.hosts.values():
            host.heal()


async def slow(cluster: HostCluster, rate: str = "2mbit", steps: int = STEPS) -> Figures:
    """Every node sends no faster than ``rate``."""
    for node in NODES:
        cluster.host(node).limit_rate(rate)
    return await calm(cluster, steps)


async def node_cut_off(cluster: HostCluster, steps: int = STEPS) -> Figures:
    """The node with rank 0 is cut off: its spare takes over, and it comes back without work."""

    async def fault(run: JobFollower, client: AsyncClient) -> Figures:
        node = run.job.nodes[0]
        cut_s = time.time()
        cluster.host(node).cut()
        dead = await run.until_event("NODE_DEAD", f"nodes/{node}")
        await run.until_step(1 + min(run.losses[1]), attempt=2)
        resumed_s = min(at for (attempt, _), at in run.completed_s.items() if attempt == 2)
        cluster.host(node).heal()

        async def back() -> bool:
            found = [each async for each in client.nodes() if each.name == node]
            alive = found[0].liveness == types_pb2.NODE_LIVENESS_ALIVE
            pids = json.loads((cluster.folder / "nodes" / node / "pids.json").read_text())
            return alive and not any(role.startswith("rank-") for role in pids)

        await eventually(back, f"{node} without work", lambda: run.step, story=cluster.story)
        return {
            "node": node,
            "detected_s": seconds(dead) - cut_s,
            "next_step_s": resumed_s - cut_s,
            "left": node not in run.job.nodes,
        }

    return await _with_job(cluster, "node", steps, fault, attempts=2)


async def driver_cut_off(
    cluster: HostCluster, cut_for_s: float = 20.0, steps: int = 2 * STEPS
) -> Figures:
    """The driver reaches nobody: the job trains on, and nothing has happened when it is back."""
    return await _control_cut_off(cluster, "driver", cut_for_s, steps)


async def etcd_cut_off(
    cluster: HostCluster, cut_for_s: float = 20.0, steps: int = 2 * STEPS
) -> Figures:
    """Nobody reaches etcd: the driver stops leading, the job trains on, the driver leads again."""
    return await _control_cut_off(cluster, "etcd", cut_for_s, steps)


async def _control_cut_off(
    cluster: HostCluster, host: str, cut_for_s: float, steps: int
) -> Figures:
    async def fault(run: JobFollower, client: AsyncClient) -> Figures:
        before, cut_s = _committed(cluster, run.name), time.time()
        cluster.host(host).cut()
        await asyncio.sleep(cut_for_s)
        during = _committed(cluster, run.name)
        cluster.host(host).heal()
        healed_s = time.time()
        # The first of its own changes that a driver stores again.
        await run.until(lambda: run.job.committed_step > during, "a commit after the cut")
        return {
            "cut_s": healed_s - cut_s,
            "steps_committed_meanwhile": during - before,
            "seen_again_s": time.time() - healed_s,
            "trained_on": during > before,
        }

    return await _with_job(cluster, host, steps, fault, attempts=1)


def _committed(cluster: HostCluster, job: str) -> int:
    """The newest step in the job's commit log, as the storage has it."""
    log = CommitLog(FileStorage(cluster.folder / "checkpoints" / job))
    log.refresh()
    return max((record.step for record in log.commits()), default=0)


async def _with_job(
    cluster: HostCluster,
    name: str,
    steps: int,
    fault: Callable[[JobFollower, AsyncClient], Awaitable[Figures]],
    *,
    attempts: int,
) -> Figures:
    async with cluster.client() as client:
        async with cluster.follow(client, cluster.job(name, steps=steps)) as run:
            try:
                await run.until_step(min(BEFORE, steps // 2))
                found = await fault(run, client)
                await run.until_ended()
                events = [event async for event in client.events()]
            except MegascaleError as error:
                raise AssertionError(f"{error}\n{run.story()}\n{cluster.story()}") from error
            except AssertionError as error:
                raise AssertionError(f"{error}\n{cluster.story()}") from None
        return found | _outcome(run, events, steps, attempts, found)


def _outcome(
    run: JobFollower, events: Sequence[types_pb2.Event], steps: int, attempts: int, found: Figures
) -> Figures:
    """What became of the job, and of all nodes by the cluster's log; whether that is right."""
    lost = sorted({event.subject for event in (*events, *run.events) if event.reason in LOST})
    expected = [f"nodes/{found['node']}"] if "node" in found else []
    whole = sorted(run.newest_losses) == list(range(1, steps + 1))
    times = sorted(run.completed_s.values())
    gaps = [after - before for before, after in itertools.pairwise(times)]
    succeeded = run.job.phase == JobPhase.SUCCEEDED
    return {
        "phase": types_pb2.JobPhase.Name(run.job.phase).removeprefix("JOB_PHASE_"),
        "attempts": run.job.attempt,
        "nodes_lost": lost,
        "suspected": sum(event.reason == "NODE_SUSPECT" for event in events),
        "steps_seen": len(run.newest_losses),
        "step_s": sorted(gaps)[len(gaps) // 2],
        "right": succeeded
        and whole
        and run.job.attempt == attempts
        and lost == expected
        and found.get("left", True)
        and found.get("trained_on", True),
    }

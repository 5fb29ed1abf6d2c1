"""A worker hangs with its process alive, in a real cluster: the job restarts on the same nodes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tests.harness.chaos_cluster import ChaosCluster, chaos_cluster, measured
from tests.harness.job_follower import JobFollower, seconds
from tests.harness.paced import paced, release
from tests.harness.waiting import eventually
from tests.unit.test_flight_recorder import dump, entry

from megascale.v1 import driver_pb2, types_pb2
from megascale_client import AsyncClient, PolicyMode
from megascale_common.node.files import AttemptFolder
from megascale_common.node.status_page import read_status_page
from megascale_driver.core.values.policy import Policy
from megascale_executor.agent.workers import evidence
from megascale_trainer.process import flight_dump

# A pause below the floor is no hang: a busy machine may give two ranks no CPU time for seconds.
# Who holds a job up is said from `suspect_after_s` on, so the verdict comes well after that.
FLOOR_S, DEFAULT_FLOOR_S = Policy().suspect_after_s + 5.0, 60.0
STEPS = 80
HELD_FROM_STEP = 61  # until a worker is stopped: the job cannot end before that
STOPPED_RANK = 1
STACK = "most recent call first"


async def test_a_stopped_worker_is_named_and_the_job_finishes(tmp_path: Path) -> None:
    options = ("--nodes", "2", "--hang-floor-s", f"{FLOOR_S:g}", "--heartbeat-interval-s", "1")
    with chaos_cluster(tmp_path, *options) as cluster:
        async with cluster.client() as client:
            held = paced(held_from_step=HELD_FROM_STEP)
            spec = cluster.job("hung", steps=STEPS, interval_steps=20, optimizer=held)
            # Only observed until this test has looked, which a busy machine may delay.
            await client.set_policy("hang", PolicyMode.OBSERVE, "to see who holds it up")
            async with cluster.follow(client, spec) as run:
                await run.until_step(HELD_FROM_STEP - 1)  # enough steps to measure its pace
                nodes = list(run.job.nodes)
                stopped_at_s = stop_outside_operations(cluster, run)
                release(cluster.up.site)
                log = cluster.status_page(run.job, 0).with_name("rank-00000.log")
                record_of_nccl(cluster, run, log)
                held_up = await standstill(client)
                await client.set_policy("hang", PolicyMode.ENFORCE, "seen")
                await run.until(lambda: verdict(run), "the verdict that ends the attempt")
                hang = verdict(run)
                job = await run.until_ended()
                story = run.story()
    assert job.phase == types_pb2.JOB_PHASE_SUCCEEDED and hang is not None, story
    assert (job.attempt, job.restarts, list(job.nodes), list(job.evicted_nodes)) == (
        2,
        1,
        nodes,
        [],
    ), story
    assert (
        f"rank {STOPPED_RANK} on node {nodes[STOPPED_RANK]}" in hang.message
        and "rank 0 " not in hang.message
    ), story
    assert STACK in log.read_text(), "the log lacks where rank 0 waited"
    assert [place.rank for place in held_up.ranks if place.holds_up] == [STOPPED_RANK], held_up
    assert f"rank {STOPPED_RANK} on node {nodes[STOPPED_RANK]}" in held_up.standstill
    assert list(held_up.ranks[0].waits_for) == [STOPPED_RANK] and held_up.ranks[0].inside
    suspects = [item.source for item in hang.evidence if item.digest.startswith("suspect")]
    assert suspects == [f"nodes/{nodes[STOPPED_RANK]}/ranks/{STOPPED_RANK}"], story
    stacks = run.first_event("HANG_STACKS")
    assert stacks is not None, story
    assert stacks.message.startswith(f"rank {STOPPED_RANK}: no stack: it is stopped (T)"), story
    assert stacks.message.endswith(
        f"NCCL's records: rank {STOPPED_RANK} did not enter all_reduce 4 of default_pg, in which "
        f"rank 0 waited, of which no dump came from rank {STOPPED_RANK}"
    ), story
    assert [(item.kind, item.source.rpartition("/")[2]) for item in stacks.evidence] == [
        ("stack", str(STOPPED_RANK)),
        ("stack", "0"),
        ("nccl_record", str(STOPPED_RANK)),
    ]
    assert "step_loop.py" in stacks.evidence[1].digest or "trainer.py" in stacks.evidence[1].digest
    assert sorted(run.newest_losses) == list(range(1, STEPS + 1))
    detected_s = seconds(hang) - stopped_at_s
    measured("worker stopped", detected_s=detected_s, restored_step=job.restored_step)
    assert FLOOR_S <= detected_s < DEFAULT_FLOOR_S


def verdict(run: JobFollower) -> types_pb2.Event | None:
    """The line by which the attempt ends."""
    lines = (event for event in run.events if event.reason == "HANG_SUSPECTED")
    return next((line for line in lines if line.mode == "ENFORCE"), None)


def record_of_nccl(cluster: ChaosCluster, run: JobFollower, log: Path) -> None:
    """Answer the agent for rank 0, as the rank does on a GPU; one that is stopped cannot answer."""
    folder = AttemptFolder(cluster.status_page(run.job, 0).parent)
    world = ("0", "default_pg", [0, STOPPED_RANK])
    done = [entry(world, number, "completed") for number in (1, 2, 3)]
    data = dump(*done, entry(world, 4, "started"), groups=(world,))

    def behind_the_stack() -> bytes:
        # The agent reads both then, and waits for this one for longer.
        end_s = time.monotonic() + evidence.WAIT_S * 0.75
        while STACK not in log.read_text() and time.monotonic() < end_s:
            time.sleep(0.02)
        return data

    flight_dump.answer(folder.flight_request(0), folder.flight_dump(0), behind_the_stack)


async def standstill(client: AsyncClient) -> driver_pb2.GetTopologyResponse:
    """What the driver says of the ranks once the job stands still, well before it is restarted."""

    async def seen() -> driver_pb2.GetTopologyResponse | None:
        found = await client.topology("hung")
        assert found.attempt == 1, "restarted before it was said who holds it up"
        return found if found.standstill and found.ranks[0].waits_for else None

    found: driver_pb2.GetTopologyResponse = await eventually(seen, "the job stands still")
    return found


def stop_outside_operations(cluster: ChaosCluster, run: JobFollower) -> float:
    """Stop the worker outside any operation, so that it alone is suspect; returns when."""
    pid, page = (
        cluster.worker_pids(run.job)[STOPPED_RANK],
        cluster.status_page(run.job, STOPPED_RANK),
    )
    for _ in range(200):
        os.kill(pid, signal.SIGSTOP)
        stopped_at_s = time.time()
        status = read_status_page(page)
        if status is not None and all(row.entered == row.completed for row in status.rows):
            return stopped_at_s
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.003)
    raise AssertionError(f"rank {STOPPED_RANK} was always inside an operation")

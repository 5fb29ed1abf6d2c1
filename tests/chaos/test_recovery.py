"""Workers, nodes and checkpoint files are lost under a running job, on four nodes of one rank.

The order of the tests saves time: only the last one loses a node for good, after which the cluster
would have to be replaced.
"""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.harness.chaos_cluster import ChaosCluster, measured, shared_cluster
from tests.harness.job_follower import JobFollower, seconds
from tests.harness.local_cluster import END_REASON
from tests.harness.paced import hold, paced, release
from tests.harness.processes import until_gone
from tests.harness.waiting import eventually

from megascale.v1 import driver_pb2, types_pb2
from megascale_client import AsyncClient

ENDLESS_STEPS = 100_000
# Each fault must be detected faster than by the next slower mechanism, whose time this is
# (megascale_driver.core.values.policy): a bound for any machine. Times of an idle one are in
# benchmarks/.
SUSPECT_S, UNCORROBORATED_S = 8.0, 60.0
# A third of a collective's timeout here, by which the peer of a lost worker ends the attempt.
EXIT_S = 20.0
# Steps are dated in milliseconds; the clocks of agent and driver are compared by their heartbeats.
DATED_WITHIN_S, CLOCKS_WITHIN_S = 0.01, 1.0


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], ChaosCluster]]:
    with shared_cluster(lambda: tmp_path_factory.mktemp("recovery"), "--nodes", "4") as shared:
        yield shared


@pytest.fixture
def cluster(ready: Callable[[], ChaosCluster]) -> ChaosCluster:
    """Complete and idle, whatever the test before did to it."""
    found = ready()
    hold(found.up.site)
    return found


async def test_a_killed_worker_costs_no_bit_of_the_result(cluster: ChaosCluster) -> None:
    steps, seed = 60, random.SystemRandom().randrange(1 << 32)
    choice = random.Random(seed)
    step, rank = choice.randint(15, 40), choice.randrange(2)
    print(f"\nseed {seed}: rank {rank} is killed after step {step}")
    async with cluster.client() as client:
        # Held, so that it cannot end before the kill.
        spec = cluster.job(
            "interrupted", steps=steps, interval_steps=10, optimizer=paced(held_from_step=50)
        )
        twin_spec = cluster.job("twin", steps=steps, interval_steps=10)
        async with cluster.follow(client, spec) as run, cluster.follow(client, twin_spec) as twin:
            await run.until_step(step)
            await run.until_committed()  # so all ranks have a state in memory
            nodes, known_step, killed_at_s = list(run.job.nodes), run.step, time.time()
            os.kill(cluster.worker_pids(run.job)[rank], signal.SIGKILL)
            release(cluster.up.site)
            job, other = await run.until_ended(), await twin.until_ended()
    assert (job.phase, other.phase) == (
        types_pb2.JOB_PHASE_SUCCEEDED,
        types_pb2.JOB_PHASE_SUCCEEDED,
    ), run.story()
    assert (job.attempt, other.attempt) == (2, 1)
    log = cluster.rank_log(job, 1)
    assert "attention by torch (" in log
    assert "rank 1 of 2: tp 0 dp 0 pp 1 on cpu, attempt 2, job interrupted, torch " in log
    restored = re.search(rf"restored step {job.restored_step}: (\d+) bytes from memory, 0 ", log)
    assert restored and int(restored[1]) > 0, log
    for line in (
        "snapshot started",
        f"finished: step {steps}",
    ):
        assert line in log, log
    assert job.restore_source == types_pb2.RESTORE_SOURCE_MEMORY
    assert list(job.nodes) == nodes
    assert 0 < job.restored_step <= max(run.losses[1])
    assert min(run.losses[2]) == job.restored_step + 1
    exited = run.first_event("WORKER_EXITED")
    assert exited is not None
    detected_s = seconds(exited) - killed_at_s
    assert run.newest_losses == twin.losses[1]
    assert list(twin.losses[1]) == list(range(1, steps + 1))
    repeated = {
        number: loss for number, loss in run.losses[1].items() if number > job.restored_step
    }
    assert repeated.items() <= run.losses[2].items()
    measured(
        "worker killed",
        detected_s=detected_s,
        restored_step=job.restored_step,
        repeated=len(repeated),
        goodput=round(job.goodput.ratio, 3),
    )
    assert 0 <= detected_s < EXIT_S, "the node reports an exit at once"
    check_goodput(job, run, killed_at_s, known_step)
    assert (other.goodput.faults, other.goodput.lost_steps) == (0, 0)


@pytest.mark.slow
async def test_with_a_snapshot_at_every_step_a_killed_worker_costs_a_few_steps(
    cluster: ChaosCluster,
) -> None:
    steps = 120
    async with cluster.client() as client:
        # Held, so that it does few steps between what is seen of it and the kill.
        spec = cluster.job(
            "every-step",
            steps=steps,
            interval_steps=steps * 10,
            optimizer=paced(held_from_step=42),
        )
        spec.checkpoint.snapshot_interval_steps = 1
        async with cluster.follow(client, spec) as run:
            await run.until_step(40)
            os.kill(cluster.worker_pids(run.job)[0], signal.SIGKILL)
            release(cluster.up.site)
            job = await run.until_ended()
    assert job.phase == types_pb2.JOB_PHASE_SUCCEEDED, run.story()
    assert job.restore_source == types_pb2.RESTORE_SOURCE_MEMORY, run.story()
    assert min(run.losses[2]) == job.restored_step + 1
    repeated = {step: loss for step, loss in run.losses[1].items() if step > job.restored_step}
    assert len(repeated) < 20, "no step of attempt 1 is persisted: all of this was in memory"
    assert repeated.items() <= run.losses[2].items()
    committed = [record.step for record in cluster.commit_log("every-step").commits()]
    # What only memory held was adopted by attempt 2; then nothing was due before the last step.
    assert set(committed) <= {job.restored_step, steps} and committed[0] == steps


@pytest.mark.slow
async def test_a_flipped_bit_in_memory_costs_neither_the_step_nor_an_attempt(
    cluster: ChaosCluster,
) -> None:
    async with cluster.client() as client:
        # Held before the next one: the snapshot that is damaged is the newest, and committed.
        spec = cluster.job(
            "flipped",
            steps=ENDLESS_STEPS,
            interval_steps=150,
            optimizer=paced(held_from_step=200),
        )
        async with cluster.follow(client, spec) as run:
            await run.until_event("CHECKPOINT_COMMITTED")
            flip_slots(cluster, run.job.nodes[1], rank=1)
            os.kill(cluster.worker_pids(run.job)[0], signal.SIGKILL)
            release(cluster.up.site)
            damaged = await run.until_event("SNAPSHOT_DAMAGED")
            await run.until_step(max(160, *run.losses[1]), attempt=2)
            job, story = run.job, run.story()
            why = (await client.explain(run.name)).explanation
            await client.cancel(run.name, reason=END_REASON)
            await run.until_ended()
    assert (job.attempt, job.restored_step) == (2, 150), story
    assert job.restore_source == types_pb2.RESTORE_SOURCE_MEMORY, story
    assert "step 150" in damaged.message and "(rank 1)" in damaged.message
    assert "CHECKPOINT_REFUSED" not in story, story
    assert "attempt 2" in why
    assert min(run.losses[2]) == 151
    again = {step: loss for step, loss in run.losses[1].items() if step > 150}
    assert {step: loss for step, loss in run.losses[2].items() if step in again} == again
    log = cluster.rank_log(job, 1)
    assert re.search(r"restored step 150: 0 bytes from memory, 0 bytes from peer, [1-9]", log), log
    assert "memory is damaged" in log, log
    assert re.search(r"restored step 150: [1-9]\d* bytes from memory, 0 ", cluster.rank_log(job, 0))


def flip_slots(cluster: ChaosCluster, node: str, rank: int) -> None:
    """Change one bit of every slot of a rank, in the memory of its daemon."""
    daemon = cluster.up.node_pids(node)["checkpoint"]
    maps = Path(f"/proc/{daemon}/maps").read_text().split()
    slots = {Path(word) for word in maps if f"/flipped/rank-{rank:05d}/slot-" in word}
    assert slots
    for slot in slots:
        with slot.open("r+b") as file:
            file.seek(100)
            byte = file.read(1)[0]
            file.seek(100)
            file.write(bytes([byte ^ 0x10]))


def check_goodput(
    job: driver_pb2.Job, run: JobFollower, killed_at_s: float, known_step: int
) -> None:
    """What the job's goodput has lost to a killed worker is what has happened.

    The driver counts a step when its record arrives, however late: so each time has its own bounds.
    """
    found, exited = job.goodput, run.first_event("WORKER_EXITED")
    ended = run.first_event("JOB_SUCCEEDED")
    assert exited is not None and ended is not None
    restarted_s = run.completed_s[2, job.restored_step + 1] - seconds(exited)
    assert found.faults == 1
    # A record that arrives once the next attempt has restored is not counted any more.
    lost_least, lost_most = known_step - job.restored_step, max(run.losses[1]) - job.restored_step
    assert lost_least <= found.lost_steps <= lost_most
    restarting_s = found.restarting.ToMilliseconds() / 1e3
    assert restarted_s - DATED_WITHIN_S < restarting_s < seconds(ended) - seconds(exited)
    detecting_s = found.detecting.ToMilliseconds() / 1e3
    assert 0 <= detecting_s < seconds(exited) - killed_at_s + CLOCKS_WITHIN_S
    trained_s = seconds(exited) - run.completed_s[1, 1]
    assert 0 <= found.lost.ToMilliseconds() / 1e3 < trained_s + DATED_WITHIN_S
    wall_us = sum(
        value.ToMicroseconds()
        for field, value in found.ListFields()
        if field.message_type and field.name != "wall_time"
    )
    assert wall_us == found.wall_time.ToMicroseconds()


@pytest.mark.slow
async def test_the_last_checkpoint_survives_a_death_while_it_is_awaited(
    cluster: ChaosCluster,
) -> None:
    steps = 100
    async with cluster.client() as client:
        # Held, so that the limit comes before the last step.
        spec = cluster.job(
            "last", steps=steps, interval_steps=0, optimizer=paced(held_from_step=50)
        )
        async with cluster.follow(client, spec) as run:
            await run.until_step(1)
            # Rank 1's file cannot grow to its size and is tried again, so rank 0 waits for it; then
            # rank 0 is killed.
            daemon = cluster.up.node_pids(run.job.nodes[1])["checkpoint"]
            unlimited = resource.prlimit(
                daemon, resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY)
            )
            release(cluster.up.site)
            await run.until_step(steps)
            await run.until_event("CHECKPOINT_FAILED")
            # Rank 0's seal reaches the driver with a heartbeat of its own, which nothing shows.
            await until_reported(client, run.job.nodes[0])
            os.kill(cluster.worker_pids(run.job)[0], signal.SIGKILL)
            await run.until(lambda: run.job.attempt == 2, "the second attempt")
            resource.prlimit(daemon, resource.RLIMIT_FSIZE, unlimited)
            job = await run.until_ended()
            story = run.story()
    assert (job.phase, job.attempt) == (types_pb2.JOB_PHASE_SUCCEEDED, 2), story
    assert (job.restore_source, job.restored_step) == (types_pb2.RESTORE_SOURCE_MEMORY, steps), (
        story
    )
    assert [(commit.attempt, commit.step) for commit in cluster.commit_log("last").commits()] == [
        (2, steps)
    ]


@pytest.mark.slow
async def test_a_node_that_stands_still_is_replaced_and_commits_nothing_later(
    cluster: ChaosCluster,
) -> None:
    async with cluster.client() as client:
        spec = cluster.job("stopped", steps=ENDLESS_STEPS, interval_steps=10, spares=1)
        async with cluster.follow(client, spec) as run:
            await run.until_step(25)
            await run.until_committed()
            stopped, spare = run.job.nodes[1], run.job.spare_nodes[0]
            old_workers = list(cluster.worker_pids(run.job).values())
            stopped_at_s = cluster.signal_node(stopped, signal.SIGSTOP)
            try:
                dead = await run.until_event("NODE_DEAD", f"nodes/{stopped}")
                await run.until_event("SPARE_ASSIGNED", f"nodes/{spare}")
                await run.until_step(run.job.restored_step + 25, attempt=2)
            finally:
                continued_at_s = cluster.signal_node(stopped, signal.SIGCONT)
            gone_s = until_gone(old_workers, "workers of the old attempt gone")
            await until_idle_and_alive(client, stopped)
            back_s = time.time() - continued_at_s
            seen = len(attempts_after_reopening(cluster, "stopped"))
            await run.until(
                lambda: len(attempts_after_reopening(cluster, "stopped")) >= seen + 2,
                "two more commits",
            )
            acted_s = seconds(dead) - stopped_at_s
            story = run.story()
            assert stopped not in run.job.nodes and spare in run.job.nodes, story
            assert list(run.job.evicted_nodes) == [stopped], story
            assert run.job.restore_source == types_pb2.RESTORE_SOURCE_STORAGE, story
            await client.cancel(run.name, reason=END_REASON)
            await run.until_ended()
    assert set(attempts_after_reopening(cluster, "stopped")) == {2}
    measured(
        "node stopped",
        acted_upon_s=acted_s,
        workers_gone_after_cont_s=gone_s,
        idle_after_cont_s=back_s,
    )
    assert 0 < acted_s < UNCORROBORATED_S


async def test_an_evicted_node_is_left_and_a_cancelled_job_stops_at_once(
    cluster: ChaosCluster,
) -> None:
    async with cluster.client() as client:
        spec = cluster.job("moved", steps=ENDLESS_STEPS, interval_steps=10, spares=1)
        async with cluster.follow(client, spec) as run:
            await run.until_step(25)
            evicted, spare = run.job.nodes[0], run.job.spare_nodes[0]
            begun_s = time.monotonic()
            answer = await client.evict(evicted, reason="smells of smoke")
            assert "moved" in answer.consequence
            await run.until_step(run.step + 5, attempt=2)
            moved_s = time.monotonic() - begun_s
            assert spare in run.job.nodes and evicted not in run.job.nodes, run.story()
            node = {item.name: item async for item in client.nodes()}[evicted]
            assert node.disposition == types_pb2.NODE_DISPOSITION_QUARANTINED
            assert node.disposition_reason == "smells of smoke"

            workers = list(cluster.worker_pids(run.job).values())
            assert len(workers) == 2
            cancelled_s = time.monotonic()
            await client.cancel(run.name, reason=END_REASON)
            until_gone(workers, "workers of a cancelled job gone")
            gone_s = time.monotonic() - cancelled_s
            job = await run.until_ended()
            await client.uncordon(evicted, reason="it was the toaster")
    assert job.phase == types_pb2.JOB_PHASE_CANCELLED
    measured("evicted and cancelled", evict_to_new_steps_s=moved_s, cancel_to_gone_s=gone_s)


@pytest.mark.slow
async def test_damaged_checkpoints_are_refused_by_name_after_the_loss_of_a_node(
    cluster: ChaosCluster,
) -> None:
    steps, interval_steps = 240, 40
    async with cluster.client() as client:
        # Held, so that it cannot end before the node is lost.
        spec = cluster.job(
            "damaged",
            steps=steps,
            interval_steps=interval_steps,
            spares=1,
            optimizer=paced(held_from_step=200),
        )
        async with cluster.follow(client, spec) as run:
            await run.until(
                lambda: len(cluster.commit_log("damaged").commits()) >= 3, "three commits"
            )
            lost, spare = run.job.nodes[0], run.job.spare_nodes[0]
            driver = cluster.up.state["driver"]["pid"]
            # Stopped, so that it decides after the damage is done, however slow the machine.
            os.kill(driver, signal.SIGSTOP)
            try:
                killed_at_s = cluster.signal_node(lost, signal.SIGKILL)
                truncated, flipped, whole = cluster.commit_log("damaged").commits()[:3]
                manifests = [commit.values["manifest"] for commit in (truncated, flipped)]
                names = [damage(cluster, manifests[0], rank=1), damage(cluster, manifests[1])]
            finally:
                os.kill(driver, signal.SIGCONT)
                release(cluster.up.site)
            dead = await run.until_event("NODE_DEAD", f"nodes/{lost}")
            job = await run.until_ended()
    story = run.story()
    assert job.phase == types_pb2.JOB_PHASE_SUCCEEDED, story
    assert (job.restored_step, job.restore_source) == (
        whole.step,
        types_pb2.RESTORE_SOURCE_STORAGE,
    ), story
    refusals = [event.message for event in run.events if event.reason == "CHECKPOINT_REFUSED"]
    for name in names:
        assert any(name in message for message in refusals), (name, story)
    assert job.attempt == 2, f"a damaged file costs no attempt of its own: {story}"
    # No node is evicted for a damaged file.
    assert list(job.evicted_nodes) == [lost], story
    assert spare in job.nodes
    again = run.losses[job.attempt]
    assert list(again) == list(range(whole.step + 1, steps + 1))
    assert {
        step: loss for step, loss in run.losses[1].items() if step > whole.step
    }.items() <= again.items()
    detected_s = seconds(dead) - killed_at_s
    measured("node killed", detected_s=detected_s, restored_step=whole.step, attempts=job.attempt)
    assert 0 <= detected_s < SUSPECT_S, "its link broke, so no heartbeat need be missed"


def damage(cluster: ChaosCluster, manifest: str, rank: int = 0) -> str:
    """Cut rank 1's file of a checkpoint in half, or change one bit of rank 0's.

    Rank 0 is restored on a node that never ran the job, so it must read its file; rank 1 may have
    its state in memory.

    Returns:
        The file's path below the job's folder.
    """
    path = Path(manifest).with_name(f"rank-{rank:05d}.safetensors")
    file = cluster.checkpoints("damaged") / path
    if rank:
        os.truncate(file, file.stat().st_size // 2)
    else:
        data = bytearray(file.read_bytes())
        data[-100] ^= 0x10
        file.write_bytes(data)
    return str(path)


def attempts_after_reopening(cluster: ChaosCluster, job: str) -> list[int]:
    """The attempt of each checkpoint committed since attempt 2 opened the log."""
    records = cluster.commit_log(job).records
    opened = next(
        index
        for index, record in enumerate(records)
        if (record.kind, record.attempt) == ("OPEN", 2)
    )
    return [record.attempt for record in records[opened:] if record.kind == "COMMIT"]


async def until_reported(client: AsyncClient, name: str) -> None:
    """Wait for two heartbeats of a node: it made the second later than this call."""
    heard: set[int] = set()

    async def twice() -> bool:
        node = {item.name: item async for item in client.nodes()}[name]
        heard.add(node.last_heartbeat_at.ToNanoseconds())
        return len(heard) > 2

    await eventually(twice, f"two heartbeats of node {name}", heard.copy)


async def until_idle_and_alive(client: AsyncClient, name: str) -> None:
    """Wait until a node is back and runs nothing."""

    async def idle_and_alive() -> bool:
        node = {item.name: item async for item in client.nodes()}[name]
        return node.liveness == types_pb2.NODE_LIVENESS_ALIVE and not node.job

    await eventually(idle_and_alive, f"node {name} is back and runs nothing")

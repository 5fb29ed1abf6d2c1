"""A node is lost for good, with all it held: the job goes on from the memory of its peer."""

from __future__ import annotations

import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.chaos_cluster import ChaosCluster, chaos_cluster, measured
from tests.harness.job_follower import seconds
from tests.harness.paced import paced, release
from tests.harness.waiting import eventually

from megascale.v1 import job_pb2, types_pb2

STEPS, KILLED_AFTER, PERSISTED_EVERY = 100, 55, 40
HELD_FROM_STEP = 92  # until the next peer has a copy: the job cannot end before it
# A state of about 0.5 MB then takes the time of many snapshots to the peer.
HIDDEN_SIZE, LINK_MIB_PER_S = 48, 1.0
PACE_S = 0.03


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ChaosCluster]:
    with chaos_cluster(tmp_path, "--nodes", "3") as running:
        yield running


def undisturbed(
    cluster: ChaosCluster, name: str, spares: int = 0, *, experts: bool = False
) -> job_pb2.JobSpec:
    """Two nodes of one rank each: two stages, or halves of the experts."""
    spec = cluster.job(
        name,
        steps=STEPS,
        interval_steps=PERSISTED_EVERY,
        spares=spares,
        dp=2 if experts else 0,
        optimizer=paced(PACE_S, held_from_step=HELD_FROM_STEP),
    )
    spec.trainer.model.hidden_size = HIDDEN_SIZE
    if experts:
        model, sizes = spec.trainer.model, spec.trainer.parallelism
        model.block = job_pb2.BLOCK_SERIAL
        model.mlp = job_pb2.MLP_SWIGLU
        model.experts.count, model.experts.ffn_size = 8, 24
        model.experts.bias_rate = 0.01
        sizes.ep, sizes.ep_across_nodes = 2, True
    return spec


def replicated(cluster: ChaosCluster, name: str, spares: int, *, experts: bool) -> job_pb2.JobSpec:
    spec = undisturbed(cluster, name, spares, experts=experts)
    spec.checkpoint.snapshot_interval_steps = 1
    spec.checkpoint.replicas = 1
    spec.checkpoint.max_replicate_mib_per_s = LINK_MIB_PER_S
    return spec


def restored_bytes(cluster: ChaosCluster, node: str) -> dict[str, float]:
    """What the ranks of a node were restored from, in bytes by source, as its daemon counts."""
    address = (cluster.up.folder / "nodes" / node / "checkpoint.metrics.address").read_text()
    with urllib.request.urlopen(f"http://{address.strip()}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found = (line.rpartition(" ") for line in lines)
    return {
        name.partition('source="')[2].rstrip('"}'): float(value)
        for name, _, value in found
        if name.startswith("megascale_checkpoint_restored_bytes_total{")
    }


@pytest.mark.parametrize(
    "experts",
    [False, pytest.param(True, marks=pytest.mark.slow)],
    ids=["stages", "halves of the experts"],
)
async def test_a_lost_node_costs_no_read_from_storage_and_no_bit(
    cluster: ChaosCluster, experts: bool
) -> None:
    async with cluster.client() as client:
        lost_job = replicated(cluster, "lost", spares=1, experts=experts)
        async with cluster.follow(client, lost_job) as run:
            await run.until_step(KILLED_AFTER)

            async def has_replicas() -> bool:
                job = await client.get(run.name)
                assert job.phase == types_pb2.JOB_PHASE_RUNNING, "no step was whole at all peers"
                return bool(job.replicated_step > PERSISTED_EVERY)

            await eventually(has_replicas, "a step beyond the last persisted one has its replicas")
            lost, spare = run.job.nodes[1], run.job.spare_nodes[0]
            killed_at_s = cluster.signal_node(lost, signal.SIGKILL)
            await run.until(lambda: 2 in run.losses, "a step of the second attempt")
            read = {node: restored_bytes(cluster, node) for node in run.job.nodes}

            async def has_copy_again() -> bool:
                job = await client.get(run.name)
                return bool(job.replicated_step > job.restored_step)

            # The survivor is the only node with a memory now, and the spare its new peer.
            await eventually(has_copy_again, "the next peer has a copy")
            release(cluster.up.site)
            job = await run.until_ended()
            story = run.story()
        assert job.phase == types_pb2.JOB_PHASE_SUCCEEDED, story
        assert job.attempt == 2 and spare in job.nodes and lost not in job.nodes, story
        assert job.restore_source == types_pb2.RESTORE_SOURCE_MEMORY, story
        assert job.restored_step > PERSISTED_EVERY, story
        assert {source for found in read.values() for source in found} == {"memory", "peer"}, read
        assert read[spare]["peer"] > 0 and "peer" not in read[run.job.nodes[0]], read
        opened = [event.message for event in run.events if event.reason == "ATTEMPT_OPENED"]
        assert f"(rank 1 from node {run.job.nodes[0]})" in opened[1], opened
        whole_job = undisturbed(cluster, "twin", experts=experts)
        async with cluster.follow(client, whole_job) as twin:
            await twin.until_ended()
    assert run.newest_losses == twin.losses[1]
    assert list(twin.losses[1]) == list(range(1, STEPS + 1))
    dead = run.first_event("NODE_DEAD")
    assert dead is not None
    measured(
        "node killed, restored from its peer",
        detected_s=seconds(dead) - killed_at_s,
        first_new_step_s=run.completed_s[2, job.restored_step + 1] - killed_at_s,
        restored_step=job.restored_step,
        repeated=max(run.losses[1]) - job.restored_step,
    )

"""Jobs whose nodes are pods: a pod is deleted, a machine is evicted, a machine is drained.

Driver, agents, ranks, checkpoint daemons, etcd and the platform process are real, by the command
lines of deploy/kubernetes with its certificates and rights. The API server, the StatefulSet, the
scheduler and the kubelets are the tests' own.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from tests.harness import kubectl as tool
from tests.harness.job_follower import JobFollower
from tests.harness.kubernetes_api import Call
from tests.harness.kubernetes_cluster import PLATFORM, PodCluster, pod_cluster
from tests.harness.kubernetes_objects import NAMESPACE
from tests.harness.waiting import eventually

from megascale.v1 import types_pb2

STEPS, DISTURBED_AT_STEP = 50, 15
HELD_FROM_STEP = 25  # until the disturbance has ended an attempt: the job cannot end before it


pytestmark = pytest.mark.kubernetes


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[PodCluster]:
    async with pod_cluster(tmp_path, machines=4, nodes=2) as running:
        yield running


async def losses_of(cluster: PodCluster, name: str) -> dict[int, float]:
    """Of a job that nothing disturbs."""
    async with cluster.client() as client:
        async with JobFollower(client, cluster.job(name, STEPS), cluster.folder) as run:
            job = await run.until_ended()
    assert (job.phase, job.attempt) == (types_pb2.JOB_PHASE_SUCCEEDED, 1), run.story()
    assert list(run.losses[1]) == list(range(1, STEPS + 1))
    return run.losses[1]


async def disturbed(cluster: PodCluster, disturb: Callable[[JobFollower], Awaitable[str]]) -> str:
    """A job under which ``disturb`` does something to a pod, whose name it returns.

    The pod is another one afterwards, and the losses are those of a job that nothing disturbs.
    """
    async with cluster.client() as client:
        held = cluster.job("cut", STEPS, held_from_step=HELD_FROM_STEP)
        async with JobFollower(client, held, cluster.folder) as run:
            await run.until_step(DISTURBED_AT_STEP)
            await run.until_committed()
            before = {name: cluster.pod(name) for name in run.job.nodes}
            name = await disturb(run)
            await run.until(lambda: run.job.attempt >= 2, "another attempt")
            cluster.release()
            job = await run.until_ended()
    await cluster.until_ready(2)
    old, new = before[name], cluster.pod(name)
    assert old is not None and new is not None
    assert old["metadata"]["uid"] != new["metadata"]["uid"]
    assert job.phase == types_pb2.JOB_PHASE_SUCCEEDED, run.story()
    assert job.attempt >= 2 and 0 < job.restored_step < STEPS, run.story()
    assert run.newest_losses == await losses_of(cluster, "twin")
    return name


async def test_a_deleted_pod_costs_no_bit_of_the_result(cluster: PodCluster) -> None:
    async def delete(run: JobFollower) -> str:
        name = run.job.nodes[1]
        if tool.program():
            await cluster.kubectl("delete", "pod", name, "--wait=false")
        else:
            cluster.api.store.delete(("pods", NAMESPACE, name), {})
        return name

    name = await disturbed(cluster, delete)
    ready = cluster.pod(name)
    assert ready is not None and ready["status"]["conditions"] == [
        {"type": "Ready", "status": "True"}
    ], "the probe of the manifest succeeds"


async def test_an_evicted_machine_gets_no_work_and_its_node_comes_back_elsewhere(
    cluster: PodCluster,
) -> None:
    where = {}

    async def evict(run: JobFollower) -> str:
        name = run.job.nodes[1]
        where[name] = cluster.machine_of(name)
        async with cluster.client() as client:
            await client.evict(name, reason="it burns", now=True)
        return name

    name = await disturbed(cluster, evict)
    out = cluster.api.store.get(("nodes", "", where[name]))
    assert out["spec"]["unschedulable"] is True
    assert [each["key"] for each in out["spec"]["taints"]] == ["megascale/evicted"]
    mark = json.loads(out["metadata"]["annotations"]["megascale/eviction"])
    assert (mark["node"], mark["state"]) == (name, "moved")
    assert mark["reason"] == "megascale: it burns"
    assert cluster.machine_of(name) != where[name]
    async with cluster.client() as client:
        events = [event async for event in client.events(f"nodes/{name}")]
    actors = {event.reason: event.actor for event in events}
    assert actors["NODE_UNCORDONED"] == "platform", actors

    def shown() -> bool:
        conditions = cluster.api.store.get(("nodes", "", where[name]))["status"]["conditions"]
        return ("MegascaleEvicted", "True") in {(c["type"], c["status"]) for c in conditions}

    await eventually(shown, "the machine's condition")
    if tool.program():  # somebody has repaired it
        why = "custom-columns=MACHINE:.metadata.name,WHY:.metadata.annotations.megascale/eviction"
        assert "megascale: it burns" in await cluster.kubectl("get", "nodes", "-o", why)
        await cluster.kubectl("uncordon", where[name])
        await eventually(lambda: not shown(), "the machine is given back", story=cluster.story)
        assert "taints" not in cluster.api.store.get(("nodes", "", where[name]))["spec"]
    # No right is granted that is not used, and none is missing.
    assert cluster.api.rights is not None
    used = {right for user, right in cluster.api.rights.used if user == PLATFORM}
    assert used == cluster.api.rights.of(PLATFORM)


async def test_the_same_while_the_api_is_busy_and_the_platform_is_killed(
    cluster: PodCluster,
) -> None:
    def of_platform(call: Call) -> bool:
        return call.user == PLATFORM

    async def evict(run: JobFollower) -> str:
        name = run.job.nodes[0]
        place = cluster.machine_of(name)
        cluster.api.refuse(429, times=3, retry_after_s=1, concerns=of_platform)
        cluster.api.drop_watches()
        cluster.api.store.compact()
        async with cluster.client() as client:
            await client.evict(name, reason="it burns", now=True)

        def marked() -> bool:
            found = cluster.api.store.get(("nodes", "", place))
            return "taints" in found["spec"]

        await eventually(marked, "the mark", cluster.moves, story=cluster.story)
        cluster.machines.kill("megascale-platform-0", "platform")
        cluster.api.refuse(503, times=3, reason="ServiceUnavailable", concerns=of_platform)
        return name

    await disturbed(cluster, evict)
    deleted = [call for call in cluster.api.calls if call.verb == "delete"]
    assert {call.user for call in deleted} == {PLATFORM}


async def test_a_checkpoint_container_that_ends_is_started_again_under_the_job(
    cluster: PodCluster,
) -> None:
    async with cluster.client() as client:
        async with JobFollower(client, cluster.job("cut", STEPS), cluster.folder) as run:
            await run.until_step(DISTURBED_AT_STEP)
            cluster.machines.kill(run.job.nodes[1], "checkpoint")
            job = await run.until_ended()
    assert (job.phase, job.committed_step) == (types_pb2.JOB_PHASE_SUCCEEDED, STEPS), run.story()
    assert run.newest_losses == await losses_of(cluster, "twin")


async def test_a_machine_that_is_gone_holds_its_pod_no_longer(cluster: PodCluster) -> None:
    async def lose(run: JobFollower) -> str:
        name = next(n for n in run.job.nodes if cluster.machine_of(n) != platform_machine)
        cluster.machines.lose(cluster.machine_of(name))
        return name

    platform_machine = cluster.machine_of("megascale-platform-0")
    name = await disturbed(cluster, lose)
    assert cluster.machine_of(name) not in cluster.machines.dead


@pytest.mark.skipif(not tool.program(), reason="no kubectl: make kubernetes-tools")
async def test_a_machine_is_drained_by_kubectl(cluster: PodCluster) -> None:
    async def drain(run: JobFollower) -> str:
        name = next(n for n in run.job.nodes if cluster.machine_of(n) != platform_machine)
        await cluster.kubectl(
            "drain", cluster.machine_of(name), "--ignore-daemonsets", "--delete-emptydir-data"
        )
        return name

    platform_machine = cluster.machine_of("megascale-platform-0")
    await disturbed(cluster, drain)
    assert [call for call in cluster.api.calls if call.resource == "pods/eviction"]


async def test_a_spare_that_a_job_lacks_is_a_pod_more(tmp_path: Path) -> None:
    async with pod_cluster(tmp_path, machines=4, nodes=2, provide_up_to=3) as cluster:
        spec = cluster.job("cut", 100_000)
        spec.recovery.spare_nodes = 2  # one more than there may be
        async with cluster.client() as client:
            await client.submit(spec)

            async def stands_by() -> bool:
                return list((await client.get("cut")).spare_nodes) == ["megascale-node-2"]

            await eventually(stands_by, "a third node", cluster.moves, story=cluster.story)
            info = await client.cluster_info()
            assert (info.nodes_alive, info.nodes_wanted, info.nodes_missing) == (3, 4, 1)
            await client.cancel("cut", reason="seen")
    found = cluster.api.store.get(("statefulsets", NAMESPACE, "megascale-node"))
    assert found["spec"]["replicas"] == 3
    assert cluster.api.rights is not None
    used = {right for user, right in cluster.api.rights.used if user == PLATFORM}
    scale = "statefulsets/scale megascale-node"
    assert {("get", "apps", scale), ("patch", "apps", scale)} <= used


async def test_a_leading_driver_is_a_pod_that_may_be_deleted(tmp_path: Path) -> None:
    async with pod_cluster(tmp_path, machines=4, nodes=2, driver_pods=True) as cluster:

        def drivers() -> dict[str, str]:
            """Names of the drivers' pods by their addresses."""
            pods = cluster.api.store.list("pods", NAMESPACE, lambda found: True)
            return {
                cluster.machines.pods[pod["metadata"]["uid"]].address: pod["metadata"]["name"]
                for pod in pods
                if pod["metadata"]["name"].startswith("megascale-driver-")
                and pod["metadata"]["uid"] in cluster.machines.pods
            }

        async with cluster.client() as client:

            async def leads() -> str:
                """The pod of the leading driver."""
                return drivers().get((await client.cluster_info()).leader.partition(":")[0], "")

            held = cluster.job("cut", STEPS, held_from_step=HELD_FROM_STEP)
            async with JobFollower(client, held, cluster.folder) as run:
                await run.until_step(DISTURBED_AT_STEP)
                gone = await leads()
                cluster.api.store.delete(("pods", NAMESPACE, gone), {})

                async def followed() -> bool:
                    return await leads() not in ("", gone)

                await eventually(followed, "the next leader", cluster.moves, story=cluster.story)
                cluster.release()
                job = await run.until_ended()
            assert (job.phase, job.attempt) == (types_pb2.JOB_PHASE_SUCCEEDED, 1), run.story()

            def ready() -> bool:
                found = cluster.machines.ready_addresses("megascale-driver")
                return gone not in drivers().values() and len(found) == 3

            await eventually(ready, "three drivers again", cluster.moves, story=cluster.story)
            # The platform process follows the leader.
            name = run.job.nodes[0]
            place = cluster.machine_of(name)
            await client.evict(name, reason="it burns", now=True)
            await cluster.until_ready(2)
            assert cluster.machine_of(name) != place
        assert run.newest_losses == await losses_of(cluster, "twin")

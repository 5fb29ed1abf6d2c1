"""The tests' own Kubernetes API server keeps what its clients rely on.

Two clients that know nothing of it say so: kubernetes-asyncio, and a real kubectl where one is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes_asyncio import client, config, watch
from tests.harness import kubectl as tool
from tests.harness.kubernetes_api import KubernetesApi
from tests.harness.kubernetes_cluster import manifest
from tests.harness.kubernetes_objects import NAMESPACE, machine, pod
from tests.harness.waiting import eventually

pytestmark = pytest.mark.kubernetes

needs_kubectl = pytest.mark.skipif(not tool.program(), reason="no kubectl: make kubernetes-tools")


@pytest.fixture
async def api() -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi() as running:
        for name in ("m1", "m2"):
            running.store.create("nodes", "", machine(name))
        yield running


@pytest.fixture
async def core(api: KubernetesApi) -> AsyncIterator[client.CoreV1Api]:
    found = client.Configuration()
    found.host = api.url
    async with client.ApiClient(found) as connection:
        yield client.CoreV1Api(connection)


async def refusal(call: Any) -> tuple[int, str]:
    """The code and reason with which a call is refused."""
    with pytest.raises(client.ApiException) as caught:
        await call
    return caught.value.status, json.loads(caught.value.body)["reason"]


async def test_objects_have_versions_and_uids(api: KubernetesApi, core: client.CoreV1Api) -> None:
    made = await core.create_namespaced_pod(NAMESPACE, pod("a"))
    assert made.metadata.uid and made.metadata.creation_timestamp
    twice = core.create_namespaced_pod(NAMESPACE, pod("a"))
    assert await refusal(twice) == (409, "AlreadyExists")
    assert await refusal(core.read_namespaced_pod("b", NAMESPACE)) == (404, "NotFound")
    bad = {**pod("c"), "spec": {"containers": [{"name": "x", "imagee": "y"}]}}
    assert await refusal(core.create_namespaced_pod(NAMESPACE, bad)) == (422, "Invalid")

    named = {"metadata": {"annotations": {"a": "1"}}}
    changed = await core.patch_namespaced_pod("a", NAMESPACE, named)
    assert int(changed.metadata.resource_version) > int(made.metadata.resource_version)
    same = await core.patch_namespaced_pod("a", NAMESPACE, named)
    assert same.metadata.resource_version == changed.metadata.resource_version

    stale = {"metadata": {**named["metadata"], "resourceVersion": made.metadata.resource_version}}
    late = core.patch_namespaced_pod("a", NAMESPACE, stale)
    assert await refusal(late) == (409, "Conflict")
    made.metadata.labels = {"x": "y"}
    assert await refusal(core.replace_namespaced_pod("a", NAMESPACE, made)) == (409, "Conflict")
    changed.metadata.labels = {"x": "y"}
    replaced = await core.replace_namespaced_pod("a", NAMESPACE, changed)
    assert replaced.metadata.uid == made.metadata.uid


async def test_a_status_is_written_by_its_own_path_alone(core: client.CoreV1Api) -> None:
    both = {"spec": {"unschedulable": True}, "status": {"phase": "Terminated"}}
    found = await core.patch_node("m1", both)
    assert found.spec.unschedulable and found.status.phase is None
    gpu = {"type": "Gpu", "status": "True", "lastHeartbeatTime": None}
    found = await core.patch_node_status(
        "m1", {"spec": {"unschedulable": False}, "status": {"conditions": [gpu]}}
    )
    assert found.spec.unschedulable and found.metadata.uid
    assert {each.type for each in found.status.conditions} == {"Ready", "Gpu"}


async def test_a_deletion_has_preconditions_and_waits_for_the_kubelet(
    api: KubernetesApi, core: client.CoreV1Api
) -> None:
    made = api.store.create("pods", NAMESPACE, pod("a", "m1"))
    meta = made["metadata"]

    def delete(**options: Any) -> Any:
        return core.delete_namespaced_pod("a", NAMESPACE, body=client.V1DeleteOptions(**options))

    other = client.V1Preconditions(uid="other")
    assert await refusal(delete(preconditions=other)) == (409, "Conflict")
    old = client.V1Preconditions(uid=meta["uid"], resource_version="1")
    assert await refusal(delete(preconditions=old)) == (409, "Conflict")
    right = client.V1Preconditions(uid=meta["uid"], resource_version=meta["resourceVersion"])
    marked = await delete(preconditions=right)
    assert marked.metadata.deletion_timestamp
    assert marked.metadata.deletion_grace_period_seconds == 30
    again = await core.read_namespaced_pod("a", NAMESPACE)
    assert again.metadata.deletion_timestamp == marked.metadata.deletion_timestamp
    await delete(grace_period_seconds=0)
    assert await refusal(core.read_namespaced_pod("a", NAMESPACE)) == (404, "NotFound")


async def test_lists_are_selected_and_cut_into_pages(
    api: KubernetesApi, core: client.CoreV1Api
) -> None:
    for number in range(5):
        made = pod(f"p{number}", "m1" if number % 2 else "m2")
        made["metadata"]["labels"]["number"] = str(number)
        api.store.create("pods", NAMESPACE, made)
    api.store.create("pods", "elsewhere", pod("p9", "m1"))

    async def names(**selectors: str) -> list[str]:
        found = await core.list_namespaced_pod(NAMESPACE, **selectors)
        return [each.metadata.name for each in found.items]

    assert await names(label_selector="number in (1, 3),app.kubernetes.io/name") == ["p1", "p3"]
    assert await names(label_selector="number!=1,number notin (2,3)") == ["p0", "p4"]
    assert await names(label_selector="!number") == []
    assert await names(field_selector="spec.nodeName=m2") == ["p0", "p2", "p4"]
    everywhere = await core.list_pod_for_all_namespaces(field_selector="spec.nodeName=m1")
    assert len(everywhere.items) == 3
    bad = core.list_namespaced_pod(NAMESPACE, label_selector="a in b")
    assert await refusal(bad) == (400, "BadRequest")

    first = await core.list_namespaced_pod(NAMESPACE, limit=2)
    assert len(first.items) == 2
    second = await core.list_namespaced_pod(NAMESPACE, limit=2, _continue=first.metadata._continue)
    assert [each.metadata.name for each in second.items] == ["p2", "p3"]
    assert second.metadata.resource_version == first.metadata.resource_version
    api.store.compact()
    third = core.list_namespaced_pod(NAMESPACE, limit=2, _continue=second.metadata._continue)
    assert await refusal(third) == (410, "Expired")


async def test_a_watch_has_all_changes_since_its_version(
    api: KubernetesApi, core: client.CoreV1Api
) -> None:
    api.store.create("pods", NAMESPACE, pod("a", "m1"))
    listed = await core.list_namespaced_pod(NAMESPACE)
    api.store.create("pods", NAMESPACE, pod("b", "m1"))
    api.store.delete(("pods", NAMESPACE, "a"), {"gracePeriodSeconds": 0})
    seen: list[tuple[str, str]] = []

    async def follow() -> None:
        async with watch.Watch() as watching:
            async for event in watching.stream(
                core.list_namespaced_pod,
                NAMESPACE,
                resource_version=listed.metadata.resource_version,
                label_selector="kept!=no",
                timeout_seconds=30,
            ):
                seen.append((event["type"], event["object"].metadata.name))
                if len(seen) == 4:
                    return

    following = asyncio.create_task(follow())
    await eventually(lambda: following.done() or len(seen) == 2, "what had changed")
    assert seen == [("ADDED", "b"), ("DELETED", "a")]
    changed = {"metadata": {"labels": {"new": "1"}}}
    await core.patch_namespaced_pod("b", NAMESPACE, changed)
    # It leaves what is selected: gone, for this watch.
    await core.patch_namespaced_pod("b", NAMESPACE, {"metadata": {"labels": {"kept": "no"}}})
    await following
    assert seen[2:] == [("MODIFIED", "b"), ("DELETED", "b")]


async def test_a_watch_of_a_forgotten_version_ends_with_410_and_bookmarks_avoid_that(
    api: KubernetesApi, core: client.CoreV1Api
) -> None:
    old = str(api.store.version)
    api.store.create("pods", NAMESPACE, pod("a"))
    api.store.compact()

    async def first_event(version: str) -> Any:
        response = await core.list_namespaced_pod(
            NAMESPACE,
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            _preload_content=False,
        )
        try:
            return json.loads(await response.content.readline())
        finally:
            response.close()

    error = await first_event(old)
    assert (error["type"], error["object"]["code"]) == ("ERROR", 410)
    held = str(api.store.version)
    api.store.update(("nodes", "", "m1"), lambda node: {**node, "spec": {"podCIDR": "x"}}, False)
    bookmark = await first_event(held)
    assert bookmark["type"] == "BOOKMARK"
    assert bookmark["object"]["metadata"]["resourceVersion"] == str(api.store.version)


async def test_an_eviction_keeps_to_the_disruption_budget(
    api: KubernetesApi, core: client.CoreV1Api
) -> None:
    for name in ("a", "b"):
        api.store.create("pods", NAMESPACE, pod(name, "m1"))
    labels = pod("x")["metadata"]["labels"]
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "one"},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": labels}},
    }
    api.store.create("poddisruptionbudgets", NAMESPACE, budget)

    def evict(name: str) -> Any:
        body = client.V1Eviction(metadata=client.V1ObjectMeta(name=name, namespace=NAMESPACE))
        return core.create_namespaced_pod_eviction(name, NAMESPACE, body)

    await evict("a")
    assert await refusal(evict("b")) == (429, "TooManyRequests")
    api.store.delete(("pods", NAMESPACE, "a"), {"gracePeriodSeconds": 0})
    api.store.create("pods", NAMESPACE, pod("a", "m2"))
    await evict("b")


async def test_a_busy_server_says_when_to_come_back(
    api: KubernetesApi, core: client.CoreV1Api
) -> None:
    api.refuse(429, retry_after_s=7)
    with pytest.raises(client.ApiException) as caught:
        await core.list_node()
    assert caught.value.status == 429 and caught.value.headers["Retry-After"] == "7"
    assert len((await core.list_node()).items) == 2


@needs_kubectl
async def test_a_real_kubectl_works_with_it(api: KubernetesApi, tmp_path: Path) -> None:
    configuration = tmp_path / "kubeconfig"
    configuration.write_text(api.kubeconfig(namespace=NAMESPACE))

    async def run(*arguments: str) -> str:
        status, output = await tool.kubectl(configuration, *arguments)
        assert status == 0, output
        return output

    for name in ("a", "b"):
        api.store.create("pods", NAMESPACE, pod(name, "m1"))
    assert {"a", "b"} <= set((await run("get", "pods")).split())
    await run("taint", "nodes", "m1", "broken=yes:NoSchedule")
    found = json.loads(await run("get", "node", "m1", "-o", "json"))
    assert found["spec"]["taints"] == [{"key": "broken", "value": "yes", "effect": "NoSchedule"}]
    await run("annotate", "pod", "a", "seen=1")
    await run("delete", "pod", "a", "--wait=false")
    assert "deletionTimestamp" in api.store.get(("pods", NAMESPACE, "a"))["metadata"]
    kubelet = asyncio.create_task(end_what_is_deleted(api))
    await run("drain", "m1", "--timeout=60s")
    await kubelet
    assert api.store.get(("nodes", "", "m1"))["spec"]["unschedulable"] is True
    await run("uncordon", "m1")
    assert "unschedulable" not in api.store.get(("nodes", "", "m1"))["spec"]
    evicted = [call.name for call in api.calls if call.resource == "pods/eviction"]
    assert "b" in evicted
    api.store.create("statefulsets", NAMESPACE, manifest("StatefulSet", "node"))
    await run("scale", "statefulset", "megascale-node", "--replicas=7")
    found = json.loads(await run("get", "statefulset", "megascale-node", "-o", "json"))
    assert found["spec"]["replicas"] == 7
    assert {call.verb for call in api.calls if call.resource == "statefulsets/scale"} & {
        "patch",
        "update",
    }


async def test_a_scale_has_the_version_of_its_set_as_a_precondition(api: KubernetesApi) -> None:
    api.store.create("statefulsets", NAMESPACE, manifest("StatefulSet", "node"))
    found = client.Configuration()
    found.host = api.url
    async with client.ApiClient(found) as connection:
        apps = client.AppsV1Api(connection)
        name = "megascale-node"
        before = await apps.read_namespaced_stateful_set_scale(name, NAMESPACE)
        after = await apps.patch_namespaced_stateful_set_scale(
            name, NAMESPACE, {"spec": {"replicas": 9}}
        )
        assert after.spec.replicas == 9 != before.spec.replicas
        old = {"metadata": {"resourceVersion": before.metadata.resource_version}}
        late = apps.patch_namespaced_stateful_set_scale(
            name, NAMESPACE, {**old, "spec": {"replicas": 3}}
        )
        assert await refusal(late) == (409, "Conflict")
        wrong = apps.patch_namespaced_stateful_set_scale(
            name, NAMESPACE, {"spec": {"replicas": -1}}
        )
        assert await refusal(wrong) == (422, "Invalid")
        whole = await apps.read_namespaced_stateful_set(name, NAMESPACE)
        assert whole.spec.replicas == 9 and whole.spec.template.spec.containers


async def end_what_is_deleted(api: KubernetesApi) -> None:
    """A kubelet whose pods end at once; until none is left."""

    def left() -> list[Any]:
        for each in api.store.list("pods", NAMESPACE, lambda found: True):
            if "deletionTimestamp" in each["metadata"]:
                key = ("pods", NAMESPACE, each["metadata"]["name"])
                api.store.delete(key, {"gracePeriodSeconds": 0})
        return api.store.list("pods", NAMESPACE, lambda found: True)

    await eventually(lambda: not left(), "all pods gone")


async def test_clients_configure_themselves_from_a_file(api: KubernetesApi, tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text(api.kubeconfig())
    found = client.Configuration()
    await config.load_kube_config(str(tmp_path / "kubeconfig"), client_configuration=found)
    assert found.host == api.url

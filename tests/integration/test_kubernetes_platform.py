"""The Kubernetes platform on the tests' API server: what it follows, writes and gives up."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kubernetes_asyncio.config import incluster_config
from tests.harness import platform_contract
from tests.harness.kubernetes_api import Call, KubernetesApi
from tests.harness.kubernetes_cluster import manifest
from tests.harness.kubernetes_objects import NAMESPACE, machine, pod
from tests.harness.kubernetes_rights import Rights
from tests.harness.kubernetes_store import Object
from tests.harness.waiting import eventually

from megascale_common.service.errors import OptionError, StateError, UnavailableError
from megascale_common.service.identity import authority
from megascale_common.service.identity.certificates import Certificates
from megascale_common.service.identity.peers import Role
from megascale_driver.platform.follower import NodeProvider
from megascale_driver.platform.interface import open_platform
from megascale_driver.platform.kubernetes import api as calls
from megascale_driver.platform.kubernetes.cluster import KubernetesCluster
from megascale_driver.platform.kubernetes.controller import Controller
from megascale_driver.platform.kubernetes.decisions import DriverNode
from megascale_driver.platform.kubernetes.objects import CONDITION, TAINT, TOPOLOGY, Mark
from megascale_driver.platform.kubernetes.platform import KubernetesPlatform

SWITCH, POD = "rack", "node-0"
MARK = Mark(node=POD, pod="u", reason="megascale: broken")


class Desk:
    """The driver's side: one node, and what was asked for it."""

    def __init__(self) -> None:
        self.node = DriverNode(
            name=POD, disposition="schedulable", reason="", alive=True, dead=False, host="m1"
        )
        self.asked: list[tuple[str, str]] = []
        self.unreachable: list[dict[str, str]] = []  # what was reported, without repetitions
        self.answers = True
        self.lack = (0, 0)

    async def lacking(self) -> tuple[int, int]:
        return self.lack

    async def nodes(self) -> list[DriverNode]:
        if not self.answers:
            raise UnavailableError("no driver answers")
        return [self.node]

    async def cordon(self, node: str, why: str) -> None:
        self.asked.append(("cordon", why))
        self.node = replace(self.node, disposition="cordoned", reason=f"kubernetes: {why}")

    async def report_unreachable(self, nodes: Mapping[str, str]) -> None:
        if not self.unreachable or self.unreachable[-1] != dict(nodes):
            self.unreachable.append(dict(nodes))

    async def uncordon(self, node: str, why: str, once: str = "") -> None:
        self.asked.append(("uncordon", why))
        self.node = replace(self.node, disposition="schedulable", reason="")


@pytest.fixture
async def server() -> AsyncIterator[KubernetesApi]:
    async with KubernetesApi() as running:
        for name, rack in (("m1", "r1"), ("m2", "r2")):
            running.store.create("nodes", "", machine(name, rack=rack))
        running.store.create("pods", NAMESPACE, pod(POD, "m1"))
        yield running


@pytest.fixture
async def cluster(server: KubernetesApi, tmp_path: Path) -> AsyncIterator[KubernetesCluster]:
    (tmp_path / "kubeconfig").write_text(server.kubeconfig())
    async with calls.KubernetesApi(tmp_path / "kubeconfig") as api:
        found = KubernetesCluster(api, NAMESPACE, "app.kubernetes.io/name=megascale-node", SWITCH)
        async with found.followed():
            await eventually(lambda: found.known, "a list of all")
            yield found


@contextlib.asynccontextmanager
async def controlled(
    cluster: KubernetesCluster, desk: Desk, providing: NodeProvider | None = None
) -> AsyncIterator[None]:
    controller = Controller(cluster, desk, 0.05, providing)  # type: ignore[arg-type]
    task = asyncio.create_task(controller.agree_for_ever())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def node_of(server: KubernetesApi, name: str) -> Any:
    return server.store.get(("nodes", "", name))


def place(server: KubernetesApi, name: str) -> str:
    """What StatefulSet, scheduler and kubelet do once a pod has been deleted; the new uid."""
    server.store.delete(("pods", NAMESPACE, POD), {"gracePeriodSeconds": 0})
    return str(server.store.create("pods", NAMESPACE, pod(POD, name))["metadata"]["uid"])


async def test_an_eviction_moves_the_pod_and_gives_the_node_back(
    server: KubernetesApi, cluster: KubernetesCluster
) -> None:
    desk = Desk()

    def ending() -> bool:
        return "deletionTimestamp" in server.store.get(("pods", NAMESPACE, POD))["metadata"]

    async with controlled(cluster, desk):
        await eventually(
            lambda: cluster.pods()[POD].topology == "switch=r1,host=m1", "the agent is told where"
        )
        before = node_of(server, "m1")
        desk.node = replace(desk.node, disposition="quarantined", reason="xid 79")
        await eventually(ending, "the pod ends")
        out = node_of(server, "m1")
        assert out["spec"]["unschedulable"] is True
        assert [each["key"] for each in out["spec"]["taints"]] == [TAINT]
        await eventually(lambda: shown(server, "m1") == "True", "the machine's condition")
        await asyncio.sleep(0.3)
        assert desk.asked == [], "the node is not back before its pod runs elsewhere"
        place(server, "m2")
        desk.node = replace(desk.node, host="m2")
        await eventually(lambda: desk.asked, "the driver has the node again")
        assert desk.asked == [("uncordon", "moved from machine m1 to m2")]
        assert server.store.get(("pods", NAMESPACE, POD))["spec"]["nodeName"] == "m2"

        # An operator has repaired the machine: `kubectl uncordon m1`.
        server.store.update(
            ("nodes", "", "m1"),
            lambda n: {**n, "spec": {**n["spec"], "unschedulable": None}},
            False,
        )
        await eventually(lambda: shown(server, "m1") == "False", "the machine is given back")
    after = node_of(server, "m1")
    assert not after["spec"].get("taints") and not after["metadata"].get("annotations")
    assert after["metadata"]["labels"] == before["metadata"]["labels"]
    events = server.store.list("events", NAMESPACE, lambda found: True)
    assert [each["message"] for each in events] == ["megascale: xid 79"]
    deleted = [call for call in server.calls if call.verb == "delete"]
    assert len(deleted) == 1


def shown(server: KubernetesApi, name: str) -> str:
    conditions = node_of(server, name)["status"]["conditions"]
    return "".join(each["status"] for each in conditions if each["type"] == CONDITION)


@pytest.fixture
def platform(
    server: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> KubernetesPlatform:
    (tmp_path / "own").write_text(server.kubeconfig())
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "own"))
    monkeypatch.setenv("MEGASCALE_NAMESPACE", NAMESPACE)
    monkeypatch.setenv("MEGASCALE_SWITCH_LABEL", SWITCH)
    found = open_platform("kubernetes")
    assert isinstance(found, KubernetesPlatform)
    return found


async def test_it_keeps_the_contract_of_platforms(
    server: KubernetesApi, platform: KubernetesPlatform
) -> None:
    async def undo() -> None:
        server.store.update(
            ("nodes", "", "m1"),
            lambda n: {**n, "spec": {**n["spec"], "unschedulable": None}},
            False,
        )

    await platform_contract.check(platform, POD, undo)
    assert (await platform_contract.node_of(platform, POD)).switch == "r1"
    uid = server.store.get(("pods", NAMESPACE, POD))["metadata"]["uid"]
    assert await platform.replace(POD) and await platform.replace(POD)
    deleted = [call for call in server.calls if call.verb == "delete"]
    assert [call.name for call in deleted] == [POD]
    ending = server.store.get(("pods", NAMESPACE, POD))["metadata"]
    assert ending["uid"] == uid and "deletionTimestamp" in ending
    server.refuse(403, times=10**6, reason="Forbidden")
    with pytest.raises(UnavailableError, match="rights"):
        await platform.nodes()


def stateful_set(replicas: int) -> Object:
    found = manifest("StatefulSet", "node")
    found["spec"]["replicas"] = replicas
    return found


def replicas(server: KubernetesApi) -> Any:
    return server.store.get(("statefulsets", NAMESPACE, "megascale-node"))["spec"]["replicas"]


async def test_more_nodes_are_more_pods_of_the_set(
    server: KubernetesApi, platform: KubernetesPlatform
) -> None:
    with pytest.raises(UnavailableError, match="megascale-node"):
        await platform.provide(1)  # there is no such set
    server.store.create("statefulsets", NAMESPACE, stateful_set(0))
    assert await platform.provide(2) == 2
    await platform_contract.check_provide(platform, 2, gives=True)
    assert replicas(server) == 3
    patches = [call for call in server.calls if call.verb == "patch"]
    assert [(each.resource, each.name) for each in patches] == [
        ("statefulsets/scale", "megascale-node")
    ] * 2
    # Somebody else has changed it meanwhile: it is read again.
    server.refuse(409, reason="Conflict", concerns=lambda call: call.verb == "patch")
    assert await platform.provide(4) == 4 and replicas(server) == 4
    server.refuse(409, times=100, reason="Conflict", concerns=lambda call: call.verb == "patch")
    with pytest.raises(UnavailableError, match="changes all the time"):
        await platform.provide(5)
    assert replicas(server) == 4


async def test_pods_are_added_while_jobs_lack_nodes_and_up_to_a_bound(
    server: KubernetesApi, cluster: KubernetesCluster
) -> None:
    server.store.create("statefulsets", NAMESPACE, stateful_set(1))
    said: list[str] = []

    async def provide(count: int) -> int:
        return await cluster.provide("megascale-node", count)

    providing = NodeProvider(provide, 3, 0.0, lambda event, fields: said.append(event))
    desk = Desk()
    async with controlled(cluster, desk, providing):
        await asyncio.sleep(0.2)
        assert replicas(server) == 1
        desk.lack = (2, 1)
        await eventually(lambda: replicas(server) == 2, "a second pod")
        desk.lack = (9, 8)
        await eventually(lambda: replicas(server) == 3, "the third one is the last")
        await eventually(lambda: len(said) == 2, "both are reported")
        server.refuse(403, times=10**6, reason="Forbidden", concerns=lambda c: c.verb == "patch")
        desk.lack = (2, 1)
        await asyncio.sleep(0.2)
    assert said[:2] == ["provided", "provided"] and replicas(server) == 3


async def test_a_drain_by_hand_reaches_the_driver_and_goes_with_kubectl_uncordon(
    server: KubernetesApi, cluster: KubernetesCluster, platform: KubernetesPlatform
) -> None:
    desk = Desk()
    async with controlled(cluster, desk):
        await platform.drain(POD, "a new cable")
        await eventually(lambda: desk.asked, "a cordon")
        await asyncio.sleep(0.2)
        assert desk.asked == [("cordon", "machine m1: drained (a new cable)")]
        server.store.update(
            ("nodes", "", "m1"),
            lambda n: {**n, "spec": {**n["spec"], "unschedulable": None}},
            False,
        )
        await eventually(lambda: len(desk.asked) == 2, "and its end")
        await eventually(lambda: not node_of(server, "m1")["spec"].get("taints"), "no taint")
    assert [call for call in server.calls if call.verb == "delete"] == []


async def test_conditions_of_machines_reach_the_driver(
    server: KubernetesApi, cluster: KubernetesCluster
) -> None:
    desk = Desk()

    def set_ready(status: str) -> None:
        ready = {"type": "Ready", "status": status, "reason": f"Kubelet{status}"}
        server.store.update(
            ("nodes", "", "m1"), lambda n: {**n, "status": {"conditions": [ready]}}, True
        )

    async with controlled(cluster, desk):
        set_ready("False")
        await eventually(lambda: desk.asked, "a cordon")
        set_ready("True")
        await eventually(lambda: len(desk.asked) == 2, "and its end")
        await eventually(lambda: len(desk.unreachable) == 2, "and that it is reached again")
    assert desk.unreachable == [{POD: "machine m1: NotReady (KubeletFalse)"}, {}]
    assert desk.asked == [
        ("cordon", "machine m1: NotReady (KubeletFalse)"),
        ("uncordon", "machine m1 is well again"),
    ]


async def test_a_dead_machines_pod_is_removed_without_its_kubelet(
    server: KubernetesApi, cluster: KubernetesCluster
) -> None:
    desk = Desk()
    desk.node = replace(desk.node, disposition="cordoned", reason="x", alive=False, dead=True)
    dead = machine("m1", ready=False)["status"]
    server.store.update(("nodes", "", "m1"), lambda node: {**node, "status": dead}, True)

    def there() -> bool:
        return bool(server.store.list("pods", NAMESPACE, lambda found: True))

    async with controlled(cluster, desk):
        await eventually(lambda: not there(), "the pod is gone")


async def test_without_a_driver_no_machine_is_touched(
    server: KubernetesApi, cluster: KubernetesCluster
) -> None:
    desk = Desk()
    async with controlled(cluster, desk):
        desk.answers = False
        desk.node = replace(desk.node, disposition="quarantined", reason="x")
        await asyncio.sleep(0.3)
        assert {call.verb for call in server.calls if call.resource == "nodes"} <= {"list", "watch"}
        desk.answers = True
        await eventually(lambda: node_of(server, "m1")["spec"].get("taints"), "now it is")


async def test_a_broken_watch_goes_on_and_a_forgotten_version_is_listed_again(
    server: KubernetesApi, cluster: KubernetesCluster
) -> None:
    pods = cluster._pods
    # A change elsewhere: the pods' watch learns of the version by a bookmark alone.
    server.store.update(("nodes", "", "m2"), lambda node: {**node, "spec": {"podCIDR": "x"}}, False)
    await eventually(lambda: pods._version == str(server.store.version), "a bookmark")
    server.drop_watches()
    place(server, "m2")
    await eventually(lambda: cluster.pods()[POD].machine == "m2", "the change is seen")
    assert pods.lists == 1

    server.drop_watches()
    server.refuse(503, times=2, reason="ServiceUnavailable", concerns=lambda c: c.verb == "watch")
    place(server, "m1")
    server.store.compact()
    await eventually(lambda: cluster.pods()[POD].machine == "m1", "listed again")
    assert pods.lists == 2


async def test_a_copy_that_may_be_old_is_not_decided_on(
    server: KubernetesApi, cluster: KubernetesCluster
) -> None:
    server.refuse(503, times=10**6, reason="ServiceUnavailable")
    server.drop_watches()
    await eventually(lambda: not cluster.known, "the copies are known to be old")
    server.refusing.clear()
    await eventually(lambda: cluster.known, "they are followed again")


async def test_a_busy_server_is_asked_again_when_it_has_said(
    server: KubernetesApi, cluster: KubernetesCluster
) -> None:
    server.refuse(429, retry_after_s=1, concerns=lambda call: call.verb == "patch")
    began_s = time.monotonic()
    await cluster.mark(cluster.machines()["m1"], MARK)
    assert time.monotonic() - began_s >= 1.0
    assert node_of(server, "m1")["spec"]["unschedulable"]


async def test_a_wait_that_a_server_asks_for_is_bounded(
    server: KubernetesApi, cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "DEADLINE_S", 0.5)
    server.refuse(429, retry_after_s=3600, times=10)
    with pytest.raises(UnavailableError, match="429"):
        await cluster.mark(cluster.machines()["m1"], MARK)


async def test_what_has_changed_is_decided_again(
    server: KubernetesApi, cluster: KubernetesCluster
) -> None:
    seen = cluster.machines()["m1"]
    server.store.update(
        ("nodes", "", "m1"), lambda node: {**node, "spec": {"unschedulable": True}}, False
    )
    with pytest.raises(StateError):
        await cluster.mark(seen, MARK)
    old = cluster.pods()[POD]
    place(server, "m1")
    with pytest.raises(StateError, match="UID"):
        await cluster.delete_pod(old, "why", force=True)
    assert server.store.get(("pods", NAMESPACE, POD))["metadata"]["uid"] != old.uid


async def test_a_right_that_is_missing_is_said_and_the_rest_goes_on(
    server: KubernetesApi, cluster: KubernetesCluster
) -> None:
    def cordons(call: Call) -> bool:
        return (call.verb, call.resource) == ("patch", "nodes")

    server.refuse(403, times=10**6, reason="Forbidden", concerns=cordons)
    with pytest.raises(UnavailableError, match="rights"):
        await cluster.mark(cluster.machines()["m1"], MARK)
    desk = Desk()
    desk.node = replace(desk.node, disposition="quarantined", reason="x")
    async with controlled(cluster, desk):
        await eventually(lambda: cluster.pods()[POD].topology, "the pod is annotated all the same")
    assert TOPOLOGY in server.store.get(("pods", NAMESPACE, POD))["metadata"]["annotations"]
    assert not [call for call in server.calls if call.verb == "delete"]


async def test_lists_of_many_pages_are_read_whole(
    server: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megascale_driver.platform.kubernetes.api.PAGE", 7)
    for number in range(30):
        server.store.create("nodes", "", machine(f"more-{number}"))
    (tmp_path / "kubeconfig").write_text(server.kubeconfig())
    async with calls.KubernetesApi(tmp_path / "kubeconfig") as api:
        found = KubernetesCluster(api, NAMESPACE, "", SWITCH)
        async with found.followed():
            await eventually(lambda: found.known, "a list of all")
            assert len(found.machines()) == 32
    pages = [call for call in server.calls if (call.verb, call.resource) == ("list", "nodes")]
    assert len(pages) == 5


async def test_a_configuration_that_is_none_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").write_text("nonsense: true\n")
    for file in (tmp_path / "kubeconfig", tmp_path / "absent", None):
        with pytest.raises(OptionError, match="--kubeconfig"):
            async with calls.KubernetesApi(file):
                pass


async def test_in_a_pod_its_service_account_says_who_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over TLS, by the token and the authority that a kubelet puts into the pod."""
    authority.create(tmp_path / "tls", "test")
    files = authority.issue(tmp_path / "tls", "test", Role.DRIVER, "api")
    rights = Rights({("platform", ""): {("list", "", "nodes")}})
    served = Certificates(files.key, files.certificate).context(ssl.PROTOCOL_TLS_SERVER)
    async with KubernetesApi(rights=rights, tokens={"secret": "platform"}, tls=served) as server:
        server.store.create("nodes", "", machine("m1"))
        (tmp_path / "token").write_text("secret")
        monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(files.ca))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", server.url.rpartition(":")[2])
        async with calls.KubernetesApi(None) as api:
            assert len((await api.get("/api/v1/nodes"))["items"]) == 1
            with pytest.raises(UnavailableError, match="rights"):
                await api.get(f"/api/v1/namespaces/{NAMESPACE}/pods")
        (tmp_path / "token").write_text("another")
        async with calls.KubernetesApi(None) as api:
            with pytest.raises(UnavailableError, match="401"):
                await api.get("/api/v1/nodes")
        authority.create(tmp_path / "other", "test")
        other = str(tmp_path / "other" / "ca.pem")
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", other)
        monkeypatch.setattr(calls, "DEADLINE_S", 0.1)
        async with calls.KubernetesApi(None) as api:
            with pytest.raises(UnavailableError, match=r"does not answer.*certificate"):
                await api.get("/api/v1/nodes")

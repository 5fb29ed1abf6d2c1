"""A cluster of real drivers, nodes and etcd whose nodes are pods of the tests' Kubernetes."""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
import yaml
from tests.harness import kubectl as tool
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.driver import DriverProcess
from tests.harness.etcd import CuttableProxy, etcd_side, make_server
from tests.harness.kubernetes_api import KubernetesApi, require_valid
from tests.harness.kubernetes_machines import Machines, pod_of
from tests.harness.kubernetes_objects import NAMESPACE, machine
from tests.harness.kubernetes_rights import Rights
from tests.harness.kubernetes_service import Service
from tests.harness.kubernetes_store import Object
from tests.harness.paced import paced, python_path, release
from tests.harness.waiting import CALL_TIMEOUT_S, eventually

from megascale.v1 import job_pb2, types_pb2
from megascale_checkpoint.memory.staging import default_base
from megascale_client import AsyncClient, Node, Unavailable, parse_job
from megascale_common.node.addresses import joined
from megascale_common.service.channel import present
from megascale_common.service.identity import authority
from megascale_common.service.identity.peers import Role, read_or_create_token

BASE = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "base"
PROVIDE = BASE.parent / "components" / "provide"
CLUSTER = f"pods-{os.getpid()}"  # its shared memory is no other test run's
PLATFORM = f"system:serviceaccount:{NAMESPACE}:megascale-platform"
SWITCH_LABEL = "topology.kubernetes.io/zone"


def manifests(folder: Path = BASE) -> list[Object]:
    """All objects of the files of a folder."""
    found: list[Object] = []
    for file in sorted(folder.glob("*.yaml")):
        if file.name != "kustomization.yaml":
            found += yaml.safe_load_all(file.read_text())
    return found


def manifest(kind: str, name: str) -> Object:
    """A copy of one object of the base."""
    (found,) = [
        each
        for each in manifests()
        if (each["kind"], each["metadata"]["name"]) == (kind, f"megascale-{name}")
    ]
    return copy.deepcopy(found)


class PodCluster:
    """Use :func:`pod_cluster`, which makes one that is ready.

    ``driver``: one that is a process; None: drivers are pods behind ``service``, on ``etcd``.
    """

    def __init__(
        self,
        folder: Path,
        api: KubernetesApi,
        driver: DriverProcess | None,
        etcd: str = "",
        family: Literal[4, 6] = 4,
    ) -> None:
        self.folder, self.api, self.driver = folder, api, driver
        self._site = folder / "site"
        self.token = read_or_create_token(folder / "token")
        self.service = Service(self._ready_drivers)
        self.tls = folder / "tls"
        self.kubeconfig = folder / "administrator.yaml"
        self._corpus = write_corpus(
            folder / "corpus", random_documents(seed=7, count=60, longest=200)
        )
        (config,) = [each for each in manifests() if each["kind"] == "ConfigMap"]
        platform_file = folder / "platform.yaml"
        files = authority.issue(self.tls, CLUSTER, Role.DRIVER, "etcd-client")
        assert files.ca is not None
        etcd_files = {"ca.crt": files.ca, "tls.crt": files.certificate, "tls.key": files.key}
        self.machines = Machines(
            api=api,
            family=family,
            folder=folder,
            cluster=CLUSTER,
            tls=self.tls,
            settings={**config["data"], "MEGASCALE_ETCD": etcd},
            overrides={
                "MEGASCALE_CLUSTER": CLUSTER,
                "MEGASCALE_DEVICES": "0",
                "MEGASCALE_HEARTBEAT_INTERVAL_S": "1",
                "KUBECONFIG": str(platform_file),
                "PYTHONPATH": python_path(self._site),
            },
            secrets={
                "megascale-token": {"token": self.token},
                "megascale-etcd": {name: file.read_text() for name, file in etcd_files.items()},
            },
        )
        self.kubeconfig.write_text(api.kubeconfig(namespace=NAMESPACE))
        platform_file.write_text(api.kubeconfig("platform", NAMESPACE))

    def _ready_drivers(self) -> list[str]:
        if self.driver is not None:
            return [self.driver.address()]
        return [joined(host, 7700) for host in self.machines.ready_addresses("megascale-driver")]

    def populate(self, machine_count: int, nodes: int) -> None:
        """Add machines of two to a switch, the platform's pod, and the nodes' StatefulSet."""
        store = self.api.store
        for number in range(machine_count):
            labels = {SWITCH_LABEL: f"s{number // 2}"}
            store.create("nodes", "", machine(f"m{number}", **labels))
        deployment = manifest("Deployment", "platform")
        platform = pod_of(deployment["spec"]["template"], "megascale-platform-0")
        container = platform["spec"]["containers"][0]
        # Outside a pod, and on this machine nobody waits five seconds.
        container["args"] = ["--kubeconfig", str(self.folder / "platform.yaml")]
        container["args"] += ["--interval-s", "0.5", "--provide-after-s", "0.5"]
        if self.driver is None:
            drivers = manifest("Deployment", "driver")
            require_valid(drivers)
            store.create("deployments", NAMESPACE, drivers)
        nodes_set = manifest("StatefulSet", "node")
        nodes_set["spec"]["replicas"] = nodes
        for plural, made in (("pods", platform), ("statefulsets", nodes_set)):
            require_valid(made)
            store.create(plural, NAMESPACE, made)
        store.create("poddisruptionbudgets", NAMESPACE, manifest("PodDisruptionBudget", "node"))

    def client(self) -> AsyncClient:
        """A client with the operator's certificate."""
        files = authority.issue(self.tls, CLUSTER, Role.OPERATOR, "ada")
        return AsyncClient(
            lambda: self.service.address,
            self.token,
            root_certificate=files.ca,
            certificate=files.certificate,
            key=files.key,
            retry_for_s=CALL_TIMEOUT_S,
        )

    async def nodes(self) -> dict[str, Node]:
        """The nodes as the driver lists them."""
        async with self.client() as client:
            return {node.name: node async for node in client.nodes()}

    async def until_ready(self, count: int) -> None:
        """Wait until so many nodes are alive, schedulable, and can save and restore."""

        async def ready() -> bool:
            try:
                nodes = await self.nodes()
            except Unavailable:  # no driver leads yet: on a busy machine that takes its time
                return False
            good = [
                node
                for node in nodes.values()
                if node.liveness == types_pb2.NODE_LIVENESS_ALIVE
                and node.disposition == types_pb2.NODE_DISPOSITION_SCHEDULABLE
                and node.checkpoint_endpoint
                and node.topology.get("host") == self.machine_of(node.name)
            ]
            return len(good) == count

        await eventually(ready, f"{count} nodes that can take a job", self.moves, story=self.story)

    def pod(self, name: str) -> Object | None:
        """A pod as it stands."""
        key = ("pods", NAMESPACE, name)
        return self.api.store.get(key) if key in self.api.store.objects else None

    def machine_of(self, name: str) -> str:
        """The machine of a pod; "" for none."""
        found = self.pod(name)
        return found["spec"].get("nodeName", "") if found else ""

    def moves(self) -> int:
        """Grows with every line of a log and every write to the API."""
        files = self.folder.glob("pods/**/*log")
        return self.api.store.version + sum(file.stat().st_size for file in files)

    def story(self) -> str:
        """The ends of all logs."""
        driver = self.driver.log()[-3000:] if self.driver is not None else ""
        return self.machines.log("*") + driver

    def release(self) -> None:
        """Let the jobs go on that are held at a step."""
        release(self._site)

    async def kubectl(self, *arguments: str) -> str:
        """Output of a real kubectl, as the administrator."""
        status, output = await tool.kubectl(self.kubeconfig, *arguments)
        assert status == 0, output
        return output

    def job(self, name: str, steps: int, *, held_from_step: int | None = None) -> job_pb2.JobSpec:
        """A job of two ranks on two nodes, a step in about 20 ms.

        From ``held_from_step`` on it waits for :meth:`release` (:mod:`tests.harness.paced`).
        """
        return parse_job(
            {
                "name": name,
                "trainer": {
                    "model": {"layers": 2, "hidden_size": 32, "heads": 2, "vocab_size": 257,
                              "sequence_length": 16},
                    "parallelism": {"pp": 2},
                    "training": {"steps": steps, "global_batch_size": 1, "precision": "fp32"},
                    "optimizer": paced(held_from_step=held_from_step),
                    "data": {"sources": [{"prefix": str(self._corpus)}]},
                },
                "checkpoint": {"uri": str(self.folder / "checkpoints" / name),
                               "interval_steps": 10},
                "recovery": {"collective_timeout_s": 60},
            }
        )  # fmt: skip


@contextlib.asynccontextmanager
async def pod_cluster(
    folder: Path,
    machines: int,
    nodes: int,
    *,
    driver_pods: bool = False,
    family: Literal[4, 6] = 4,
    provide_up_to: int = 0,
) -> AsyncIterator[PodCluster]:
    """A cluster that is ready; at the end no process of it is left.

    ``driver_pods``: three drivers as pods, on an etcd that wants a certificate. ``family``: of the
    pods' addresses. ``provide_up_to``: with the component that adds pods, up to so many nodes.
    """
    runtime = Path(tempfile.mkdtemp(prefix="ms-", dir="/tmp"))  # short: socket paths are bounded
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, runtime, ignore_errors=True)
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("XDG_RUNTIME_DIR", str(runtime))
        stack.callback(shutil.rmtree, default_base() / CLUSTER, ignore_errors=True)
        etcd = make_server(folder / "etcd")
        stack.callback(etcd.kill)
        await etcd.start()
        authority.create(folder / "tls", CLUSTER)
        more = manifests(PROVIDE) if provide_up_to else []
        rights = Rights.of_manifests([*manifests(), *more])
        rights.administrators.add("administrator")
        # kubectl sends no token over a connection without TLS.
        tokens = {"": "administrator", "platform": PLATFORM}
        api = await stack.enter_async_context(KubernetesApi(rights=rights, tokens=tokens))
        files = authority.issue(folder / "tls", CLUSTER, Role.DRIVER, "d0")
        driver, proxy = None, CuttableProxy(etcd.endpoint, tls=etcd_side(files))
        if driver_pods:
            await stack.enter_async_context(proxy)
        else:
            stack.callback(present, None)
            present(authority.issue(folder / "tls", CLUSTER, Role.OPERATOR, "ada"))
            options = (*files.options(), "--cluster", CLUSTER, "--heartbeat-interval-s", "1")
            driver = DriverProcess(folder, etcd.endpoint, None, "driver", *options)
            stack.push_async_callback(driver.close)
            await driver.start()
        cluster = PodCluster(folder, api, driver, proxy.endpoint if driver_pods else "", family)
        await stack.enter_async_context(cluster.service.serving())
        cluster.machines.overrides["MEGASCALE_DRIVER"] = cluster.service.address
        cluster.machines.overrides["MEGASCALE_PROVIDE_UP_TO"] = str(provide_up_to)
        cluster.populate(machines, nodes)
        await stack.enter_async_context(cluster.machines.running())
        await cluster.until_ready(nodes)
        yield cluster

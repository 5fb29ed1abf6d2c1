"""A cluster on hosts of its own: etcd, a driver and nodes, each in a network namespace, with TLS.

The client is beside the hosts, on the bridge. Nodes are given no address: they serve at the one
from which the route to the driver starts.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.job_follower import JobFollower
from tests.harness.namespaces import Host, HostNetwork, host_network
from tests.harness.paced import paced, python_path
from tests.harness.processes import living_processes_of_group, until_gone
from tests.harness.waiting import eventually, log_bytes

from megascale.v1 import job_pb2, types_pb2
from megascale_checkpoint.memory.staging import default_base
from megascale_client import AsyncClient, MegascaleError, parse_job
from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.connection import TlsConfig
from megascale_common.etcd.errors import EtcdUnavailable
from megascale_common.etcd.server import find_etcd
from megascale_common.node.process import armed_command, child_environment
from megascale_common.service.identity import authority
from megascale_common.service.identity.certificates import Certificates, in_folder
from megascale_common.service.identity.peers import Role, read_or_create_token

NODES = ("n1", "n2", "n3")
ETCD_PORT, DRIVER_PORT = 2379, 7070
HEARTBEAT_S = 1.0
RETRY_S = 120.0


class HostCluster:
    """Everything above; ``async with host_cluster(folder)`` makes one.

    ``family``: 4 or 6, the addresses that are used.
    """

    def __init__(self, folder: Path, network: HostNetwork, family: int) -> None:
        self.folder, self.network, self.family = folder, network, family
        self.name = f"hosts-{uuid.uuid4().hex[:8]}"
        self.token = read_or_create_token(folder / "token")
        self.tls = folder / "tls"
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self._corpus = write_corpus(
            folder / "corpus", random_documents(seed=7, count=60, longest=200)
        )
        authority.create(self.tls, self.name)

    def host(self, name: str) -> Host:
        """The host ``etcd``, ``driver`` or that of a node."""
        return self.network[name]

    def at(self, name: str, port: int) -> str:
        """host:port of a host."""
        address = self.host(name).address(self.family)
        return f"[{address}]:{port}" if self.family == 6 else f"{address}:{port}"

    def issue(self, role: Role, name: str, host: str) -> Certificates:
        """A certificate for what serves on a host."""
        addresses = (self.host(host).ipv4, self.host(host).ipv6)
        return authority.issue(self.tls, self.name, role, name, addresses)

    @property
    def etcd_tls(self) -> TlsConfig:
        """How etcd is reached."""
        files = in_folder(self.tls, Role.DRIVER, "driver")
        assert files.ca is not None
        return TlsConfig(files.ca, files.certificate, files.key)

    async def start(self) -> None:
        """Start etcd, the driver, then the nodes; returns when all are ready."""
        self._start_etcd()
        self.issue(Role.DRIVER, "driver", "driver")
        await eventually(self._etcd_serves, "etcd serves", self._logs, story=self.story)
        self._start_driver()
        for node in NODES:
            self._start_node(node)
        async with self.client() as client:

            async def ready() -> bool:
                try:
                    nodes = [node async for node in client.nodes()]
                except MegascaleError:
                    return False
                return {
                    node.name for node in nodes
                    if node.checkpoint_endpoint and node.liveness == types_pb2.NODE_LIVENESS_ALIVE
                } == {*NODES}  # fmt: skip

            await eventually(ready, "the nodes", self._logs, story=self.story)

    def end(self) -> None:
        """Leave no process."""
        for process in reversed(self.started.values()):
            group = living_processes_of_group(process.pid)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            until_gone(group, "processes of a host")

    def client(self) -> AsyncClient:
        """A client with the operator's certificate, which tries for long: the network is broken."""
        files = authority.issue(self.tls, self.name, Role.OPERATOR, "operator")
        return AsyncClient(
            self.at("driver", DRIVER_PORT), self.token, root_certificate=files.ca,
            certificate=files.certificate, key=files.key, retry_for_s=RETRY_S,
        )  # fmt: skip

    def follow(self, client: AsyncClient, spec: job_pb2.JobSpec) -> JobFollower:
        """Submit a job and follow it."""
        return JobFollower(client, spec, self.folder, limit_s=RETRY_S)

    def job(self, name: str, *, steps: int, pace_s: float = 0.05) -> job_pb2.JobSpec:
        """A job of two ranks on two nodes, with the third as its spare."""
        return parse_job(
            {
                "name": name,
                "trainer": {
                    "model": {"layers": 2, "hidden_size": 32, "heads": 2, "vocab_size": 257,
                              "sequence_length": 16},
                    "parallelism": {"pp": 2},
                    "training": {"steps": steps, "global_batch_size": 1, "precision": "fp32"},
                    "optimizer": paced(pace_s),
                    "data": {"sources": [{"prefix": str(self._corpus)}]},
                },
                "checkpoint": {"uri": str(self.folder / "checkpoints" / name),
                               "interval_steps": 20},
                "recovery": {"spare_nodes": 1, "collective_timeout_s": 60},
            }
        )  # fmt: skip

    def story(self) -> str:
        """The ends of all logs of services."""
        logs = [*self.folder.glob("*.log"), *self.folder.glob("nodes/*/*.log")]
        return "\n".join(f"== {log.name}\n{log.read_text()[-1500:]}" for log in sorted(logs))

    def _logs(self) -> int:
        return log_bytes(self.folder)

    def _start_etcd(self) -> None:
        files = self.issue(Role.VIEWER, "etcd", "etcd")
        url, peer = f"https://{self.at('etcd', ETCD_PORT)}", "http://127.0.0.1:2380"
        self._start(
            "etcd", self.host("etcd"), find_etcd(),
            *("--name", "m0", "--data-dir", str(self.folder / "etcd"), "--log-level", "warn"),
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", f"m0={peer}", "--unsafe-no-fsync"),
            *("--cert-file", str(files.certificate), "--key-file", str(files.key)),
            *("--trusted-ca-file", str(files.ca), "--client-cert-auth"),
        )  # fmt: skip

    async def _etcd_serves(self) -> bool:
        async with EtcdClient(
            [self.at("etcd", ETCD_PORT)], tls=self.etcd_tls, timeout_s=1.0
        ) as etcd:
            with contextlib.suppress(EtcdUnavailable):
                return bool((await etcd.status()).leader_id)
        return False

    def _start_driver(self) -> None:
        files = in_folder(self.tls, Role.DRIVER, "driver")
        self._start(
            "driver", self.host("driver"), sys.executable, "-m", "megascale_driver",
            *("--cluster", self.name, "--bind", self.at("driver", DRIVER_PORT)),
            *("--token-file", str(self.folder / "token")),
            *("--heartbeat-interval-s", f"{HEARTBEAT_S:g}", *files.options()),
            *("--etcd", self.at("etcd", ETCD_PORT), "--etcd-ca", str(files.ca)),
            *("--etcd-certificate", str(files.certificate), "--etcd-key", str(files.key)),
        )  # fmt: skip

    def _start_node(self, name: str) -> None:
        agent = self.issue(Role.EXECUTOR, name, name)
        daemon = self.issue(Role.CHECKPOINT, name, name)
        folder = self.folder / "nodes" / name
        folder.mkdir(parents=True)
        self._start(
            name, self.host(name), sys.executable, "-m", "megascale_executor.agent",
            *("--cluster", self.name, "--node", name, "--driver", self.at("driver", DRIVER_PORT)),
            *("--token-file", str(self.folder / "token"), "--run-folder", str(self.folder)),
            *("--device", "cpu", "--devices", "0", "--topology", "switch=s0"),
            *("--address-file", str(folder / "executor.address"), *agent.options()),
            *("--daemon-tls-key", str(daemon.key)),
            *("--daemon-tls-certificate", str(daemon.certificate)),
            environment={"PYTHONPATH": python_path(self.folder / "site")},
        )  # fmt: skip

    def _start(
        self, name: str, host: Host, *command: str, environment: Mapping[str, str] | None = None
    ) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.started[name] = subprocess.Popen(
                host.command(*armed_command(command)), stdout=log, stderr=log,
                env=child_environment(environment), start_new_session=True,
            )  # fmt: skip


@contextlib.asynccontextmanager
async def host_cluster(
    folder: Path, *, family: int = 4, delay_ms: float = 0.0, hosts: Sequence[str] = ()
) -> AsyncIterator[HostCluster]:
    """A cluster that is ready; at the end no process and no namespace of it is left."""
    runtime = Path(tempfile.mkdtemp(prefix="ms-", dir="/tmp"))  # short: socket paths are bounded
    names = list(itertools.chain(("etcd", "driver"), NODES, hosts))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, runtime, ignore_errors=True)
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("XDG_RUNTIME_DIR", str(runtime))
        network = stack.enter_context(host_network(names, delay_ms=delay_ms))
        cluster = HostCluster(folder, network, family)
        stack.callback(shutil.rmtree, default_base() / cluster.name, ignore_errors=True)
        stack.callback(cluster.end)
        await cluster.start()
        yield cluster

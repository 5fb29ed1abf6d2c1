"""The demo's cluster: `megascale up` as a child process, the kill of a node, and the cleanup."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 45.0
GONE_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.05
CLUSTER = "demo"
# Set in the environment of every process of one demo, and of no other process.
MARK_VARIABLE = "MEGASCALE_DEMO_ID"
# Processes of megascale that find this variable exit when that process exits.
PARENT_PID_VARIABLE = "MEGASCALE_PARENT_PID"
_MARKER_FILE = ".megascale-demo"

Echo = Callable[[str], None]  # prints rich markup


class ClusterPlan(Protocol):
    """What a cluster is started with."""

    @property
    def nodes(self) -> int:
        """Number of nodes."""

    @property
    def devices_per_node(self) -> int:
        """Devices, or CPU ranks, of each."""

    @property
    def device(self) -> str:
        """cpu or cuda."""


class DemoFailed(Exception):
    """The demo did not show what it must; the message has the reason."""


def megascale(*arguments: str) -> list[str]:
    """The command line of this CLI, with the interpreter that runs now."""
    return [sys.executable, "-m", "megascale_cli", *arguments]


def fresh_folder(folder: Path) -> None:
    """Make ``folder`` empty: what an earlier demo left there is removed.

    Raises:
        DemoFailed: it has files that no demo wrote, or a demo still runs in it.
    """
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _MARKER_FILE).exists():
            raise DemoFailed(
                f"{folder} is not empty and no demo wrote it: choose another --run-folder"
            )
        if (folder / "up.json").exists() and _alive(
            json.loads((folder / "up.json").read_text())["pid"]
        ):
            raise DemoFailed(
                f"a demo still runs in {folder}: wait until it ends or choose another --run-folder"
            )
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / _MARKER_FILE).touch()


async def run_command(*arguments: str) -> dict[str, Any]:
    """Run a command of this CLI that prints one JSON object.

    Raises:
        DemoFailed: it failed; the message has what it printed.
    """
    process = await asyncio.create_subprocess_exec(
        *megascale(*arguments, "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await process.communicate()
    finally:
        if process.returncode is None:  # interrupted by Ctrl-C
            process.kill()
    if process.returncode != 0:
        problem = errors.decode(errors="replace").strip()
        raise DemoFailed(f"`megascale {' '.join(arguments[:2])}` failed: {problem}")
    result = json.loads(output.decode().strip().splitlines()[-1])
    assert isinstance(result, dict)
    return result


class DemoCluster:
    """`megascale up` and all processes that it starts."""

    def __init__(
        self,
        plan: ClusterPlan,
        folder: Path,
        echo: Echo,
        *options: str,
        dashboard: bool = False,
    ) -> None:
        self._plan, self._options = plan, options
        self._dashboard = dashboard
        self._folder = folder
        self._echo = echo
        self._mark = uuid.uuid4().hex
        self._up: asyncio.subprocess.Process | None = None
        self._log = folder / "up.log"

    async def start(self) -> None:
        """Start the cluster and wait until all its nodes are alive. Raises DemoFailed."""
        environment = {
            **os.environ,
            MARK_VARIABLE: self._mark,
            PARENT_PID_VARIABLE: str(os.getpid()),
        }
        plan = self._plan
        arguments = [
            "up",
            "--json",
            "--dashboard" if self._dashboard else "--no-dashboard",
            "--cluster",
            CLUSTER,
            "--nodes",
            str(plan.nodes),
            "--device",
            plan.device,
        ]
        arguments += [
            "--devices-per-node",
            str(plan.devices_per_node),
            "--run-folder",
            str(self._folder),
            *self._options,
        ]
        with self._log.open("wb") as log:
            self._up = await asyncio.create_subprocess_exec(
                *megascale(*arguments),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            await asyncio.wait_for(self._until_ready(self._up), START_TIMEOUT_S)
        except TimeoutError:
            raise DemoFailed(
                f"the cluster was not ready after {START_TIMEOUT_S:g} s; see {self._folder}"
            ) from None

    async def dashboard_url(self) -> str:
        """The link of the cluster's dashboard; "" where it is not installed.

        Raises:
            DemoFailed: it did not start.
        """
        assert self._up is not None and self._up.stdout is not None
        while line := await asyncio.wait_for(self._up.stdout.readline(), START_TIMEOUT_S):
            event = json.loads(line)
            if event["event"] == "dashboard_ready":
                return str(event["url"])
            if event["event"] == "dashboard_absent":
                self._echo(f"no dashboard: {event['remedy']}")
                return ""
            if event["event"] == "dashboard_failed":
                break
        raise DemoFailed(f"the dashboard did not start; see {self._folder / 'dashboard.log'}")

    async def stop(self) -> int:
        """Stop the cluster in order, then kill what is left; returns how many were killed."""
        if self._up is None:
            return 0
        if self._up.returncode is None:
            self._up.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._up.communicate(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._up.kill()
            await self._up.wait()
        left = await _wait_gone(self.processes)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return len(left)

    def processes(self) -> list[int]:
        """Running processes of this demo's cluster."""
        needle = f"{MARK_VARIABLE}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                belongs = needle in (entry / "environ").read_bytes().split(b"\0")
            except OSError:  # it has ended, or belongs to another user
                continue
            if belongs and _alive(int(entry.name)):
                found.append(int(entry.name))
        return found

    async def kill_node(self, node: str) -> tuple[float, int, int]:
        """Send SIGKILL to all processes of a node at once.

        Returns:
            When (seconds since 1970), how many processes there were, and how many still run.

        Raises:
            DemoFailed: the node has no process group of its own.
        """
        pids = _node_pids(self._folder, node)
        group = pids[0]
        # A node in the demo's own process group would take the demo with it.
        if os.getpgid(group) != group or group == os.getpgid(0):
            raise DemoFailed(
                f"node {node} is not a process group of its own: it cannot be killed as a node"
            )
        members = [pid for pid in self.processes() if _group_of(pid) == group]
        os.killpg(group, signal.SIGKILL)
        killed_at = time.time()
        left = await _wait_gone(lambda: [pid for pid in {*members, *pids} if _alive(pid)])
        return killed_at, len(members), len(left)

    async def _until_ready(self, up: asyncio.subprocess.Process) -> None:
        assert up.stdout is not None
        while line := await up.stdout.readline():
            event = json.loads(line)
            if event["event"] == "ready":
                return
            detail = ", ".join(f"{key} {value}" for key, value in event.items() if key != "event")
            self._echo(f"{event['event'].replace('_', ' ')}: {detail}")
        await up.wait()
        raise DemoFailed(
            f"the cluster did not start: {self._log.read_text(errors='replace').strip()}"
        )


async def _wait_gone(living: Callable[[], list[int]]) -> list[int]:
    """Wait at most GONE_TIMEOUT_S until ``living`` finds no process; returns what it found last."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while True:
        left = living()
        if not left or time.monotonic() >= deadline:
            return left
        await asyncio.sleep(POLL_INTERVAL_S)


def _node_pids(folder: Path, node: str) -> list[int]:
    """Process ids of a node, the agent's own first."""
    values = node_processes(folder, node)
    return [values.pop("agent"), *values.values()]


def node_processes(folder: Path, node: str) -> dict[str, int]:
    """Process ids of a node from its agent's pids.json, by role: agent, rank-2 and others.

    Raises:
        DemoFailed: the file cannot be read.
    """
    file = folder / "nodes" / node / "pids.json"
    try:
        values: dict[str, int] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DemoFailed(f"{file}: cannot be read: {error}") from None
    return values


def _alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1

"""The demos' cluster: `megascale up` as a child process, its nodes' processes, its dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from megascale_client.run_folder import read_token

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 45.0
GONE_TIMEOUT_S = 10.0
PAGE_TIMEOUT_S = 20.0
POLL_INTERVAL_S = 0.05
RUN_S = 0.004  # of a slowed process between two stops: less than any forward of the demo's job
CLUSTER = "demo"
# Set in the environment of every process of one demo, and of no other process.
MARK_VARIABLE = "MEGASCALE_DEMO_ID"
# Processes of megascale that find this variable exit when that process exits.
PARENT_PID_VARIABLE = "MEGASCALE_PARENT_PID"
_MARKER_FILE = ".megascale-demo"

Echo = Callable[[str], None]  # prints rich markup


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterPlan:
    """What a cluster is started with."""

    device: Literal["cpu", "cuda"]
    nodes: int
    devices_per_node: int


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
        up = folder / "up.json"
        if not (folder / _MARKER_FILE).exists():
            raise DemoFailed(
                f"{folder} is not empty and no demo wrote it: choose another --run-folder"
            )
        if up.exists() and _alive(json.loads(up.read_text())["pid"]):
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
    pipe = asyncio.subprocess.PIPE
    command = megascale(*arguments, "--json")
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
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
        self, plan: ClusterPlan, folder: Path, echo: Echo, *options: str, dashboard: bool = False
    ) -> None:
        self._plan = plan
        self._options = (*options, "--dashboard" if dashboard else "--no-dashboard")
        self._folder = folder
        self._echo = echo
        self._mark = uuid.uuid4().hex
        self._up: asyncio.subprocess.Process | None = None
        self._log = folder / "up.log"

    async def start(self) -> None:
        """Start the cluster and wait until all its nodes are alive. Raises DemoFailed."""
        variables = {MARK_VARIABLE: self._mark, PARENT_PID_VARIABLE: str(os.getpid())}
        options = {
            "--cluster": CLUSTER,
            "--nodes": self._plan.nodes,
            "--device": self._plan.device,
            "--devices-per-node": self._plan.devices_per_node,
            "--run-folder": self._folder,
        }
        arguments = [str(part) for option in options.items() for part in option]
        with self._log.open("wb") as log:
            self._up = await asyncio.create_subprocess_exec(
                *megascale("up", "--json", *arguments, *self._options),
                env={**os.environ, **variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        try:
            await asyncio.wait_for(self._until_ready(), START_TIMEOUT_S)
        except TimeoutError:
            raise DemoFailed(
                f"the cluster was not ready after {START_TIMEOUT_S:g} s; see {self._folder}"
            ) from None

    async def _until_ready(self) -> None:
        async for event in self._events():
            if event["event"] == "ready":
                return
            detail = ", ".join(f"{key} {value}" for key, value in event.items() if key != "event")
            self._echo(f"{event['event'].replace('_', ' ')}: {detail}")
        log = self._log.read_text(errors="replace").strip()
        raise DemoFailed(f"the cluster did not start: {log}")

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        """What `megascale up` prints, until it ends."""
        assert self._up is not None and self._up.stdout is not None
        while line := await asyncio.wait_for(self._up.stdout.readline(), START_TIMEOUT_S):
            yield json.loads(line)
        await self._up.wait()

    async def dashboard(self) -> Dashboard | None:
        """The cluster's dashboard; None where it is not installed. Raises DemoFailed."""
        async for event in self._events():
            if event["event"] == "dashboard_ready":
                return Dashboard(str(event["url"]), self._folder)
            if event["event"] == "dashboard_absent":
                self._echo(f"no dashboard: {event['remedy']}")
                return None
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
        for entry in Path("/proc").glob("[0-9]*"):
            # It may have ended, or belong to another user.
            with contextlib.suppress(OSError):
                belongs = needle in (entry / "environ").read_bytes().split(b"\0")
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
        pids = node_processes(self._folder, node)
        group = pids["agent"]
        # A node in the demo's own process group would take the demo with it.
        if os.getpgid(group) != group or group == os.getpgid(0):
            raise DemoFailed(
                f"node {node} is not a process group of its own: it cannot be killed as a node"
            )
        members = [pid for pid in self.processes() if _group_of(pid) == group]
        os.killpg(group, signal.SIGKILL)
        killed_at = time.time()
        concerned = {*members, *pids.values()}
        left = await _wait_gone(lambda: [pid for pid in concerned if _alive(pid)])
        return killed_at, len(members), len(left)


async def _wait_gone(living: Callable[[], list[int]]) -> list[int]:
    """Wait at most GONE_TIMEOUT_S until ``living`` finds no process; returns what it found last."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while True:
        left = living()
        if not left or time.monotonic() >= deadline:
            return left
        await asyncio.sleep(POLL_INTERVAL_S)


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


def send(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process. Raises DemoFailed if it has ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        raise DemoFailed(f"process {pid} has ended before {number.name}") from None


@contextlib.asynccontextmanager
async def slowed(pid: int, stopped_s: float) -> AsyncIterator[None]:
    """While the body runs, the process is stopped for ``stopped_s`` after each RUN_S.

    It then computes at a fraction of its speed, as on a slow host; the trainer has no part in it.
    """

    async def pulses() -> None:
        while True:
            send(pid, signal.SIGSTOP)
            await asyncio.sleep(stopped_s)
            with contextlib.suppress(DemoFailed):
                send(pid, signal.SIGCONT)
            await asyncio.sleep(RUN_S)

    task = asyncio.create_task(pulses())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        with contextlib.suppress(DemoFailed):
            send(pid, signal.SIGCONT)


class Dashboard:
    """The dashboard of the cluster in ``folder``; ``url`` has a key that logs a browser in."""

    def __init__(self, url: str, folder: Path) -> None:
        self._parts = urlsplit(url)
        self._folder = folder

    def link(self, path: str) -> str:
        """The link of a page, for a browser."""
        return urlunsplit(self._parts._replace(path=path))

    async def read(self, path: str) -> dict[str, Any]:
        """What the page at ``path`` shows. Raises DemoFailed if it does not answer."""
        url = urlunsplit(self._parts._replace(path=f"{path}.json", query=""))
        token = read_token(self._folder)
        request = Request(url, headers={"authorization": f"Bearer {token}"})

        def read() -> dict[str, Any]:
            with urlopen(request, timeout=PAGE_TIMEOUT_S) as answer:
                page: dict[str, Any] = json.load(answer)
            return page

        try:
            return await asyncio.to_thread(read)
        except (OSError, ValueError) as error:
            raise DemoFailed(f"the dashboard's page {path} cannot be read: {error}") from None

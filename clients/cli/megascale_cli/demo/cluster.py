"""The demos' cluster: `megascale up` as a child process, its nodes' processes, its dashboard."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from urllib.request import Request, urlopen

from megascale_client.run_folder import is_held, read_token

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 45.0
GONE_TIMEOUT_S = 10.0
PAGE_TIMEOUT_S = 20.0
POLL_INTERVAL_S = 0.05
RUN_S = 0.004  # of a slowed process between two stops: less than any forward of the demo's job
# Set in the environment of every process of one demo, and of no other process.
MARK_VARIABLE = "MEGASCALE_DEMO_ID"
# Processes of megascale that find this variable exit when that process exits.
PARENT_PID_VARIABLE = "MEGASCALE_PARENT_PID"
_MARKER_FILE = ".megascale-demo"

Echo = Callable[[str], None]  # prints rich markup


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
        if is_held(folder):
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
    command = megascale(*arguments, "--json")
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
    if done.returncode != 0:
        problem = done.stderr.strip()
        raise DemoFailed(f"`megascale {' '.join(arguments[:2])}` failed: {problem}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


class DemoCluster:
    """`megascale up` with ``options``, and all processes that it starts."""

    def __init__(self, folder: Path, echo: Echo, *options: object) -> None:
        where = ("--cluster", "demo", "--run-folder", folder, "--no-dashboard")
        self._command = megascale("up", "--json", *map(str, (*where, *options)))
        self._folder = folder
        self._echo = echo
        self._mark = uuid.uuid4().hex
        self._up: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the cluster and wait until all its nodes are alive. Raises DemoFailed."""
        variables = {MARK_VARIABLE: self._mark, PARENT_PID_VARIABLE: str(os.getpid())}
        with (self._folder / "up.log").open("wb") as log:
            self._up = await asyncio.create_subprocess_exec(
                *self._command,
                env={**os.environ, **variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        await self._event("ready")

    async def _event(self, *names: str) -> dict[str, Any]:
        """The first of these events of `megascale up`; prints those before. Raises DemoFailed."""
        assert self._up is not None and self._up.stdout is not None
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                while line := await self._up.stdout.readline():
                    event: dict[str, Any] = json.loads(line)
                    if event["event"] in names:
                        return event
                    kind = event.pop("event").replace("_", " ")
                    detail = ", ".join(f"{key} {value}" for key, value in event.items())
                    self._echo(f"{kind}: {detail}")
        except TimeoutError:
            raise DemoFailed(
                f"the cluster was not ready after {START_TIMEOUT_S:g} s; see {self._folder}"
            ) from None
        log = (self._folder / "up.log").read_text(errors="replace").strip()
        raise DemoFailed(f"the cluster did not start: {log}")

    async def dashboard(self) -> str:
        """The dashboard's address with a key that logs a browser in; "" where it is not installed.

        Raises:
            DemoFailed: it did not start.
        """
        event = await self._event("dashboard_ready", "dashboard_absent", "dashboard_failed")
        if event["event"] == "dashboard_failed":
            raise DemoFailed(f"the dashboard did not start; see {self._folder / 'dashboard.log'}")
        if event["event"] == "dashboard_absent":
            self._echo(f"no dashboard: {event['remedy']}")
        return str(event.get("url", ""))

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
        left = await _wait_gone(lambda: list(self._processes()))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return len(left)

    def _processes(self) -> dict[int, int]:
        """Process groups of the running processes of this demo's cluster, by process id."""
        needle = f"{MARK_VARIABLE}={self._mark}".encode()
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            # It may have ended, or belong to another user.
            with contextlib.suppress(OSError):
                belongs = needle in (entry / "environ").read_bytes().split(b"\0")
                group = _group(int(entry.name))
                if belongs and group is not None:
                    found[int(entry.name)] = group
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
        members = [pid for pid, its_group in self._processes().items() if its_group == group]
        os.killpg(group, signal.SIGKILL)
        killed_at = time.time()
        concerned = {*members, *pids.values()}
        left = await _wait_gone(lambda: [pid for pid in concerned if _group(pid) is not None])
        return killed_at, len(members), len(left)


async def _wait_gone(living: Callable[[], list[int]]) -> list[int]:
    """Wait at most GONE_TIMEOUT_S until ``living`` finds no process; returns what it found last."""
    deadline = time.monotonic() + GONE_TIMEOUT_S
    while (left := living()) and time.monotonic() < deadline:  # noqa: ASYNC110 - polls /proc
        await asyncio.sleep(POLL_INTERVAL_S)
    return left


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


def _group(pid: int) -> int | None:
    """The group of a process; None once it has ended, as a zombie has."""
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return None if state in "ZX" else int(group)


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


def page_link(dashboard: str, path: str) -> str:
    """The link of a page, for a browser."""
    return urlunsplit(urlsplit(dashboard)._replace(path=path))


async def read_page(dashboard: str, folder: Path, path: str) -> dict[str, Any]:
    """What a page of the dashboard shows. Raises DemoFailed if it does not answer."""
    url = urlunsplit(urlsplit(dashboard)._replace(path=f"{path}.json", query=""))
    request = Request(url, headers={"authorization": f"Bearer {read_token(folder)}"})
    try:
        with await asyncio.to_thread(urlopen, request, timeout=PAGE_TIMEOUT_S) as answer:
            page: dict[str, Any] = json.load(answer)
    except (OSError, ValueError) as error:
        raise DemoFailed(f"the dashboard's page {path} cannot be read: {error}") from None
    return page

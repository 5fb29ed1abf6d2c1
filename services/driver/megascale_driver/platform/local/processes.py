"""Child processes of `megascale up`: process groups, log files, stop and kill; the dashboard."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megascale_common.node.process import child_environment

POLL_INTERVAL_S = 0.05
LOG_TAIL_BYTES = 2000


def stop_event() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set from now on, instead of ending this process."""
    event = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


class Child:
    """A process that ends with this one, and that leads its own process group.

    One signal to the group ends it with all its children. Construct it in the main thread: the
    kernel sends the parent-death signal when the thread that spawned the child ends.
    """

    def __init__(self, name: str, command: Sequence[str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Append, because the lines before a restart explain it.
        with log_path.open("ab") as log:
            self._log_start_bytes = log.tell()
            self._process = subprocess.Popen(
                list(command),
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id, and id of the process group."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Exit status, or minus the signal's number; None while it runs."""
        return self._process.poll()

    async def stop(self, timeout_s: float) -> None:
        """Send SIGTERM; when the process ends, or after ``timeout_s``, kill its whole group."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        if self._process.returncode is None:
            self._process.terminate()
        while not self._ended():
            if loop.time() >= deadline:
                break
            await asyncio.sleep(POLL_INTERVAL_S)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the whole group; returns when the process itself has ended."""
        # Note [Kill before reap]. Until a child is reaped, its id stays reserved, even if it has
        # ended. After that, another process can get the id. So the group is killed first and the
        # process reaped last; after reaping nothing is sent to the id.
        if self._process.returncode is not None:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def _ended(self) -> bool:
        """True if the process has ended; it is not reaped yet (Note [Kill before reap])."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def last_words(self) -> str:
        """A clause with the last line of the process's log, and the path of the log."""
        text = self.log_path.read_bytes()[self._log_start_bytes :]
        lines = text[-LOG_TAIL_BYTES:].decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing")
        return f"its log {self.log_path} ends with: {last}"


LOG_FILE = "dashboard.log"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
_NEEDED = ("megascale_dashboard", "starlette", "uvicorn")


class DashboardProcess:
    """The dashboard of the cluster in ``folder``; ``run()`` as a task, then ``stop()``.

    It is a separate process, so that its failure does not affect the cluster, and is started as a
    command, because no service imports a client. Its standard input is a pipe that only this
    process holds: when this process ends in any way, the pipe closes and the dashboard ends.

    Reports ``dashboard_ready`` with its link, ``dashboard_absent`` if it is not installed, or
    ``dashboard_failed`` with its log if it does not start or ends by itself.
    """

    def __init__(self, folder: Path, report: Callable[[str, dict[str, Any]], None]) -> None:
        self._folder = folder
        self._report = report
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Start the dashboard and report its link; returns when it has ended."""
        if not all(importlib.util.find_spec(name) for name in _NEEDED):
            self._report("dashboard_absent", {"remedy": "pip install 'megascale[dashboard]'"})
            return
        log_path = self._folder / LOG_FILE
        with log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "megascale_dashboard",
                "--json",
                "--end-with-stdin",
                "--cluster",
                str(self._folder),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # so that Ctrl-C in the terminal only reaches this process
            )
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), START_TIMEOUT_S)
        except TimeoutError:
            line = b""
        if line:
            self._report("dashboard_ready", {"url": json.loads(line)["url"]})
            await self._process.wait()
        self._report("dashboard_failed", {"log": str(log_path)})

    async def stop(self) -> None:
        """Close the dashboard's standard input, and kill it if it does not end in time."""
        if self._process is None or self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

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
    """An event that SIGINT and SIGTERM set from now on, in place of ending this process."""
    event = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, event.set)
    return event


class Child:
    """A process that ends with this one and leads a process group of its own.

    One signal to the group ends it with all its children. Construct it in the main thread, because
    the parent-death signal is sent when the thread that spawned the child ends.
    """

    def __init__(self, name: str, command: Sequence[str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Append: the lines before a restart explain the restart.
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
        """Process id, which is also the id of the group."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Exit status, or minus the signal's number; None while it runs."""
        return self._process.poll()

    async def stop(self, timeout_s: float) -> None:
        """SIGTERM to the process; once it ends, or after ``timeout_s``, SIGKILL to its group."""
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
        """SIGKILL to the whole group; returns when the process itself has ended."""
        # Once the process is reaped, its id may belong to another; until then it is the child's,
        # even if the child has ended. So the group is killed first and the process reaped last.
        if self._process.returncode is not None:
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def _ended(self) -> bool:
        """Whether the process has ended; it is not reaped, so its group can still be killed."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def last_words(self) -> str:
        """The last line that this process wrote to its log, and where the others are."""
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

    Reports ``dashboard_ready`` with its link, ``dashboard_absent`` where it is not installed, or
    ``dashboard_failed`` with its log, when it does not start or ends by itself.
    """

    def __init__(self, folder: Path, report: Callable[[str, dict[str, Any]], None]) -> None:
        self._folder = folder
        self._report = report
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Start it and report its link; returns when it has ended."""
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
                start_new_session=True,  # Ctrl-C in the terminal is for this process
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
        """End it: at once where it does not end by itself in time."""
        if self._process is None or self._process.returncode is not None:
            return
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

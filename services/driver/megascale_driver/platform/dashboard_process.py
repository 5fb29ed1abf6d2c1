"""The dashboard of a local cluster: a process beside it, whose failure costs the cluster nothing.

It is started as a command because no service imports a client. Its standard input is a pipe that
only this process holds: when this process ends, however it ends, the pipe does, and the dashboard.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOG_FILE = "dashboard.log"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 5.0
_NEEDED = ("megascale_dashboard", "starlette", "uvicorn")


class DashboardProcess:
    """The dashboard of the cluster in ``folder``; ``run()`` as a task, then ``stop()``.

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

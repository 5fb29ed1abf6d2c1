"""One child process of `megascale up`: its process group, its log file, stop and kill."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from megascale_common.node.process import child_environment

POLL_INTERVAL_S = 0.05
LOG_TAIL_BYTES = 2000


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

"""A real `megascale up` as a child process, for tests that need a whole cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.harness.processes import ended

MARK_VARIABLE = "MEGASCALE_TEST_ID"
READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 40.0
POLL_INTERVAL_S = 0.05


def megascale(*arguments: str, cwd: Path | None = None, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run a command of the CLI to its end."""
    return subprocess.run(
        [sys.executable, "-m", "megascale_cli", *arguments],
        env={**os.environ, "COLUMNS": "200"},  # no message is broken in two
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=timeout_s,
        check=False,
    )


def until(condition: Any, timeout_s: float, what: str) -> Any:
    """Wait until ``condition()`` is true and return its value; AssertionError naming ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(POLL_INTERVAL_S)
    return value


class UpProcess:
    """`megascale up` with ``options``, in ``folder``; use as a context manager: on the way out everything is ended."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder = folder
        self._mark = uuid.uuid4().hex
        self._output = folder.with_name(folder.name + ".up.jsonl")
        self._errors = folder.with_name(folder.name + ".up.log")
        command = [sys.executable, "-m", "megascale_cli", "up", "--json", "--run-folder", str(folder), *options]
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, MARK_VARIABLE: self._mark, "MEGASCALE_PARENT_PID": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        try:
            until(lambda: self.seen("ready") or self.process.poll() is not None, READY_TIMEOUT_S, "cluster ready")
            assert self.seen("ready"), self._errors.read_text()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)

    def seen(self, event: str) -> list[dict[str, Any]]:
        """What `up` has reported under this name."""
        lines = [json.loads(line) for line in self._output.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        return [line for line in lines if line["event"] == event]

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Send a signal to `up` and wait for its end; its exit status."""
        self.process.send_signal(signal_number)
        return self.process.wait(STOP_TIMEOUT_S)

    @property
    def state(self) -> dict[str, Any]:
        """up.json."""
        values: dict[str, Any] = json.loads((self.folder / "up.json").read_text())
        return values

    def node_pids(self, node: str) -> dict[str, int]:
        """Process ids of a node by role, as its agent wrote them."""
        values: dict[str, int] = json.loads((self.folder / "nodes" / node / "pids.json").read_text())
        return values

    def kill_node(self, node: str) -> float:
        """SIGKILL to the whole process group of a node; when, in seconds since 1970."""
        group = self.node_pids(node)["agent"]
        assert os.getpgid(group) == group
        os.killpg(group, signal.SIGKILL)
        return time.time()

    def processes(self) -> list[int]:
        """Living processes of this cluster, `up` included."""
        needle = f"{MARK_VARIABLE}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                belongs = entry.name.isdecimal() and needle in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if belongs and not ended(int(entry.name)):
                found.append(int(entry.name))
        return found

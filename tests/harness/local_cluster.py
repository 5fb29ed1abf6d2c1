"""A real `megascale up` as a child process, for tests that need a whole cluster."""

from __future__ import annotations

import contextlib
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

from tests.harness import program_start
from tests.harness.paced import python_path
from tests.harness.processes import cpu_ticks, ended
from tests.harness.waiting import log_bytes, until

from megascale.v1 import driver_pb2, types_pb2
from megascale_client import TERMINAL_PHASES, Client, NotPossible

MARK_VARIABLE = "MEGASCALE_TEST_ID"
END_REASON = "the test is over"


def megascale(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command of the CLI until it ends, within the timeout of the test."""
    process = program_start.start(
        [sys.executable, "-m", "megascale_cli", *arguments],
        env={**os.environ, "COLUMNS": "200"},  # wide enough to break no message
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )
    output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


class UpProcess:
    """`megascale up` with ``options`` in ``folder``; as a context manager it ends all processes.

    Its jobs may have the optimizer of :mod:`tests.harness.paced`. ``executed``: its programs start
    as they do for users, and not by :mod:`tests.harness.program_start`.
    """

    def __init__(
        self, folder: Path, *options: str, dashboard: bool = False, executed: bool = False
    ) -> None:
        self.folder, self.site = folder, folder.with_name(folder.name + ".site")
        self.mark = uuid.uuid4().hex
        self._marked = {
            **os.environ,
            "PYTHONPATH": python_path(self.site),
            MARK_VARIABLE: self.mark,
        }
        self._output = folder.with_name(folder.name + ".up.jsonl")
        self._errors = folder.with_name(folder.name + ".up.log")
        command = [
            sys.executable,
            "-m",
            "megascale_cli",
            "up",
            "--json",
            "--run-folder",
            str(folder),
            *([] if dashboard else ["--no-dashboard"]),
            *options,
        ]
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            starts = subprocess.Popen if executed else program_start.start
            self.process: subprocess.Popen[bytes] = starts(
                command,
                env={**self._marked, "MEGASCALE_PARENT_PID": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        try:
            until(
                lambda: self.seen("ready") or self.process.poll() is not None,
                "cluster ready",
                self._starts,
            )
            assert self.seen("ready"), self._errors.read_text()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, signal.SIGKILL)

    def beside(self, *arguments: str) -> subprocess.Popen[str]:
        """A command of the CLI as a process that counts as one of this cluster."""
        return program_start.start(
            [sys.executable, "-m", "megascale_cli", *arguments],
            env={**self._marked, "COLUMNS": "200"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def seen(self, event: str) -> list[dict[str, Any]]:
        """The events of this name that `up` has printed."""
        lines = [
            json.loads(line)
            for line in self._output.read_text().splitlines(keepends=True)
            if line[-1] == "\n"
        ]
        return [line for line in lines if line["event"] == event]

    def _starts(self) -> tuple[object, ...]:
        """Progress of a cluster that starts: reports, logs, and CPU time of imports."""
        return self._output.stat().st_size, log_bytes(self.folder), cpu_ticks(self.processes())

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        """Send a signal to `up` and wait for it to end; returns its exit status."""
        self.process.send_signal(signal_number)
        until(lambda: self.process.poll() is not None, "the end of `megascale up`", self.processes)
        return self.process.wait()

    @property
    def state(self) -> dict[str, Any]:
        """up.json."""
        values: dict[str, Any] = json.loads((self.folder / "up.json").read_text())
        return values

    def node_pids(self, node: str) -> dict[str, int]:
        """Process ids of a node by role, as its agent wrote them."""
        values: dict[str, int] = json.loads(
            (self.folder / "nodes" / node / "pids.json").read_text()
        )
        return values

    def kill_node(self, node: str) -> float:
        """Send SIGKILL to a node's process group; returns when, in seconds since 1970."""
        group = self.node_pids(node)["agent"]
        assert os.getpgid(group) == group
        os.killpg(group, signal.SIGKILL)
        return time.time()

    def processes(self) -> list[int]:
        """Running processes of this cluster, including `up`."""
        return processes_marked(self.mark)


def processes_marked(mark: str) -> list[int]:
    """Running processes whose environment has MARK_VARIABLE with this value."""
    needle = f"{MARK_VARIABLE}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            belongs = entry.name.isdecimal() and needle in (entry / "environ").read_bytes().split(
                b"\0"
            )
        except OSError:
            continue
        if belongs and not ended(int(entry.name)):
            found.append(int(entry.name))
    return found


def settle(folder: Path) -> set[str]:
    """End every job of the cluster in this run folder and wait until its nodes run nothing.

    Returns:
        The nodes that could take the next job.
    """
    with Client.from_run_folder(folder) as client:

        def unfinished() -> list[str]:
            return [job.spec.name for job in client.jobs() if job.phase not in TERMINAL_PHASES]

        for name in unfinished():
            with contextlib.suppress(NotPossible):  # it has ended since it was listed
                client.cancel(name, reason=END_REASON)

        def state() -> object:
            return unfinished(), [(node.name, node.job, node.liveness) for node in client.nodes()]

        def free() -> bool:
            return not unfinished() and not any(node.job for node in client.nodes())

        until(free, "the cluster runs nothing", state)
        return {node.name for node in client.nodes() if _takes_jobs(node)}


def _takes_jobs(node: driver_pb2.Node) -> bool:
    alive = node.liveness == types_pb2.NODE_LIVENESS_ALIVE
    return alive and node.disposition == types_pb2.NODE_DISPOSITION_SCHEDULABLE

"""The demos' cluster: `megascale up` as a child process, and faults of its processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megascale_client.run_folder import is_held

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 45.0
GONE_TIMEOUT_S = 10.0
POLL_S = 0.05
RUN_S = 0.004  # of a slowed process between two stops: less than any forward of the demo's job
_MARKER_FILE = ".megascale-demo"

Echo = Callable[[str], None]  # prints rich markup


class DemoFailed(Exception):
    """The demo did not show what it must; the message has the reason."""


def megascale(*arguments: object) -> list[str]:
    """The command line of this CLI, with the interpreter that runs now."""
    return [sys.executable, "-m", "megascale_cli", *map(str, arguments)]


def run_command(*arguments: object) -> dict[str, Any]:
    """The JSON object that a command of this CLI prints. Raises DemoFailed with its error."""
    line = megascale(*arguments, "--json")
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        command = " ".join(map(str, arguments[:2]))
        raise DemoFailed(f"`megascale {command}` failed: {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def fresh_folder(folder: Path) -> None:
    """Remove what an earlier demo left in ``folder``. Raises DemoFailed for files of others."""
    marker = folder / _MARKER_FILE
    if folder.exists() and any(folder.iterdir()):
        other = "choose another --run-folder"
        if not marker.exists():
            raise DemoFailed(f"{folder} is not empty and no demo wrote it: {other}")
        if is_held(folder):
            raise DemoFailed(f"a demo still runs in {folder}: wait until it ends or {other}")
        shutil.rmtree(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    marker.touch()


class DemoCluster:
    """`megascale up` with ``options``, and all processes that it starts."""

    def __init__(self, folder: Path, echo: Echo, *options: object) -> None:
        named = ("--cluster", "demo", "--run-folder", folder)
        self._command = megascale("up", "--json", *named, *options)
        self._folder = folder
        self._echo = echo
        # In the environment of every process of this cluster, and of no other.
        self._mark = f"MEGASCALE_DEMO_ID={uuid.uuid4().hex}"
        self._up: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the cluster and wait until all its nodes are alive. Raises DemoFailed."""
        name, _, value = self._mark.partition("=")
        # Processes of megascale that find the second variable exit when that process exits.
        variables = {name: value, "MEGASCALE_PARENT_PID": str(os.getpid())}
        with (self._folder / "up.log").open("w") as log:
            self._up = subprocess.Popen(
                self._command,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self.event("ready")

    def event(self, *names: str) -> dict[str, Any]:
        """The first of these events of `megascale up`; prints those before. Raises DemoFailed."""
        assert self._up is not None and self._up.stdout is not None
        timer = threading.Timer(START_TIMEOUT_S, self._up.kill)
        timer.start()
        try:
            while line := self._up.stdout.readline():
                event: dict[str, Any] = json.loads(line)
                if event["event"] in names:
                    return event
                kind = event.pop("event").replace("_", " ")
                self._echo(f"{kind}: " + ", ".join(f"{key} {event[key]}" for key in event))
        finally:
            timer.cancel()
        log = (self._folder / "up.log").read_text(errors="replace").strip()
        raise DemoFailed(f"no {' or '.join(names)} of the cluster; see {self._folder}: {log}")

    def stop(self) -> int:
        """Stop the cluster in order, then kill what is left; returns how many were killed."""
        if self._up is None:
            return 0
        self._up.terminate()
        try:
            self._up.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._up.kill()
            self._up.wait()
        left = _wait_gone(lambda: list(self._processes()))
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return len(left)

    def kill_node(self, node: str) -> tuple[float, int, int]:
        """Send SIGKILL to all processes of a node at once. Raises DemoFailed.

        Returns:
            When (seconds since 1970), how many processes there were, and how many still run.
        """
        pids = node_processes(self._folder, node)
        group = pids["agent"]  # it leads a process group of its own
        members = [pid for pid, its_group in self._processes().items() if its_group == group]
        os.killpg(group, signal.SIGKILL)
        killed_at, concerned = time.time(), {*members, *pids.values()}
        left = _wait_gone(lambda: [pid for pid in concerned if _group(pid) is not None])
        return killed_at, len(members), len(left)

    def _processes(self) -> dict[int, int]:
        """Groups of the running processes of this cluster, by process id."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            # It may have ended, or belong to another user.
            with contextlib.suppress(OSError):
                belongs = self._mark.encode() in (entry / "environ").read_bytes().split(b"\0")
                if belongs and (group := _group(int(entry.name))) is not None:
                    found[int(entry.name)] = group
        return found


def _wait_gone(living: Callable[[], list[int]]) -> list[int]:
    """Wait at most GONE_TIMEOUT_S until ``living`` finds no process; returns what it found last."""
    deadline_s = time.monotonic() + GONE_TIMEOUT_S
    while (left := living()) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return left


def _group(pid: int) -> int | None:
    """The group of a process; None once it has ended, as a zombie has."""
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return None
    return None if state in "ZX" else int(group)


def node_processes(folder: Path, node: str) -> dict[str, int]:
    """Process ids by role (agent, rank-2) from the agent's pids.json. Raises DemoFailed."""
    file = folder / "nodes" / node / "pids.json"
    try:
        values: dict[str, int] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DemoFailed(f"{file}: cannot be read: {error}") from None
    return values


@contextlib.contextmanager
def slowed(pid: int, stopped_s: float) -> Iterator[None]:
    """While the body runs, the process is stopped for ``stopped_s`` after each RUN_S.

    It then computes at a fraction of its speed, as on a slow host; the trainer has no part in it.
    """
    over = threading.Event()

    def pulses() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.wait(RUN_S):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(stopped_s)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=pulses)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

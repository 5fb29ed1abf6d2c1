"""The checkpoint daemon in a container of its own lives and ends as a child of the agent would."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.processes import until_gone
from tests.harness.waiting import CALL_TIMEOUT_S, eventually, until

from megascale_checkpoint.serve import sidecar
from megascale_common.node.process import child_environment


class Pod:
    """The two containers, as far as the daemon is concerned."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.folder, self.socket = folder, sockets / "sidecar"
        self.address = folder / "checkpoint.address"
        (folder / "token").write_text("a-token-of-this-test-alone")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.options = [
            *("--cluster", "test", "--node", "n1", "--incarnation", "i1"),
            *("--run-folder", str(folder), "--socket", str(sockets / "daemon")),
            *("--token-file", str(folder / "token"), "--address-file", str(self.address)),
            *("--staging-folder", str(folder / "staging")),
        ]

    def start(self, *module_and_options: str) -> subprocess.Popen[bytes]:
        """A process of `python -m`."""
        with (self.folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *module_and_options],
                env=child_environment(),
                stdout=log,
                stderr=log,
            )
        self.processes.append(process)
        return process

    def sidecar(self) -> subprocess.Popen[bytes]:
        """The other container."""
        return self.start("megascale_checkpoint.serve.sidecar", "--socket", str(self.socket))

    def stand_in(self) -> subprocess.Popen[bytes]:
        """What the agent starts."""
        module = "megascale_executor.agent.checks.remote_daemon"
        return self.start(module, "--socket", str(self.socket), "--", *self.options)

    def daemon(self) -> int:
        """The daemon's process id, once it serves."""
        story = (self.folder / "log").read_text
        until(self.address.exists, "the daemon's address", story=story)
        (found,) = [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and str(self.address) in _command(entry)
            and "megascale_checkpoint" in _command(entry)
        ]  # fmt: skip
        self.address.unlink()
        return found


def _command(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    with tempfile.TemporaryDirectory(prefix="ms-", dir="/tmp") as sockets:
        made = Pod(tmp_path, Path(sockets))
        yield made
        for process in made.processes:
            process.kill()
            process.wait()


def test_the_daemon_ends_with_the_agent_and_starts_with_the_next(pod: Pod) -> None:
    first = pod.stand_in()  # it waits for the sidecar
    pod.sidecar()
    daemon = pod.daemon()
    first.kill()
    until_gone([daemon], "the daemon")
    pod.stand_in()
    assert pod.daemon() != daemon


def test_an_ended_daemon_is_seen_as_the_end_of_a_child(pod: Pod) -> None:
    pod.sidecar()
    killed = pod.stand_in()
    os.kill(pod.daemon(), signal.SIGKILL)
    assert killed.wait(60) == 128 + signal.SIGKILL
    asked = pod.stand_in()
    pod.daemon()
    asked.terminate()
    assert asked.wait(60) == 0, "SIGTERM is passed on, and the daemon ends as it should"
    pod.options += ["--no-such-option"]
    assert pod.stand_in().wait(60) == 2


def test_a_sidecar_that_is_stopped_stops_its_daemon_first(pod: Pod) -> None:
    sidecar, agent = pod.sidecar(), pod.stand_in()
    daemon = pod.daemon()
    sidecar.terminate()
    assert (sidecar.wait(60), agent.wait(60)) == (0, 0)
    until_gone([daemon], "the daemon")


def test_a_sidecar_that_is_killed_takes_its_daemon_along(pod: Pod) -> None:
    sidecar, agent = pod.sidecar(), pod.stand_in()
    daemon = pod.daemon()
    sidecar.kill()
    assert agent.wait(60) == 1
    until_gone([daemon], "the daemon")


async def test_a_caller_that_says_nothing_gives_way(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one waits for its end."""
    monkeypatch.setattr(sidecar, "HELLO_TIMEOUT_S", 0.2)
    serving = asyncio.create_task(sidecar.Sidecar(pod.socket, []).run())
    try:
        await eventually(pod.socket.exists, "the sidecar's socket")
        assert stat.S_IMODE(pod.socket.stat().st_mode) == 0o600
        async with asyncio.timeout(CALL_TIMEOUT_S):
            for _ in range(2):
                reader, writer = await asyncio.open_unix_connection(pod.socket)
                assert await reader.read() == b""
                writer.close()
    finally:
        serving.cancel()
        await asyncio.wait([serving])

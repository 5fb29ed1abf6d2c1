"""What cannot start ends with one sentence, its remedy and exit status 2 or 3, never a traceback.

Each case runs the real entry point: the first of each program is executed, the others are forked by
:mod:`tests.harness.program_start`. A case without root's privileges is always executed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.harness import program_start
from tests.harness.etcd import make_server

from megascale_common.etcd.errors import EtcdError
from megascale_common.etcd.server import PROGRAM_VARIABLE, EtcdServer
from megascale_common.node.process import child_environment
from megascale_common.service.identity import authority
from megascale_common.service.identity.peers import Role

UNREACHABLE_ETCD = "127.0.0.1:1"  # a port that refuses


@dataclass(frozen=True, slots=True)
class Place:
    """A folder with a good token, a token that is no text, a file, and a port that is in use."""

    folder: Path
    taken: str

    def fill(self, text: str) -> str:
        """``text`` with the names in it replaced."""
        return text.replace("FOLDER", str(self.folder)).replace("TAKEN", self.taken)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "token").write_text("x" * 32 + "\n")
    (tmp_path / "short").write_text("x\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe" * 20)
    (tmp_path / "file").write_text("a file\n")
    (tmp_path / "token-folder" / "token").mkdir(parents=True)
    (tmp_path / "etcd-file").mkdir()
    (tmp_path / "etcd-file" / "etcd").write_text("no folder\n")
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield Place(tmp_path, f"127.0.0.1:{holder.getsockname()[1]}")


def driver(place: Place, options: str) -> list[str]:
    """A driver's command line; an option that is given again replaces the one before."""
    common = (
        f"--cluster test --etcd {UNREACHABLE_ETCD} --token-file FOLDER/token "
        f"--address-file FOLDER/driver.address {options}"
    )
    return [sys.executable, "-m", "megascale_driver", *place.fill(common).split()]


def agent(place: Place, options: str) -> list[str]:
    """An agent's command line."""
    common = (
        "--cluster test --node n1 --driver 127.0.0.1:1 --token-file FOLDER/token --device cpu "
        f"--devices 0 --run-folder FOLDER/run --address-file FOLDER/agent.address {options}"
    )
    return [sys.executable, "-m", "megascale_executor.agent", *place.fill(common).split()]


def daemon(place: Place, options: str) -> list[str]:
    """A checkpoint daemon's command line."""
    common = (
        "--cluster test --node n1 --incarnation a --run-folder FOLDER --token-file FOLDER/token "
        "--socket FOLDER/daemon.sock --address-file FOLDER/daemon.address "
        f"--staging-folder FOLDER/staging {options}"
    )
    return [sys.executable, "-m", "megascale_checkpoint", *place.fill(common).split()]


def up(place: Place, options: str) -> list[str]:
    """A command line of `megascale up`."""
    common = f"--nodes 1 --devices-per-node 1 --device cpu --run-folder FOLDER/cluster {options}"
    return [sys.executable, "-m", "megascale_cli", "up", *place.fill(common).split()]


Command = Callable[[Place, str], list[str]]
# Command, options, exit status, words of the sentence.
CASES: list[tuple[Command, str, int, tuple[str, ...]]] = [
    (driver, "--bind TAKEN", 2, ("cannot listen on 127.0.0.1", "in use", "--bind")),
    (driver, "--bind 192.0.2.1:0", 2, ("192.0.2.1", "TLS")),
    (driver, "--bind nonsense", 2, ("nonsense", "--bind")),
    (driver, "--metrics-bind TAKEN", 2, ("cannot listen on 127.0.0.1", "--metrics-bind")),
    (driver, "", 3, (UNREACHABLE_ETCD, "5 s", "--etcd")),
    (driver, "--token-file FOLDER/absent", 2, ("FOLDER/absent", "does not exist")),
    (driver, "--tls-key FOLDER/file --tls-certificate FOLDER/file", 2, ("PEM", "--tls-key")),
    (agent, "--metrics-bind TAKEN", 2, ("cannot listen on 127.0.0.1", "--metrics-bind")),
    (agent, "--token-file FOLDER/absent", 2, ("FOLDER/absent", "does not exist")),
    (agent, "--cluster Bad_Name", 2, ("--cluster 'Bad_Name'",)),
    (agent, "--devices x", 2, ("--devices",)),
    (agent, "--run-folder FOLDER/file", 2, ("FOLDER/file", "folder")),
    (daemon, "--metrics-bind TAKEN", 2, ("cannot listen on 127.0.0.1", "--metrics-bind")),
    (daemon, "--socket FOLDER/absent/daemon.sock", 2, ("FOLDER/absent", "--socket")),
    (daemon, "--staging-folder FOLDER/file", 2, ("FOLDER/file",)),
    (up, "--run-folder /proc/nowhere", 2, ("/proc/nowhere", "--run-folder")),
    (up, "--run-folder FOLDER/file", 2, ("FOLDER/file", "--run-folder")),
    (up, "--run-folder FOLDER/token-folder", 2, ("FOLDER/token-folder/token", "directory")),
    (up, f"--etcd-endpoints {UNREACHABLE_ETCD}", 3, (UNREACHABLE_ETCD, "5 s")),
]
# Further options of the same entry points: `make test-slow`.
FURTHER: list[tuple[Command, str, int, tuple[str, ...]]] = [
    (driver, "--bind localhost", 2, ("HOST:PORT",)),
    (driver, "--bind 127.0.0.1:x", 2, ("127.0.0.1:x",)),
    (driver, "--cluster A_B", 2, ("A_B",)),
    (driver, "--heartbeat-interval-s 0", 2, ("--heartbeat-interval-s",)),
    (driver, "--hang-floor-s nan", 2, ("--hang-floor-s",)),
    (driver, "--etcd nonsense", 2, ("nonsense",)),
    (driver, "--metrics-bind 127.0.0.1", 2, ("--metrics-bind",)),
    (driver, "--metrics-bind 192.0.2.1:0", 2, ("192.0.2.1", "not of this host")),
    (driver, "--metrics-bind no.such.host.invalid:0", 2, ("no.such.host.invalid",)),
    (driver, "--etcd http://127.0.0.1:2379", 2, ("host:port", "--etcd")),
    (driver, "--token-file FOLDER", 2, ("FOLDER", "--token-file")),
    (driver, "--token-file FOLDER/short", 2, ("FOLDER/short", "at least 16")),
    (driver, "--token-file FOLDER/binary", 2, ("FOLDER/binary", "--token-file")),
    (driver, "--tls-key FOLDER/absent --tls-certificate FOLDER/file", 2, ("FOLDER/absent",)),
    (agent, "--host 192.0.2.1", 2, ("192.0.2.1", "TLS")),
    (agent, "--host 127.0.0.256", 2, ("127.0.0.256",)),
    (agent, "--token-file FOLDER/short", 2, ("FOLDER/short", "at least 16")),
    (agent, "--token-file FOLDER/binary", 2, ("FOLDER/binary", "--token-file")),
    (daemon, "--token-file FOLDER/absent", 2, ("FOLDER/absent", "does not exist")),
    (daemon, "--token-file FOLDER/binary", 2, ("FOLDER/binary", "--token-file")),
    (daemon, "--address-file FOLDER/absent/a", 2, ("FOLDER/absent", "--address-file")),
    (up, "--run-folder FOLDER/file/below", 2, ("FOLDER/file", "--run-folder")),
    (up, "--run-folder FOLDER/etcd-file", 2, ("FOLDER/etcd-file/etcd", "--run-folder")),
    (up, "--etcd-endpoints nonsense", 2, ("nonsense", "host:port")),
    (up, "--cluster Not_A_Name", 2, ("Not_A_Name",)),
]


def run(command: list[str], *, executed: bool = False) -> tuple[int, str, float]:
    """Exit status, stderr, and seconds that the command took."""
    begin = time.monotonic()
    starts = subprocess.Popen if executed else program_start.start
    process: subprocess.Popen[str] = starts(
        command,
        env={**child_environment(), "COLUMNS": "500"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, errors = process.communicate()
    return process.returncode, errors, time.monotonic() - begin


def one_sentence(errors: str) -> str:
    """The sentence that a command has ended with; what a service logs is JSON."""
    assert "Traceback" not in errors and "╭─" not in errors.split("Usage", maxsplit=1)[0], errors
    lines = [line for line in errors.splitlines() if not line.startswith(("{", "usage:", " "))]
    return lines[-1] if lines else ""


@pytest.mark.parametrize(
    ("command", "options", "status", "words"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER)],
    ids=[
        f"{command.__name__} {options or 'without etcd'}"
        for command, options, _, _ in (*CASES, *FURTHER)
    ],
)
def test_a_command_that_cannot_start_says_why(
    place: Place, command: Command, options: str, status: int, words: tuple[str, ...]
) -> None:
    first = next(options for each, options, _, _ in CASES if each is command)
    found, errors, seconds = run(command(place, options), executed=options == first)
    if "Usage" not in errors:  # the CLI's parser draws a box
        sentence = one_sentence(errors)
        assert all(place.fill(word) in sentence for word in words), errors
    assert found == status, errors
    assert all(place.fill(word) in errors for word in words), errors
    if status == 3:  # named within 5 s; the rest is the start of the interpreter
        assert seconds < 30, seconds


@pytest.mark.slow
def test_a_driver_on_an_address_of_another_host_names_it(place: Place) -> None:
    authority.create(place.folder / "tls", "test")
    tls = authority.issue(place.folder / "tls", "test", Role.DRIVER, "one")
    files = f"--tls-key {tls.key} --tls-certificate {tls.certificate}"
    status, errors, _ = run(driver(place, f"--bind 192.0.2.1:0 {files}"))
    assert status == 2 and "192.0.2.1" in one_sentence(errors)


def without_privilege() -> list[str]:
    """What to put before a command so that permissions of files hold for it, even for root."""
    if os.geteuid() != 0:
        return []
    program = shutil.which("setpriv")
    if program is None:
        pytest.skip("root without setpriv may read and write everything")
    return [program, "--bounding-set=-dac_override,-dac_read_search"]


LOCKED: list[tuple[str, Command, str, tuple[str, ...]]] = [
    ("cluster", up, "", ("FOLDER/cluster", "Permission denied", "--run-folder")),
    ("cluster", up, "--add-node", ("FOLDER/cluster/up.json", "Permission denied")),
    ("token", driver, "", ("FOLDER/token", "Permission denied", "--token-file")),
    ("run", agent, "", ("FOLDER/run/nodes/n1", "Permission denied", "--run-folder")),
    ("staging", daemon, "", ("FOLDER/staging", "--staging-folder")),
]
# What the same functions say in other programs.
LOCKED_FURTHER: list[tuple[str, Command, str, tuple[str, ...]]] = [
    ("cluster", up, "--run-folder FOLDER/cluster/below", ("FOLDER/cluster", "--run-folder")),
    ("token", agent, "", ("FOLDER/token", "Permission denied", "--token-file")),
    ("token", daemon, "", ("FOLDER/token", "Permission denied", "--token-file")),
]


@pytest.mark.parametrize(
    ("locked", "command", "options", "words"),
    [*LOCKED, *(pytest.param(*case, marks=pytest.mark.slow) for case in LOCKED_FURTHER)],
)
def test_a_missing_permission_is_named(
    place: Place, locked: str, command: Command, options: str, words: tuple[str, ...]
) -> None:
    path = place.folder / locked
    if locked != "token":
        path.mkdir()
        (path / "up.json").touch(mode=0)
    path.chmod(0o500 if path.is_dir() else 0)
    status, errors, _ = run([*without_privilege(), *command(place, options)], executed=True)
    sentence = one_sentence(errors)
    assert all(place.fill(word) in sentence for word in words), errors
    assert status == 2, errors


async def test_a_file_that_cannot_be_written_is_named(place: Place) -> None:
    async with make_server(place.folder / "data") as server:
        options = f"--etcd {server.endpoint} --address-file FOLDER/absent/address"
        status, errors, _ = run(driver(place, options))
    sentence = one_sentence(errors)
    assert status == 2 and "--address-file" in sentence, errors
    assert str(place.folder / "absent") in sentence


# What etcd 3.5.1 writes on a disk of 20 MiB, its stacks cut to a few lines.
NO_ROOM = """\
{"level":"warn","msg":"failed to preallocate an initial WAL file","error":"no space left on device"}
{"level":"panic","msg":"failed to create WAL","error":"no space left on device","stacktrace":"a"}
panic: failed to create WAL

goroutine 1 [running]:
go.uber.org/zap/zapcore.(*CheckedEntry).Write(0xc00011a780, 0xc0003e66c0, 0x1, 0x1)
main.main()
	/tmp/etcd/server/main.go:32 +0x45
"""


async def test_an_etcd_without_room_says_so_and_shows_no_stack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words").write_text(NO_ROOM + "\t/tmp/frame.go:1 +0x1\n" * 100)
    program = tmp_path / "etcd-that-ends"
    program.write_text(f"#!/bin/sh\ncat {tmp_path / 'words'} >&2\nexit 2\n")
    program.chmod(0o755)
    monkeypatch.setenv(PROGRAM_VARIABLE, str(program))
    with pytest.raises(EtcdError) as raised:
        await EtcdServer(tmp_path / "etcd").start()
    sentence = one_sentence(str(raised.value))
    assert "failed to create WAL: no space left on device" in sentence
    assert f"{tmp_path} has " in sentence and "make room there" in sentence
    assert "main.go" not in sentence and "goroutine" not in sentence

"""Clusters that are down, ports in use, etcd out of reach: each is a sentence and a status."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.harness.bad_jobs import good_job
from tests.harness.command_line import TRACEBACK, command
from tests.harness.etcd import etcd_server
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_cli.exits import REFUSED, UNAVAILABLE
from megascale_client import AsyncClient
from megascale_common.etcd.server import EtcdServer
from megascale_common.service.identity import authority
from megascale_common.service.identity.peers import Role

__all__ = ["etcd_server"]

RETRY_FOR_S = 0.2  # of every command here, so that each case is short
COMMANDS = (
    "jobs", "nodes", "cluster", "job a", "watch a", "explain a", "events", "logs a", "profile a",
    "submit job.yaml", "submit job.yaml --check", "cancel a --reason x", "checkpoint list a",
    "checkpoint fetch a --to copy", "diagnose n1", "cordon n1 --reason x", "evict n1 --reason x",
    "uncordon n1 --reason x", "events --follow",
)  # fmt: skip


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port of this machine on which nothing listens: it is taken, or another test may get it."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, silent_port: int) -> Path:
    """A run folder as a killed cluster leaves it: token and address, and no driver."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEGASCALE_RUN_FOLDER", str(tmp_path / "runs"))
    found = AsyncClient.from_run_folder
    monkeypatch.setattr(
        AsyncClient,
        "from_run_folder",
        lambda folder=None, **options: found(folder, **{**options, "retry_for_s": RETRY_FOR_S}),
    )
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "token").write_text("a-token-of-some-length\n")
    (tmp_path / "runs" / "driver.address").write_text(f"127.0.0.1:{silent_port}\n")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(good_job("good")))
    return tmp_path


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_cluster_that_is_down_is_reported_as_such(arguments: str, folder: Path) -> None:
    answer = command(*arguments.split())
    assert answer.status == UNAVAILABLE, answer.text
    assert "the cluster in " in answer.stderr and "is down" in answer.stderr
    assert "megascale up" in answer.stderr
    assert command(*arguments.split(), "--json").error["kind"] == "Unavailable"


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_run_folder_that_does_not_exist_is_named(arguments: str, folder: Path) -> None:
    answer = command(*arguments.split(), "--cluster", "nowhere")
    assert answer.status == UNAVAILABLE, answer.text
    assert "nowhere" in answer.stderr and "megascale up" in answer.stderr


@pytest.mark.parametrize(
    "address",
    ["", "\n", "nonsense", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:x", "no.such.host.invalid:1"],
)
def test_an_address_that_leads_nowhere_is_no_cluster(address: str, folder: Path) -> None:
    (folder / "runs" / "driver.address").write_text(address)
    answer = command("jobs")
    assert answer.status == UNAVAILABLE, answer.text
    assert "megascale up" in answer.stderr


@pytest.mark.parametrize("token", [b"", b"\n", b"\xff\xfe", b"a\nb", b"a\x00b"])
def test_a_damaged_token_is_named(token: bytes, folder: Path) -> None:
    (folder / "runs" / "token").write_bytes(token)
    answer = command("jobs")
    assert answer.status in (UNAVAILABLE, REFUSED), answer.text
    assert "runs/token" in answer.stderr


@pytest.mark.parametrize("name", ["token", "driver.address"])
def test_a_folder_in_the_place_of_a_file_is_reported(name: str, folder: Path) -> None:
    (folder / "runs" / name).unlink()
    (folder / "runs" / name).mkdir()
    answer = command("jobs")
    assert answer.status in (UNAVAILABLE, REFUSED), answer.text
    assert name in answer.stderr


@contextlib.contextmanager
def server(reply: bytes) -> Iterator[int]:
    """A server that answers every connection with ``reply``; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(1024)
                        connection.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(CALL_TIMEOUT_S)


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\n\r\nhello", b"\x00" * 64])
def test_a_port_of_something_else_is_no_cluster(reply: bytes, folder: Path) -> None:
    with server(reply) as port:
        (folder / "runs" / "driver.address").write_text(f"127.0.0.1:{port}")
        answer = command("jobs")
    assert answer.status == UNAVAILABLE, answer.text


def entry_point(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a service, or `megascale`, until it ends."""
    return subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=CALL_TIMEOUT_S,
        check=False,
    )


def is_one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    text = done.stdout + done.stderr
    assert done.returncode not in (0, None) and done.returncode > 0, text
    assert TRACEBACK not in text, text
    for word in words:
        assert word in text, text


def driver(folder: Path, etcd: str, *options: str) -> subprocess.CompletedProcess[str]:
    token = folder / "runs" / "token"
    return entry_point(
        "megascale_driver", "--cluster", "bad", "--etcd", etcd, "--token-file", token, *options
    )


@contextlib.contextmanager
def port_in_use() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as held:
        yield f"127.0.0.1:{held.getsockname()[1]}"


def test_a_driver_whose_port_is_in_use_names_it(folder: Path, etcd_server: EtcdServer) -> None:
    with port_in_use() as address:
        done = driver(folder, etcd_server.endpoint, "--bind", address)
        is_one_sentence(done, address, "in use")
        done = driver(folder, etcd_server.endpoint, "--metrics-bind", address)
        is_one_sentence(done, address, "in use")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--bind", "nonsense"), "nonsense"),
        (("--address-file", "/proc/nowhere/address"), "/proc/nowhere/address"),
        (("--etcd", ""), "--etcd"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (("--bind", "0.0.0.0:0"), "--tls-key"),
                (("--bind", "127.0.0.1:x"), "127.0.0.1:x"),
                (("--metrics-bind", "127.0.0.1"), "--metrics-bind"),
                (("--token-file", "nowhere"), "nowhere"),
                (("--cluster", "A_B"), "A_B"),
                (("--heartbeat-interval-s", "0"), "--heartbeat-interval-s"),
                (("--hang-floor-s", "nan"), "--hang-floor-s"),
                (("--etcd", "nonsense"), "nonsense"),
            )
        ),
    ],
    ids=lambda value: "-".join(value).strip("-") if isinstance(value, tuple) else "",
)
def test_a_driver_with_a_bad_option_names_it(
    options: tuple[str, ...], word: str, folder: Path, etcd_server: EtcdServer
) -> None:
    is_one_sentence(driver(folder, etcd_server.endpoint, *options), word)


@pytest.mark.slow
def test_a_driver_on_an_address_of_another_host_names_it(
    folder: Path, etcd_server: EtcdServer
) -> None:
    authority.create(folder / "tls", "bad")
    tls = authority.issue(folder / "tls", "bad", Role.DRIVER, "one")
    files = ("--tls-key", str(tls.key), "--tls-certificate", str(tls.certificate))
    found = driver(folder, etcd_server.endpoint, "--bind", "192.0.2.1:0", *files)
    is_one_sentence(found, "192.0.2.1")


@pytest.mark.slow
def test_an_etcd_out_of_reach_is_named(folder: Path, silent_port: int) -> None:
    endpoint = f"127.0.0.1:{silent_port}"
    is_one_sentence(driver(folder, endpoint), "etcd", endpoint)
    options = ("--etcd-endpoints", endpoint, "--nodes", "1", "--device", "cpu")
    done = entry_point("megascale_cli", "up", "--run-folder", folder / "new", *options)
    is_one_sentence(done, "etcd", endpoint)


@pytest.mark.parametrize(
    "place",
    [
        "/proc/nowhere",
        *(
            pytest.param(p, marks=pytest.mark.slow)
            for p in ("/dev/null/x", "job.yaml", "job.yaml/x")
        ),
    ],
)
def test_a_run_folder_that_cannot_be_made_is_named(place: str, folder: Path) -> None:
    done = entry_point("megascale_cli", "up", "--run-folder", place, "--nodes", "1")
    is_one_sentence(done, place)


def test_a_closed_pipe_ends_quietly(folder: Path) -> None:
    shell = f"{sys.executable} -m megascale_cli init --output - | head -1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1

"""Clusters that are down and files that are damaged: each is a sentence and a status."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.harness.bad_jobs import good_job
from tests.harness.command_line import command
from tests.harness.waiting import CALL_TIMEOUT_S

from megascale_cli.exits import REFUSED, UNAVAILABLE
from megascale_client import AsyncClient

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

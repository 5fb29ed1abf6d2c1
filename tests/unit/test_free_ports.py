"""Ports of servers that are started again: not those that the system gives to connections."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.harness import processes


def test_a_port_of_a_server_is_none_that_a_connection_may_get() -> None:
    lowest = processes._first_of_connections()
    if not lowest:
        pytest.skip("this system does not say which ports connections get")
    ports = {processes.free_port("127.0.0.1") for _ in range(20)}
    assert all(processes._LOWEST_PORT <= port < lowest for port in ports)


def test_two_servers_that_start_together_get_two_ports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = processes._LOWEST_PORT
    (tmp_path / "range").write_text(f"{first + 40}\t60999\n")  # as few as nearly clash by chance
    monkeypatch.setattr(processes, "_PORTS_OF_CONNECTIONS", tmp_path / "range")
    ports = [processes.free_port("127.0.0.1") for _ in range(15)]
    assert len(set(ports)) == 15


@pytest.mark.parametrize("text", ["", "none\n", "1024\t60999\n"])
def test_where_no_port_is_apart_the_system_chooses_one(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(processes, "_PORTS_OF_CONNECTIONS", tmp_path / "range")
    assert processes.free_port("127.0.0.1") > 1024

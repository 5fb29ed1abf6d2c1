"""torch's thread pool in a process that the template has forked."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from megascale_common.node import framing


def test_a_fork_renews_the_pool_before_its_program_starts_a_thread(tmp_path: Path) -> None:
    """Or the first backward aborts now and then, on hosts with several devices."""
    ours, theirs = socket.socketpair()
    agent, worker = socket.socketpair()
    command = [sys.executable, "-m", "tests.harness.template_of_threads", "--socket-fd"]
    with ours, theirs, agent, worker, (tmp_path / "log").open("wb") as log:
        number = theirs.fileno()
        with subprocess.Popen([*command, str(number)], pass_fds=[number], stderr=log):
            theirs.close()
            assert _next(ours)["kind"] == "hello"
            framing.send(ours, {"kind": "fork", "rank": 0}, [worker.fileno(), log.fileno()])
            framing.send(agent, {"kind": "look"})
            found = [_next(ours), _next(ours), _next(agent)]
            ours.close()  # it ends
    assert [each["kind"] for each in found] == ["forked", "exited", "seen"]
    assert found[1]["status"] == 0 and found[2]["renewed"], (tmp_path / "log").read_text()


def _next(end: socket.socket) -> framing.Message:
    received = framing.receive(end)
    assert received is not None
    return received[0]

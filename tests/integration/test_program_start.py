"""A program that a template forks is what the same command, executed, would be."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.processes import ended
from tests.harness.program_start import REPOSITORY, start
from tests.harness.waiting import until

from megascale_common.node.process import child_environment, stat_fields

# It becomes the program that follows, and has what it was given.
WRAPPED = (sys.executable, "-m", "megascale_common.node.process", "--")
LOOK = """
import json, os, sys
inherited = sorted(int(name) for name in os.listdir("/proc/self/fd"))
print(json.dumps({
    "arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ),
    "parent": os.getppid(), "group": os.getpgrp(), "session": os.getsid(0),
    "descriptors": inherited, "input": sys.stdin.read(),
}))
sys.exit(7)
"""


@pytest.mark.parametrize("new_session", [False, True])
def test_it_has_what_an_executed_program_has(tmp_path: Path, new_session: bool) -> None:
    reader, writer = os.pipe()
    seen = []
    for starts in (start, subprocess.Popen):
        process = starts(
            [*WRAPPED, sys.executable, "-c", LOOK, "one", "two words"],
            cwd=tmp_path,
            env=child_environment({"OWN": "value", "PYTHONPATH": str(REPOSITORY)}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[writer],
            start_new_session=new_session,
        )
        output, _ = process.communicate("given")
        assert process.returncode == 7
        found = json.loads(output)
        own = found["session"] == found["group"] == process.pid
        assert found["parent"] == os.getpid() and own == new_session
        del found["session"], found["group"]
        seen.append(found)
    os.close(reader)
    os.close(writer)
    forked, executed = seen
    assert forked == executed
    assert forked["arguments"] == ["one", "two words"] and forked["input"] == "given"


def test_the_process_table_shows_its_command_and_its_environment(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megascale_trainer.process", "--socket-fd", "0"]
    ours, theirs = socket.socketpair()  # it waits for orders, as long as ours is open
    environment = {**os.environ, "OWN": "value"}
    with ours, theirs, start(command, env=environment, stdin=theirs, cwd=tmp_path) as process:
        shown = Path(f"/proc/{process.pid}/cmdline").read_text().rstrip("\0").split("\0")
        variables = Path(f"/proc/{process.pid}/environ").read_text().split("\0")
        process.kill()
    assert shown == command and "OWN=value" in variables
    assert process.returncode == -signal.SIGKILL


@pytest.mark.parametrize("module", ["megascale_driver", "megascale_cli", "megascale_checkpoint"])
def test_its_words_and_its_status_are_the_same(module: str) -> None:
    wrong = [sys.executable, "-m", module, "--no-such-option"]
    seen = []
    for starts in (start, subprocess.Popen):
        process = starts(wrong, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        seen.append((*process.communicate(), process.returncode))
    assert seen[0] == seen[1] and seen[0][2] == 2


def test_what_it_starts_ends_with_it(tmp_path: Path) -> None:
    """An owner has a template of its own, whose forks are children of the owner."""
    options = ["--run-folder", str(tmp_path), "--nodes", "1", "--device", "cpu", "--no-dashboard"]
    command = [sys.executable, "-m", "megascale_cli", "up", *options, "--devices-per-node", "1"]
    with (tmp_path / "up.log").open("wb") as log:
        up = start(command, env=child_environment(), stdout=log, stderr=log)
    try:
        path = tmp_path / "nodes" / "n1" / "pids.json"
        roles = ("agent", "template", "checkpoint")

        def pids() -> dict[str, int]:
            found = json.loads(path.read_text()) if path.exists() else {}
            return found if all(found.get(role) for role in roles) else {}

        found = until(pids, "the processes of the node", (tmp_path / "up.log").read_bytes)
        agent = found["agent"]
        assert _parent(agent) == up.pid and os.getsid(agent) == agent
        assert {_parent(found[role]) for role in roles[1:]} == {agent}
    finally:
        up.kill()
        up.wait()
    until(lambda: all(ended(found[role]) for role in roles), "the end of all")


def _parent(pid: int) -> int:
    return int(stat_fields(pid)[1])

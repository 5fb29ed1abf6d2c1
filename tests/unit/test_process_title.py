"""The title of a worker, as the kernel shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from megascale_trainer.process.system import show_title
pid = os.fork()
if pid:
    os.waitpid(pid, 0)
else:
    show_title(sys.argv[1], "r7 a-job-with-a-long-name")
    print(os.getpid(), sys.argv[1] == os.environ["TITLE"], flush=True)
    input()
"""


@pytest.mark.parametrize("title", ["megascale rank 7 of job a attempt 1", "x" * 10_000])
def test_a_forked_process_shows_its_title(title: str) -> None:
    """A title longer than the original arguments is cut, and the environment stays as it is."""
    command = [sys.executable, "-c", PROGRAM, title]
    environment = {"TITLE": title, "PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        pid, same = process.stdout.readline().split()
        shown = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0")
        name = Path(f"/proc/{pid}/comm").read_text()
        of_parent = Path(f"/proc/{process.pid}/cmdline").read_text()
        process.stdin.close()
    assert (shown, name, same) == (title[: len(of_parent) - 1], "r7 a-job-with-a\n", "True")
    assert of_parent.startswith(sys.executable) and process.returncode == 0

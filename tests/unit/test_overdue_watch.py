"""A process ends itself when an operation on its status page does not end in time."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from megascale_common.node.process import child_environment

# Enters one operation; completes it after argument 2 unless that is negative; lives for 3 s.
PROGRAM = """
import sys, time
from pathlib import Path
from megascale_common.node.status_page import StatusPageWriter
from megascale_trainer.process.overdue_watch import watch_operations
page, completed_s = Path(sys.argv[1]), float(sys.argv[2])
writer = StatusPageWriter(page, rank=0, attempt=1)
row = writer.row("tp")
watch_operations(page, 0.3, margin_s=0.7)
writer.enter(row)
if completed_s >= 0:
    time.sleep(completed_s)
    writer.complete(row)
time.sleep(3)
"""


def _ended(folder: Path, completed_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "page"), str(completed_s)],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        env=child_environment({"PYTHONPATH": ":".join(filter(None, sys.path))}),
    )


def test_an_operation_that_never_ends_ends_the_process(tmp_path: Path) -> None:
    ended = _ended(tmp_path, -1)
    assert ended.returncode == -signal.SIGABRT, ended.stderr
    assert "this process ends: its operation 1 in group tp was in progress for" in ended.stderr


def test_an_operation_that_ends_in_time_does_not(tmp_path: Path) -> None:
    ended = _ended(tmp_path, 0)
    assert ended.returncode == 0, ended.stderr

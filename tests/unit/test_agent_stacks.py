"""Where a worker was that stood still: from its own stacks, or from the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.harness.waiting import until

from megascale_common.node.flight_record import GroupRecord, RankRecord
from megascale_common.node.messages import STACKS_SIGNAL
from megascale_driver.presence import reports
from megascale_executor.agent.workers import evidence
from megascale_executor.agent.workers.worker_status import stopped_attempt

# A second thread waits as well: only the one that takes the signal is of interest.
_PROGRAM = f"""
import faulthandler, threading, time
faulthandler.register({int(STACKS_SIGNAL)})
threading.Thread(target=threading.Event().wait, daemon=True).start()
def inner():
    print("ready", flush=True)
    while True:
        time.sleep(60)
def outer():
    inner()
outer()
"""


def test_the_stack_of_the_training_thread_and_the_state_of_a_stopped_one(tmp_path: Path) -> None:
    script, log = tmp_path / "train.py", tmp_path / "rank.log"
    script.write_text(_PROGRAM)
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, str(script)], stdout=output, stderr=output)
    try:
        until(lambda: "ready" in log.read_text(), "the program waits")
        start = evidence.log_end(log)
        process.send_signal(STACKS_SIGNAL)
        found = until(lambda: evidence.stack_since(log, start), "a stack in the log")
        until(lambda: "<module>" in evidence.stack_since(log, start), "all of it")
        found = evidence.stack_since(log, start)
        folder = tmp_path.name
        assert found.startswith(f"inner ({folder}/train.py:8) < outer ({folder}/train.py:10) < ")
        assert evidence.stack_since(log, evidence.log_end(log)) == ""
        process.send_signal(signal.SIGSTOP)
        until(lambda: "stopped (T)" in evidence.kernel_state(process.pid), "it is stopped")
    finally:
        process.kill()
        process.wait()
    assert evidence.kernel_state(process.pid) == "has ended"
    assert evidence.log_end(tmp_path / "absent") == 0
    assert evidence.stack_since(tmp_path / "absent", 0) == ""


def test_a_long_stack_and_garbage_stay_bounded(tmp_path: Path) -> None:
    log = tmp_path / "log"
    frames = "".join(f'  File "/a/{"x" * 300}.py", line {n} in f{n}\n' for n in range(100))
    log.write_bytes(b"\xff\x00 noise\nCurrent thread 0x00007f (most recent call first):\n"
                    + frames.encode() + b"behind it\n")  # fmt: skip
    found = evidence.stack_since(log, 0)
    assert found.startswith("f0 (a/xxx") and len(found) <= evidence.MAX_CHARS
    assert os.fspath(log) not in found


def test_stacks_of_an_attempt_in_which_nothing_failed_are_reported(tmp_path: Path) -> None:
    from typing import Any, cast

    from megascale_executor.agent.attempt import AttemptKey
    from megascale_executor.agent.workers.workers import Worker

    worker = Worker(3, cast(Any, None), tmp_path / "log", tmp_path / "page")
    assert stopped_attempt(AttemptKey("a", 1), "", [worker]) is None
    worker.stack = "all_reduce (parallel/groups.py:1) < step (process/step_loop.py:2)"
    found = stopped_attempt(AttemptKey("a", 1), "", [worker])
    assert found is not None and not found.workers
    assert [(each.rank, each.frames) for each in found.stacks] == [(3, worker.stack)]
    assert not found.records
    spaced = GroupRecord("dp", range(1, 8, 2), p2p=False, entered=9, waits_in=7, operation="a")
    uneven = GroupRecord("mine", (0, 1, 3), p2p=True, entered=2)
    worker.record = RankRecord(3, (spaced, uneven))
    reported = stopped_attempt(AttemptKey("a", 1), "", [worker])
    assert reported is not None
    # As the driver reads it: what is not evenly spaced is left out.
    assert reports._stopped(reported, 0.0).records == (RankRecord(3, (spaced,)),)

"""Processes that die with their parent: real processes, real signals."""

import os
import subprocess
import sys
from pathlib import Path

from tests.harness.processes import until_gone
from tests.harness.waiting import CALL_TIMEOUT_S, until

from megascale_common.node.process import (
    PARENT_GONE_EXIT_CODE,
    PARENT_PID_VARIABLE,
    armed_command,
    child_environment,
    start_ticks,
    stat_fields,
)


def run(
    command: list[str], environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=environment or child_environment(),
        capture_output=True,
        text=True,
        timeout=CALL_TIMEOUT_S,
        check=False,
    )


def test_a_wrapped_program_dies_with_its_starter() -> None:
    script = (
        "import subprocess, time\n"
        "from megascale_common.node.process import armed_command, child_environment\n"
        "child = subprocess.Popen(armed_command(['sleep', '60']), env=child_environment())\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    child_pid = int(starter.stdout.readline())
    # It is armed before it becomes this.
    until(lambda: Path(f"/proc/{child_pid}/comm").read_text() == "sleep\n", "the wrapped program")
    starter.kill()
    starter.wait()
    starter.stdout.close()
    until_gone([child_pid], "the wrapped program")


def test_a_child_whose_parent_is_gone_already_exits_at_once() -> None:
    environment = child_environment() | {PARENT_PID_VARIABLE: str(os.getppid())}
    assert run(armed_command(["true"]), environment).returncode == PARENT_GONE_EXIT_CODE


def test_the_expected_parent_does_not_leak_to_grandchildren() -> None:
    printed = run(armed_command([sys.executable, "-c", "import os; print(dict(os.environ))"]))
    assert printed.returncode == 0 and PARENT_PID_VARIABLE not in printed.stdout


def test_defaults_give_way_to_the_environment_and_to_overrides() -> None:
    environment = child_environment({"OMP_NUM_THREADS": "7", "EXTRA": "1"})
    assert environment["OMP_NUM_THREADS"] == "7" and environment["EXTRA"] == "1"
    assert environment["RES_OPTIONS"] == os.environ.get("RES_OPTIONS", "timeout:1 attempts:1")
    assert environment[PARENT_PID_VARIABLE] == str(os.getpid())


def test_mistakes_are_named_without_a_traceback() -> None:
    missing = run(armed_command(["/no/such/program"]))
    assert missing.returncode == 1
    assert "/no/such/program" in missing.stderr and "Traceback" not in missing.stderr
    assert "no command given" in run(armed_command([])).stderr
    assert "usage" in run([sys.executable, "-m", "megascale_common.node.process"]).stderr


def test_a_zombie_has_a_state_but_no_start_and_a_reaped_process_neither() -> None:
    # A name that would break a reader which splits the line at spaces.
    rename = "open('/proc/self/comm', 'w').write('a) R 1 (b'); print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", rename], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "\n"
    assert stat_fields(child.pid)[1] == str(os.getpid())
    started, ours = start_ticks(child.pid), start_ticks(os.getpid())
    assert started is not None and ours is not None and started >= ours
    child.kill()
    until(lambda: stat_fields(child.pid)[0] == "Z", "the zombie")
    assert start_ticks(child.pid) is None
    child.communicate()
    assert stat_fields(child.pid) == [] and start_ticks(child.pid) is None

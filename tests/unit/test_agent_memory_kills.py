"""A kill by the kernel for want of memory is distinguished from any other SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.harness.memory_limit import join, memory_limit

from megascale_executor.agent.workers.evidence import KillWatch, killed_by_log, memory_group

PID = 4321
GIB = 1 << 30


class Kernel:
    """Files of /proc and /sys/fs/cgroup as the kernel shows them."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        self.log = folder / "kmsg"
        (self.proc / str(PID)).mkdir(parents=True)
        self.write(self.proc / "meminfo", "MemTotal:       8388608 kB\n")
        self.write(self.proc / "vmstat", "nr_free_pages 7\noom_kill 3\n")

    @staticmethod
    def write(path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def member_of(self, lines: str) -> None:
        self.write(self.proc / str(PID) / "cgroup", lines)

    def events(self, folder: str, kills: int) -> None:
        """Counters of a cgroup of v2."""
        text = f"low 0\nhigh 0\nmax 12\noom 2\noom_kill {kills}\noom_group_kill 0\n"
        self.write(self.cgroups / folder / "memory.events", text)

    def watch(self) -> KillWatch:
        return KillWatch(PID, memory_group(PID, self.proc, self.cgroups), self.log)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_a_new_kill_in_the_cgroup_explains_the_end(kernel: Kernel) -> None:
    kernel.member_of("0::/pods/a\n")
    kernel.events("pods/a", 5)
    kernel.write(kernel.cgroups / "pods" / "a" / "memory.max", "max\n")
    kernel.write(kernel.cgroups / "pods" / "memory.max", f"{2 * GIB}\n")
    watch = kernel.watch()
    assert watch.explains() == "", "the kills of before are no evidence"
    kernel.events("pods/a", 6)
    assert watch.explains(GIB) == (
        "killed by the kernel's out-of-memory killer "
        "(cgroup limit 2.0 GiB, the process held 1.0 GiB at most)"
    )


def test_a_kill_of_long_ago_explains_no_later_end(kernel: Kernel) -> None:
    kernel.member_of("0::/a\n")
    kernel.events("a", 0)
    watch = kernel.watch()
    kernel.events("a", 1)
    watch.refresh()
    assert watch.explains(), "the kernel may count some time before the process has ended"
    watch.refresh()
    assert watch.explains() == ""


def test_counters_of_v1_and_of_a_group_above(kernel: Kernel) -> None:
    kernel.member_of("4:memory:/slurm/job\n1:cpu,cpuacct:/\n0::/\n")
    control = kernel.cgroups / "memory" / "slurm" / "job" / "memory.oom_control"
    kernel.write(control, "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    kernel.write(control.with_name("memory.limit_in_bytes"), f"{GIB}\n")
    kernel.write(control.parents[2] / "memory.limit_in_bytes", "9223372036854771712\n")
    watch = kernel.watch()
    kernel.write(control, "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert "cgroup limit 1.0 GiB" in watch.explains()

    kernel.member_of("0::/pods/a/without-controller\n")
    (kernel.cgroups / "pods" / "a" / "without-controller").mkdir(parents=True)
    kernel.events("pods/a", 0)
    watch = kernel.watch()
    kernel.events("pods/a", 1)
    assert "the host has 8.0 GiB" in watch.explains()


def test_without_a_cgroup_counter_the_host_and_its_log_are_the_evidence(kernel: Kernel) -> None:
    kernel.member_of("0::/\n")
    kernel.cgroups.mkdir()
    watch = kernel.watch()
    assert watch.explains() == ""
    kernel.write(kernel.proc / "vmstat", "nr_free_pages 7\noom_kill 4\n")
    assert watch.explains().startswith("probably killed by the kernel's out-of-memory killer")
    kernel.write(kernel.log, f"3,9,1,-;Out of memory: Killed process {PID} (python) total-vm:9kB\n")
    assert watch.explains().startswith("killed by ")


def test_what_cannot_be_read_explains_nothing(tmp_path: Path) -> None:
    watch = KillWatch(PID, memory_group(PID, tmp_path / "proc", tmp_path / "cgroup"))
    watch.refresh()
    assert watch.explains() == ""
    assert not killed_by_log(PID, tmp_path / "none")


def test_a_real_kill_is_recognised_and_a_sigkill_is_none() -> None:
    program = (
        "import sys; from tests.harness.memory_limit import exhaust_memory; "
        "sys.stdin.readline(); exhaust_memory()"
    )
    command = [sys.executable, "-c", program]
    with memory_limit(96 << 20) as group:
        for kill in (False, True):
            with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
                join(group, process.pid)
                watch = KillWatch(process.pid, memory_group(process.pid))
                assert process.stdin is not None
                if kill:
                    os.kill(process.pid, signal.SIGKILL)
                else:
                    process.stdin.write("begin\n")
                    process.stdin.flush()
                assert process.wait() == -signal.SIGKILL
            why = watch.explains()
            assert bool(why) is not kill
            assert kill or "cgroup limit 0.1 GiB" in why

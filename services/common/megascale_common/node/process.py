"""Child processes that cannot outlive their parent, on Linux, with the standard library alone.

A child arms the kernel's parent-death signal and then checks that its parent is still the one that
started it. Three properties of the signal (prctl(2), PR_SET_PDEATHSIG) shape the code. It is not
inherited by a child's children. It fires when the *thread* that spawned the child ends, so children
are spawned from the main thread. It survives exec of a program that is not setuid, which allows us
to wrap programs that we did not write:

    python -m megascale_common.node.process -- etcd --data-dir ...

Ids distinguish one start of a process, or of its host, from the next one, or its files.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import signal as signals
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

PARENT_PID_VARIABLE = "MEGASCALE_PARENT_PID"
PARENT_GONE_EXIT_CODE = 113
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# torch's stores resolve host names, and a slow reverse lookup stalls a connect for five seconds.
# Each worker is one of many on its host, so it has one thread unless more are set explicitly.
_CHILD_DEFAULTS = {"RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1"}


def arm_parent_death(
    expected_parent_pid: int | None = None, signal: signals.Signals = signals.SIGKILL
) -> None:
    """Have the kernel send `signal` to this process when its parent ends; call it before all else.

    `expected_parent_pid` defaults to the environment variable MEGASCALE_PARENT_PID, which
    `child_environment` sets. If the parent has already changed, the process exits at once with
    status 113, because the signal would never come. The variable is removed from the environment:
    a grandchild that inherited it would compare its parent with the wrong process.

    Raises OSError where the kernel offers no parent-death signal.
    """
    from_environment = os.environ.pop(PARENT_PID_VARIABLE, None)
    if expected_parent_pid is None and from_environment is not None:
        expected_parent_pid = int(from_environment)
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is None:
        raise OSError(
            "this operating system has no prctl(PR_SET_PDEATHSIG): megascale runs on Linux"
        )
    if prctl(_PR_SET_PDEATHSIG, int(signal), 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(error)}")
    # After arming, not before: a parent that ends between the two would be missed.
    if expected_parent_pid is not None and os.getppid() != expected_parent_pid:
        os._exit(PARENT_GONE_EXIT_CODE)


def child_environment(overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child: ours, with defaults where unset, and `overrides`.

    MEGASCALE_PARENT_PID is this process, so that the child can check that we are still its parent.
    """
    environment = {**_CHILD_DEFAULTS, **os.environ, **(overrides or {})}
    environment[PARENT_PID_VARIABLE] = str(os.getpid())
    return environment


def armed_command(command: Sequence[str]) -> list[str]:
    """`command` wrapped so that it ends with the process that starts it.

    Start it with `child_environment`.
    """
    return [sys.executable, "-m", "megascale_common.node.process", "--", *command]


def exec_with_parent_death(command: Sequence[str]) -> NoReturn:
    """Become `command` (found on PATH), with the parent-death signal armed.

    Raises ValueError for an empty command and OSError when the program cannot be run.
    """
    if not command:
        raise ValueError(
            "no command given: use "
            "`python -m megascale_common.node.process -- program [argument...]`"
        )
    arm_parent_death()
    os.execvp(command[0], list(command))


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty when there is no such process.

    They are described in proc_pid_stat(5). Field n of the manual page is at index n - 3.
    """
    try:
        # The command name before them may hold spaces and parentheses: the last one ends it.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone or a zombie.

    With the boot id it names a process for good: a process id alone may be in use again.
    """
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def _main(arguments: Sequence[str]) -> NoReturn:
    if not arguments or arguments[0] != "--":
        sys.exit("usage: python -m megascale_common.node.process -- program [argument...]")
    try:
        exec_with_parent_death(arguments[1:])
    except (OSError, ValueError) as error:
        sys.exit(f"cannot start {list(arguments[1:])}: {error}")


if __name__ == "__main__":
    _main(sys.argv[1:])


def boot_id() -> str:
    """Id of the host's current boot, which a restart of a process alone does not change."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def file_view() -> str:
    """Equal in two processes only if they see the same files: kernel, mounts and root; "" unknown.

    Processes of one host may see different files, in containers or under another root.
    """
    try:
        mounts, root = os.stat("/proc/self/ns/mnt"), os.stat("/")
    except OSError:
        return ""
    boot = boot_id()
    return f"{boot}/{mounts.st_ino}/{root.st_dev}-{root.st_ino}" if boot else ""


def network_view() -> str:
    """Equal in two processes only if one reaches the other at 127.0.0.1; "" unknown.

    Containers of one host have a loopback each.
    """
    try:
        network = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    boot = boot_id()
    return f"{boot}/{network.st_ino}" if boot else ""


def new_incarnation() -> str:
    """Id of one start of a process: unique, and in no order."""
    return f"{os.getpid():x}-{secrets.token_hex(6)}"

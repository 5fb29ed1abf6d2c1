"""Child processes that cannot outlive their parent, and ids of processes, on Linux.

Note [Parent-death signal]
~~~~~~~~~~~~~~~~~~~~~~~~~~
An agent that is killed must not leave workers behind that hold its devices. So each child arms the
kernel's parent-death signal (prctl(2), PR_SET_PDEATHSIG) before anything else, and the kernel kills
it when its parent ends, however that ends. Four properties of the signal shape the code:
- A parent that ends before the signal is armed is missed. So the child checks after arming that its
  parent is still the process that started it, and exits at once if not.
- It is not inherited by a child's children. Each of them arms its own.
- It fires when the *thread* that spawned the child ends. Children are spawned from the main thread.
- It survives exec of a program that is not setuid. So programs that we did not write are wrapped:

    python -m megascale_common.node.process -- etcd --data-dir ...

A change of the user clears it; :mod:`megascale_common.node.become` therefore arms it afterwards.

This module uses the standard library alone, because become.py loads it as root before anything of
the job is trusted. The ids at its end distinguish one start of a process or of its host from the
next one.
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

# torch's stores resolve host names, and a slow reverse lookup delays a connect by five seconds.
# Each worker is one of many on its host, so it gets one thread unless more are set explicitly.
_CHILD_DEFAULTS = {"RES_OPTIONS": "timeout:1 attempts:1", "OMP_NUM_THREADS": "1"}


def arm_parent_death(
    expected_parent_pid: int | None = None, signal: signals.Signals = signals.SIGKILL
) -> None:
    """Have the kernel send ``signal`` to this process when its parent ends; call it first.

    See Note [Parent-death signal]. ``expected_parent_pid`` defaults to the environment variable
    MEGASCALE_PARENT_PID, which :func:`child_environment` sets. If the parent has already changed,
    the process exits at once with status 113, because the signal would never come. The variable is
    removed from the environment, because a grandchild that inherited it would compare its parent
    with the wrong process.

    Raises:
        OSError: the kernel has no parent-death signal.
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
    # After arming, not before, or a parent that ends between the two would be missed.
    if expected_parent_pid is not None and os.getppid() != expected_parent_pid:
        os._exit(PARENT_GONE_EXIT_CODE)


def child_environment(overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for a child: ours, with defaults where unset, and ``overrides``.

    MEGASCALE_PARENT_PID is set to this process, so that the child can check its parent.
    """
    environment = {**_CHILD_DEFAULTS, **os.environ, **(overrides or {})}
    environment[PARENT_PID_VARIABLE] = str(os.getpid())
    return environment


def armed_command(command: Sequence[str]) -> list[str]:
    """``command`` wrapped so that it ends with the process that starts it.

    Start it with :func:`child_environment`.
    """
    return [sys.executable, "-m", "megascale_common.node.process", "--", *command]


def exec_with_parent_death(command: Sequence[str]) -> NoReturn:
    """Become ``command`` (found on PATH), with the parent-death signal armed.

    Raises:
        ValueError: the command is empty.
        OSError: the program cannot be run.
    """
    if not command:
        raise ValueError(
            "no command given: use "
            "`python -m megascale_common.node.process -- program [argument...]`"
        )
    arm_parent_death()
    os.execvp(command[0], list(command))


def stat_fields(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; empty if there is no such process.

    They are described in proc_pid_stat(5). Field n of the manual page is at index n - 3.
    """
    try:
        # The command name before them can contain spaces and parentheses; the last one ends it.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it is gone or a zombie.

    Process id, start time and boot id together name a process forever, while a process id alone can
    be reused.
    """
    fields = stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def boot_id() -> str:
    """Id of the host's current boot; "" if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def file_view() -> str:
    """An id that two processes share only if they see the same files; "" if unknown.

    It consists of boot, mounts and root: in containers or under another root, processes of one host
    can see different files.
    """
    try:
        mounts, root = os.stat("/proc/self/ns/mnt"), os.stat("/")
    except OSError:
        return ""
    boot = boot_id()
    return f"{boot}/{mounts.st_ino}/{root.st_dev}-{root.st_ino}" if boot else ""


def network_view() -> str:
    """An id that two processes share only if they reach each other at 127.0.0.1; "" if unknown.

    Each container of a host can have a loopback of its own.
    """
    try:
        network = os.stat("/proc/self/ns/net")
    except OSError:
        return ""
    boot = boot_id()
    return f"{boot}/{network.st_ino}" if boot else ""


def new_incarnation() -> str:
    """A unique id for one start of a process; ids have no order."""
    return f"{os.getpid():x}-{secrets.token_hex(6)}"


def _main(arguments: Sequence[str]) -> NoReturn:
    if not arguments or arguments[0] != "--":
        sys.exit("usage: python -m megascale_common.node.process -- program [argument...]")
    try:
        exec_with_parent_death(arguments[1:])
    except (OSError, ValueError) as error:
        sys.exit(f"cannot start {list(arguments[1:])}: {error}")


if __name__ == "__main__":
    _main(sys.argv[1:])

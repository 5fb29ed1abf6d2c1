"""A real memory cgroup with a limit, for processes that the kernel is to kill."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.harness.waiting import until

CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_limit(limit_bytes: int) -> Iterator[Path]:
    """A new cgroup's folder; a process joins it by its cgroup.procs. Skips where none can be made.

    It is removed when its processes have ended.
    """
    name = f"megascale-test-{uuid.uuid4().hex[:8]}"
    v1 = (CGROUPS / "memory" / "memory.limit_in_bytes").exists()
    folder = CGROUPS / "memory" / name if v1 else CGROUPS / name
    if not v1 and not (CGROUPS / "cgroup.controllers").exists():
        pytest.skip("no cgroup file system with a memory controller is mounted")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"a memory cgroup cannot be made: {error}")
    try:
        try:
            limit = folder / ("memory.limit_in_bytes" if v1 else "memory.max")
            limit.write_text(str(limit_bytes))
        except OSError as error:
            pytest.skip(f"a memory cgroup cannot be given a limit: {error}")
        yield folder
    finally:
        until(lambda: not members(folder), "the end of the cgroup's processes")
        folder.rmdir()


def join(folder: Path, pid: int) -> None:
    """Move a process into the cgroup; what it forks from now on is there too."""
    (folder / "cgroup.procs").write_text(str(pid))


def members(folder: Path) -> list[int]:
    """Processes of the cgroup."""
    with contextlib.suppress(OSError):
        return [int(line) for line in (folder / "cgroup.procs").read_text().split()]
    return []


def exhaust_memory() -> None:
    """Write to ever more memory, until the kernel ends the process."""
    held = []
    while True:
        held.append(os.urandom(1 << 16) * 256)

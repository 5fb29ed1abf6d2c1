"""Memory that this process's cgroups still allow; tmpfs files count against who writes them first.

Both versions of cgroups. What cannot be read limits nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from megascale_common.node.host import PROC

CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes a number of pages near 2**63 where there is no limit


def left_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """The least that any cgroup from this process's up to the root leaves; at most sys.maxsize.

    Page cache that the kernel can drop counts as free.
    """
    return min(_each(proc, cgroups), default=sys.maxsize)


def _each(proc: Path, cgroups: Path) -> Iterator[int]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        folder = root / path.lstrip("/")
        while folder.is_relative_to(root):
            left = _left(folder, *names)
            if left is not None:
                yield left
            folder = folder.parent


def _left(folder: Path, limit: str, usage: str, droppable: str) -> int | None:
    try:
        allowed = (folder / limit).read_text().strip()
        used = int((folder / usage).read_text())
        counters = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if not allowed.isdigit() or int(allowed) >= _UNLIMITED:
        return None
    return max(0, int(allowed) - used + int(counters.get(droppable, 0)))

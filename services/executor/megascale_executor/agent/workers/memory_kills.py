"""Whether the kernel killed a process for want of memory: a SIGKILL like any other, but counted.

The kernel counts the kill in the process's memory cgroup before it sends the signal: ``oom_kill``
of memory.events in cgroup v2, of memory.oom_control in v1, whether the limit of the cgroup or the
memory of the whole host was the cause. Where a cgroup has no such counter (the root of v2), the
host's own is left, ``oom_kill`` of /proc/vmstat. It counts kills of other processes too, so then
the kernel's log, where it is readable, or else the moment is the evidence.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from megascale_common.node import host

CGROUPS = Path("/sys/fs/cgroup")
KERNEL_LOG = Path("/dev/kmsg")
_V1 = "memory"
# The kernel reports "no limit" as the largest number of pages; no host has a petabyte.
_NO_LIMIT_BYTES = 1 << 50
_KERNEL_LOG_RECORDS, _RECORD_BYTES = 20_000, 8192


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A process's memory cgroup; ``counter`` is None if none is readable.

    ``limits`` are the files of its limits and of those above it.
    """

    counter: Path | None
    limits: tuple[Path, ...]
    proc: Path = host.PROC

    def kills(self) -> int:
        """How often the kernel has killed here for want of memory; 0 if that is not readable."""
        return _oom_kills(self.counter or self.proc / "vmstat")

    def limit_bytes(self) -> int:
        """The lowest limit that applies; 0 if there is none."""
        found = [_number(path) for path in self.limits]
        return min((limit for limit in found if 0 < limit < _NO_LIMIT_BYTES), default=0)


def memory_group(pid: int, proc: Path = host.PROC, cgroups: Path = CGROUPS) -> MemoryGroup:
    """The memory cgroup of a process, v1 where the memory controller is there, else v2."""
    paths = _memberships(proc / str(pid) / "cgroup")
    if _V1 in paths:
        root, control, limit = cgroups / _V1, "memory.oom_control", "memory.limit_in_bytes"
    else:
        root, control, limit = cgroups, "memory.events", "memory.max"
    # A container may see its own cgroup mounted as the root, under whatever path it has outside.
    folder = root / paths.get(_V1, paths.get("", "/")).lstrip("/")
    if not folder.is_dir():
        folder = root
    above = [part for part in (folder, *folder.parents) if part.is_relative_to(root)]
    # The controller may be off in a part of v2's tree: the nearest group above it counts then.
    counter = next((part / control for part in above if (part / control).exists()), None)
    return MemoryGroup(counter, tuple(part / limit for part in above), proc)


class KillWatch:
    """Follows the kills of one process's cgroup, so that an old one explains no new end.

    :meth:`refresh` is called every few seconds while the process runs.
    """

    def __init__(self, pid: int, group: MemoryGroup, kernel_log: Path = KERNEL_LOG) -> None:
        self._pid, self._group, self._kernel_log = pid, group, kernel_log
        self._before = self._newest = group.kills()

    def refresh(self) -> None:
        """Forget kills of the time before the last two calls."""
        # Two, because the kernel counts the kill some time before the process has ended.
        self._before, self._newest = self._newest, self._group.kills()

    def explains(self, peak_bytes: int = 0) -> str:
        """Why the process was killed, in words, if for want of memory; else "".

        Args:
            peak_bytes: the most memory that it held, if known.
        """
        if self._group.kills() <= self._before:
            return ""
        certain = self._group.counter is not None or killed_by_log(self._pid, self._kernel_log)
        limit = self._group.limit_bytes()
        where = f"cgroup limit {_gib(limit)}" if limit else f"the host has {_gib(self._host())}"
        peak = f", the process held {_gib(peak_bytes)} at most" if peak_bytes else ""
        who = "killed" if certain else "probably killed"
        return f"{who} by the kernel's out-of-memory killer ({where}{peak})"

    def _host(self) -> int:
        return host.memory_bytes("MemTotal", self._group.proc)


def killed_by_log(pid: int, path: Path = KERNEL_LOG) -> bool:
    """Whether the kernel's log has the kill of this process; False where it is not readable.

    The log has the process id of the host, which differs from that inside a container.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    words = (f"Killed process {pid} ".encode(), f"Killed process {pid},".encode())
    try:
        with contextlib.suppress(BlockingIOError):  # the end of the log
            for _ in range(_KERNEL_LOG_RECORDS):
                try:
                    record = os.read(descriptor, _RECORD_BYTES)
                except BrokenPipeError:
                    continue  # a record was overwritten meanwhile; the next one follows
                if not record:
                    break
                if any(word in record for word in words):
                    return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _memberships(path: Path) -> dict[str, str]:
    """The path in each hierarchy: by controller in v1, "" for v2."""
    found: dict[str, str] = {}
    for line in _text(path).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, folder = rest.partition(":")
        found.update((name, folder) for name in controllers.split(","))
    return found


def _oom_kills(path: Path) -> int:
    for line in _text(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return 0


def _number(path: Path) -> int:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else 0  # "max", or not readable


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"

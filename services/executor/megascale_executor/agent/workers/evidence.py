"""Evidence for why a worker failed or hangs, from four sources.

Note [Victims of a missing peer]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A worker that failed only because a peer did not come is a victim, not the culprit. A collective
that a peer does not join ends in one of three ways. The worker gets an error and reports it; then
there is nothing to find out here. Or NCCL's watchdog aborts the process, and only the log has the
reason. Or, with peer memory (``overlap.tp``), the barrier times out inside its kernel and destroys
the CUDA context: the next library that uses the device fails with an error of its own, or a
destructor fails and the process aborts without a message. The status page is then the only evidence
left: it shows an operation in progress for longer than any operation may take. NCCL's timeout
counts the same way, from the host's call.

Stacks: the worker's signal handler (faulthandler) writes the stacks of all its threads to its log,
even from inside a hung call. The agent reads them back and keeps the thread that took the signal,
which is the one that trains. A process that is stopped, or in an uninterruptible kernel wait,
writes none; then its state is the evidence.

NCCL's flight recorder: a rank on a GPU has a named pipe in the attempt's folder
(megascale_trainer.process.flight_dump), through which the agent requests a dump before it kills the
rank. The dump stays in that folder, and a summary goes to the driver with the stacks. The wait is
at most WAIT_S, and there is none if no rank has a pipe.

Note [Memory kills]
~~~~~~~~~~~~~~~~~~~
A kill by the kernel's out-of-memory killer is a SIGKILL like any other, but the kernel counts it in
the process's memory cgroup before it sends the signal: ``oom_kill`` of memory.events in cgroup v2,
of memory.oom_control in v1, whether the limit of the cgroup or the memory of the whole host was the
cause. If a cgroup has no such counter (the root of v2), only the host's own is left, ``oom_kill``
of /proc/vmstat. That one counts kills of other processes too, so the kernel's log must confirm the
kill; if the log is not readable, the time of the kill is the only evidence ("probably killed").
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megascale_common.node import host
from megascale_common.node.files import AttemptFolder
from megascale_common.node.flight_record import MAX_DUMP_BYTES, RankRecord, parse
from megascale_common.node.process import stat_fields
from megascale_common.node.status_page import Status, read_status_page
from megascale_common.service import logs

STOPPED = "STOPPED"  # error kind of workers that the agent itself ended
_WATCHDOG_WORDS = (
    "Watchdog caught",
    "watchdog thread terminated with exception",
    "watchdog got stuck",
)
# The watchdog polls the device, so it can be the first to get an error that no peer has caused.
_OWN_DEVICE_WORD = "CUDA error"
_LOG_TAIL_BYTES = 1 << 16
_STILL_S = 2.0  # longer than a rank waits for a peer that has just ended


def victim_evidence(
    exit_status: int, error_kind: str, log_path: Path, page: Path, timeout_s: float
) -> str:
    """The evidence that a failed worker is a victim of a missing peer; "" if there is none.

    See Note [Victims of a missing peer].

    Args:
        exit_status: minus the signal's number if a signal ended it.
        error_kind: the kind that it reported itself; "" if none. STOPPED if the agent killed it
            while an abort was in progress, because an abort takes some time.
        log_path, page: its log and its status page.
        timeout_s: longest duration of an operation (``recovery.collective_timeout_s``).
    """
    aborted = exit_status == -signal.SIGABRT and error_kind in ("", STOPPED)
    if aborted and (line := watchdog_line(log_path)):
        return line
    if aborted or error_kind == "OTHER":
        return overdue(read_status_page(page), timeout_s, time.monotonic_ns())
    return ""


def overdue(status: Status | None, timeout_s: float, now_ns: int) -> str:
    """The operation that a rank has been inside for ``timeout_s`` or longer, or "".

    ``now_ns`` is CLOCK_MONOTONIC.
    """
    rows = status.rows if status is not None else ()
    oldest = min((row for row in rows if row.since_ns), key=lambda row: row.since_ns, default=None)
    if oldest is None or now_ns - oldest.since_ns < timeout_s * 1e9:
        return ""
    inside_s = (now_ns - oldest.since_ns) / 1e9
    return (
        f"its operation {oldest.completed + 1} in group {oldest.name} was in progress for "
        f"{inside_s:.1f} s: a peer did not come (recovery.collective_timeout_s = {timeout_s:g})"
    )


def is_still(page: Path, now_ns: int) -> bool:
    """Whether a rank has not written its status page for _STILL_S, so that its stacks matter."""
    status = read_status_page(page)
    return status is not None and now_ns - status.updated_ns > _STILL_S * 1e9


def watchdog_line(log_path: Path) -> str:
    """The line with which NCCL's watchdog aborted the process; "" for other causes."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES, 0))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    last = next(
        (line for line in reversed(lines) if any(word in line for word in _WATCHDOG_WORDS)), ""
    )
    return "" if _OWN_DEVICE_WORD in last else last


MAX_FRAMES = 6
MAX_READ_BYTES = 1 << 16  # of the stacks of all threads of a process
MAX_CHARS = 600

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)$')
_CURRENT = re.compile(r"^Current thread 0x[0-9a-f]+.*\(most recent call first\):$")
_STATES = {
    "T": "is stopped (T): it executes nothing until it gets SIGCONT",
    "t": "is stopped by a debugger (t)",
    "D": "waits in the kernel without interruption (D)",
    "Z": "has ended (Z)",
}


def log_end(log: Path) -> int:
    """Present size of a log in bytes; 0 if it cannot be read."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def stack_since(log: Path, start: int) -> str:
    """The stack written to ``log`` after byte ``start``, innermost frame first; "" without one.

    It looks like ``name (folder/file.py:12) < caller (...)``.
    """
    try:
        with log.open("rb") as file:
            file.seek(start)
            text = file.read(MAX_READ_BYTES).decode(errors="replace")
    except OSError:
        return ""
    frames: list[str] = []
    inside = False
    for line in text.splitlines():
        found = _FRAME.match(line)
        if _CURRENT.match(line):
            frames, inside = [], True
        elif inside and found is not None:
            file_name = "/".join(Path(found["file"]).parts[-2:])
            frames.append(f"{found['name']} ({file_name}:{found['line']})")
        else:
            inside = False
    return " < ".join(frames[:MAX_FRAMES])[:MAX_CHARS]


def kernel_state(pid: int) -> str:
    """Why a process writes no stack: its state and the kernel function in which it waits."""
    fields = stat_fields(pid)
    if not fields:
        return "has ended"
    text = _STATES.get(fields[0], f"wrote no stack in time (state {fields[0]})")
    where = host.text_of(Path(f"/proc/{pid}/wchan")).strip("\0\n ")
    return f"{text}, at {where}" if where not in ("", "0") else text


WAIT_S = 2.0  # for the dumps of all ranks; one of 2,000 operations takes about 0.1 s
READ_S = 2.0  # for reading those of all ranks; one has about 4 MiB, which take about 0.1 s
_LOOK_S = 0.05
_log = logs.get(__name__)


def request_dumps(folder: AttemptFolder, ranks: Iterable[int]) -> dict[int, Path]:
    """Request dumps of these ranks; returns the path of each dump to come.

    Ranks without a recorder are left out.
    """
    asked = {}
    for rank in ranks:
        try:
            descriptor = os.open(folder.flight_request(rank), os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # a rank without a recorder, or that has ended
            continue
        try:
            folder.flight_dump(rank).unlink(missing_ok=True)
            os.write(descriptor, b"1")
            asked[rank] = folder.flight_dump(rank)
        except OSError:  # the pipe is full because the rank does not read it
            continue
        finally:
            os.close(descriptor)
    return asked


async def written_dumps(asked: Mapping[int, Path], wait_s: float = WAIT_S) -> dict[int, Path]:
    """Wait at most ``wait_s`` for the dumps; returns those that exist by then."""
    for _ in range(math.ceil(wait_s / _LOOK_S)):
        if all(path.exists() for path in asked.values()):
            break
        await asyncio.sleep(_LOOK_S)
    return {rank: path for rank, path in asked.items() if path.exists()}


async def read_dumps(dumps: Mapping[int, Path], limit_s: float = READ_S) -> dict[int, RankRecord]:
    """The records in the dumps, by rank, as many as can be read within ``limit_s``."""
    found: dict[int, RankRecord] = {}
    end_s = time.monotonic() + limit_s

    def read_all() -> None:
        for rank, path in dumps.items():
            if time.monotonic() >= end_s:
                break
            try:
                with path.open("rb") as file:
                    found[rank] = parse(rank, file.read(MAX_DUMP_BYTES + 1))
            except (OSError, ValueError) as error:
                _log.warning("a record of NCCL's operations cannot be read", reason=str(error))

    await asyncio.to_thread(read_all)
    return found


CGROUPS = Path("/sys/fs/cgroup")
KERNEL_LOG = Path("/dev/kmsg")
_V1 = "memory"
# The kernel reports "no limit" as its largest number of pages, and no host has a petabyte.
_NO_LIMIT_BYTES = 1 << 50
_KERNEL_LOG_RECORDS, _RECORD_BYTES = 20_000, 8192


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A process's memory cgroup; ``counter`` is None if none is readable.

    ``limits`` are the files with its limit and with those of the groups above it.
    """

    counter: Path | None
    limits: tuple[Path, ...]
    proc: Path = host.PROC

    def kills(self) -> int:
        """Number of out-of-memory kills in the cgroup; 0 if it is not readable."""
        return _oom_kills(self.counter or self.proc / "vmstat")

    def limit_bytes(self) -> int:
        """The lowest limit that applies; 0 if there is none."""
        found = [_number(path) for path in self.limits]
        return min((limit for limit in found if 0 < limit < _NO_LIMIT_BYTES), default=0)


def memory_group(pid: int, proc: Path = host.PROC, cgroups: Path = CGROUPS) -> MemoryGroup:
    """The memory cgroup of a process: of v1 if the memory controller is in v1, else of v2."""
    paths = _memberships(proc / str(pid) / "cgroup")
    if _V1 in paths:
        root, control, limit = cgroups / _V1, "memory.oom_control", "memory.limit_in_bytes"
    else:
        root, control, limit = cgroups, "memory.events", "memory.max"
    # A container can see its own cgroup mounted as the root, whatever path it has outside.
    folder = root / paths.get(_V1, paths.get("", "/")).lstrip("/")
    if not folder.is_dir():
        folder = root
    above = [part for part in (folder, *folder.parents) if part.is_relative_to(root)]
    # The controller can be off in a part of v2's tree; then the nearest group above it counts.
    counter = next((part / control for part in above if (part / control).exists()), None)
    return MemoryGroup(counter, tuple(part / limit for part in above), proc)


class KillWatch:
    """Follows the kills in one process's cgroup, so that an old kill does not explain a new end.

    See Note [Memory kills]. :meth:`refresh` is called every few seconds while the process runs.
    """

    def __init__(self, pid: int, group: MemoryGroup, kernel_log: Path = KERNEL_LOG) -> None:
        self._pid = pid
        self._group = group
        self._kernel_log = kernel_log
        self._before = self._newest = group.kills()

    def refresh(self) -> None:
        """Forget kills from before the last two calls."""
        # Two calls, because the kernel counts a kill some time before the process has ended.
        self._before = self._newest
        self._newest = self._group.kills()

    def explains(self, peak_bytes: int = 0) -> str:
        """A sentence about the kill if the process was killed for lack of memory; else "".

        Args:
            peak_bytes: peak memory of the process, if known.
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
    """Whether the kernel's log has the kill of this process; False if it is not readable.

    The log has process ids of the host, which differ from those inside a container.
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
                    continue  # a record was overwritten before it was read; the next one follows
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
    for line in host.text_of(path).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, folder = rest.partition(":")
        found.update((name, folder) for name in controllers.split(","))
    return found


def _oom_kills(path: Path) -> int:
    for line in host.text_of(path).splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return 0


def _number(path: Path) -> int:
    text = host.text_of(path).strip()
    return int(text) if text.isdecimal() else 0  # "max", or not readable


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"

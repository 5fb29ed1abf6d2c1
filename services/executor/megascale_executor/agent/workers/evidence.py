"""What shows why a worker failed or stands still: symptoms, stacks, NCCL's record, memory kills.

Symptoms: a worker that failed only because a peer did not come is a victim, not the culprit. A
collective that a peer does not join ends in one of three ways. The worker gets an error and
reports it: nothing is to be decided here. Or NCCL's watchdog aborts the process, and only the log
has the reason. Or, over peer memory (``overlap.tp``), the barrier times out inside its kernel and
destroys the CUDA context: the next library that uses the device fails with some error of its own,
or a destructor does and the process aborts without a message. The evidence that remains is the
status page: an operation in progress for longer than any may take. NCCL counts the same way, from
the host's call on.

Stacks: the worker's signal handler (faulthandler) writes the stacks of all its threads to its log,
even from inside a hung call. What it has written there is read back and shortened to the thread
that took the signal, which is the one that trains. A process that is stopped, or that waits in the
kernel without interruption, writes none: then its state is the evidence.

NCCL's flight recorder: a rank on a GPU has a named pipe in the attempt's folder
(megascale_trainer.process.flight_dump), by which it is asked before it is killed. What comes stays
in that folder, and what it says goes to the driver with the stacks. Nothing here waits longer than
WAIT_S, and nothing at all where no rank has a pipe.

Memory kills: a SIGKILL like any other, but the kernel counts it in the process's memory cgroup
before it sends the signal: ``oom_kill`` of memory.events in cgroup v2, of memory.oom_control in v1,
whether the limit of the cgroup or the memory of the whole host was the cause. Where a cgroup has no
such counter (the root of v2), the host's own is left, ``oom_kill`` of /proc/vmstat. It counts kills
of other processes too, so then the kernel's log, where it is readable, or else the moment is the
evidence.
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
# The watchdog polls the device, and so may be the first to get an error that no peer has caused.
_OWN_DEVICE_WORD = "CUDA error"
_LOG_TAIL_BYTES = 1 << 16
_STILL_S = 2.0  # a rank that waits for a peer which has just ended has been still for less


def waited_in_vain(
    exit_status: int, error_kind: str, log_path: Path, page: Path, timeout_s: float
) -> str:
    """The evidence that a worker which failed is a victim; "" if there is none.

    Args:
        exit_status: minus the signal's number if one ended it.
        error_kind: what it reported itself; "" if nothing. STOPPED if the agent killed it while an
            abort was in progress, which takes some time.
        log_path, page: its log and its status page.
        timeout_s: longest that an operation may take (``recovery.collective_timeout_s``).
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


def stands_still(page: Path, now_ns: int) -> bool:
    """Whether a rank has not written its status page for _STILL_S: its stacks are of interest."""
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
MAX_READ_BYTES = 1 << 16  # of what a process writes of all its threads
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
    """Bytes that a log has by now; 0 if it cannot be read."""
    try:
        return log.stat().st_size
    except OSError:
        return 0


def stack_since(log: Path, start: int) -> str:
    """The stack that was written to ``log`` from byte ``start`` on, innermost frame first.

    As ``name (folder/file.py:12) < caller (...)``; "" if there is none.
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
    """Why a process writes no stack: its state, and where it waits in the kernel."""
    fields = stat_fields(pid)
    if not fields:
        return "has ended"
    text = _STATES.get(fields[0], f"wrote no stack in time (state {fields[0]})")
    try:
        where = Path(f"/proc/{pid}/wchan").read_text().strip("\0\n ")
    except OSError:
        where = ""
    return f"{text}, at {where}" if where not in ("", "0") else text


WAIT_S = 2.0  # for all ranks together; a record of 2,000 operations takes some 0.1 s
READ_S = 2.0  # for all of a node's ranks; one has some 4 MiB, which take about 0.1 s
_LOOK_S = 0.05
_log = logs.get(__name__)


def ask(folder: AttemptFolder, ranks: Iterable[int]) -> dict[int, Path]:
    """Ask these ranks; returns the file that is to come of each that has a recorder."""
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
        except OSError:  # nobody reads it, and it is full
            continue
        finally:
            os.close(descriptor)
    return asked


async def arrived(asked: Mapping[int, Path], wait_s: float = WAIT_S) -> dict[int, Path]:
    """Wait until the files are there, ``wait_s`` at most; returns those that are."""
    for _ in range(math.ceil(wait_s / _LOOK_S)):
        if all(path.exists() for path in asked.values()):
            break
        await asyncio.sleep(_LOOK_S)
    return {rank: path for rank, path in asked.items() if path.exists()}


async def read(dumps: Mapping[int, Path], limit_s: float = READ_S) -> dict[int, RankRecord]:
    """What the records say, by rank; without those that cannot be read within ``limit_s``."""
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
        self._pid = pid
        self._group = group
        self._kernel_log = kernel_log
        self._before = self._newest = group.kills()

    def refresh(self) -> None:
        """Forget kills of the time before the last two calls."""
        # Two, because the kernel counts the kill some time before the process has ended.
        self._before = self._newest
        self._newest = self._group.kills()

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

"""The status page: 4 KiB of shared memory that show a rank's progress, even while it is stuck.

The trainer writes it with plain stores (no lock, no system call); the agent reads it from its own
process. So the evidence survives a hung collective, a held interpreter lock and a stuck GPU
(MegaScale section 5.2: the silent rank is the culprit).

There is one row per communication group and stream. It holds the number of the last operation
entered, the number of the last one completed, and the time at which the oldest operation in
progress was entered.

Note [Files of a rank are never mapped]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A rank runs a team's own code, which can truncate any of its files, and a process that touches a
mapping beyond the end of its file is killed by SIGBUS. So the agent maps neither the status page
nor the ring of spans: it reads them with pread(2), which returns the rank's stores, and less data
if the file was truncated.

Note [Sequence lock]
~~~~~~~~~~~~~~~~~~~~
A sequence lock makes a read consistent. One thread writes at a time: it makes the sequence number
odd, writes the page, and makes the number even again. A reader copies the page between two reads of
the number. Its copy is consistent if both are equal and even; else it tries again. Neither waits
for the other. A writer that is killed in between leaves an odd number forever, which is why readers
try a bounded number of times. This relies on stores that become visible in program order, as on
x86-64; there are no fences. Each read is a system call of its own, so reads keep their order.

The number itself must change in one store. ``struct.pack_into`` sets its bytes to zero first, and
zero is even: a reader that looks at two such moments takes the half of a write between them for a
page. So the number is written through a memoryview, and the header is packed after it.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

PAGE_BYTES = 4096
MAX_ROWS = 48
_MAGIC = b"MSPG"
_VERSION = 2
_READ_ATTEMPTS = 200
_BEGIN = struct.Struct("<4sI")  # magic, version
# After the sequence: pid, rank, attempt, step, phase, micro_batch, updated (monotonic ns), rows
_HEADER = struct.Struct("<IIQqIIQI")
# name, entered, completed, since (monotonic ns)
_ROW = struct.Struct("<32sQQQ")
_SEQUENCE_BYTES = 8
_SEQUENCE_OFFSET = 8
_HEADER_OFFSET = _SEQUENCE_OFFSET + _SEQUENCE_BYTES
_ROWS_OFFSET = 128


class Phase(enum.IntEnum):
    """Present activity of a rank; how long it may be silent depends on it."""

    STARTING = 0
    WARMUP = 1
    COMPILE = 2
    STEP = 3
    EVAL = 4
    SNAPSHOT = 5
    RESTORE = 6
    DONE = 7


@dataclass(frozen=True, slots=True)
class GroupRow:
    """Progress of one communication group or stream: operations counted since the attempt began.

    ``since_ns`` is the CLOCK_MONOTONIC time at which the oldest operation in progress was entered;
    0 if there is none.
    """

    name: str
    entered: int
    completed: int
    since_ns: int


@dataclass(frozen=True, slots=True)
class Status:
    """One consistent reading.

    ``step`` is the last step completed; ``updated_ns`` is CLOCK_MONOTONIC at the last write.
    """

    pid: int
    rank: int
    attempt: int
    step: int
    phase: Phase
    micro_batch: int
    updated_ns: int
    rows: tuple[GroupRow, ...]


class StatusPageWriter:
    """The rank's side. Creates the file at ``path`` with mode 0600."""

    def __init__(self, path: Path, *, rank: int, attempt: int) -> None:
        self._rank = rank
        self._attempt = attempt
        self._page = _map_new(path)
        # Its one item is the sequence: see Note [Sequence lock].
        self._number = memoryview(self._page)[_SEQUENCE_OFFSET:_HEADER_OFFSET].cast("Q")
        self._sequence = 0
        self._names: list[bytes] = []
        self._counts: list[list[int]] = []
        # Per row, the times at which its operations in progress were entered.
        self._unfinished: list[deque[int]] = []
        self._step = 0
        self._phase = Phase.STARTING
        self._micro_batch = 0
        self._write()

    def row(self, name: str) -> int:
        """Reserve a row; returns its index for :meth:`enter` and :meth:`complete`.

        Raises:
            ValueError: all rows are taken.
        """
        if len(self._names) == MAX_ROWS:
            raise ValueError(f"a status page holds {MAX_ROWS} rows; {name!r} is one too many")
        self._names.append(name.encode()[:32])
        self._counts.append([0, 0])
        self._unfinished.append(deque())
        self._write()
        return len(self._names) - 1

    def update(
        self, *, step: int | None = None, phase: Phase | None = None, micro_batch: int = 0
    ) -> None:
        """Set the last completed step, the phase and the micro-batch in progress."""
        self._step = self._step if step is None else step
        self._phase = self._phase if phase is None else phase
        self._micro_batch = micro_batch
        self._write()

    def enter(self, row: int) -> None:
        """The rank enters the next operation of this row's group."""
        self._counts[row][0] += 1
        self._unfinished[row].append(time.monotonic_ns())
        self._write()

    def complete(self, row: int, *, unfinished: int = 0) -> None:
        """All operations entered on this row have completed, except the last ``unfinished``."""
        self._counts[row][1] = self._counts[row][0] - unfinished
        while len(self._unfinished[row]) > unfinished:
            self._unfinished[row].popleft()
        self._write()

    def reopen(self, row: int, *, unfinished: int) -> None:
        """The rank waits for the last ``unfinished`` operations, which counted as completed.

        :meth:`complete` ends the wait.
        """
        self._counts[row][1] = self._counts[row][0] - unfinished
        self._unfinished[row].append(time.monotonic_ns())
        self._write()

    def close(self) -> None:
        """Unmap the page; the file stays for the reader."""
        self._number.release()
        self._page.close()

    def _write(self) -> None:
        # Odd from here on: see Note [Sequence lock].
        self._sequence += 1
        self._number[0] = self._sequence
        _BEGIN.pack_into(self._page, 0, _MAGIC, _VERSION)
        rows = zip(self._names, self._counts, self._unfinished, strict=True)
        for index, (name, (entered, completed), unfinished) in enumerate(rows):
            since_ns = unfinished[0] if unfinished else 0
            _ROW.pack_into(
                self._page, _ROWS_OFFSET + index * _ROW.size, name, entered, completed, since_ns
            )
        _HEADER.pack_into(
            self._page,
            _HEADER_OFFSET,
            os.getpid(),
            self._rank,
            self._attempt,
            self._step,
            int(self._phase),
            self._micro_batch,
            time.monotonic_ns(),
            len(self._names),
        )
        # Only this store, the last one, makes the page valid.
        self._sequence += 1
        self._number[0] = self._sequence


def read_status_page(path: Path) -> Status | None:
    """The rank's current status; None if there is no page or no consistent reading of it.

    Never blocks: a page whose writer was killed in the middle of a write gives None after a bounded
    number of tries. A page that is damaged, truncated, not a plain file, or cannot be opened (a
    full table of files) gives None too, so None does not mean that the rank is gone.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        for _ in range(_READ_ATTEMPTS):
            # See Note [Sequence lock].
            before = os.pread(descriptor, _SEQUENCE_BYTES, _SEQUENCE_OFFSET)
            data = os.pread(descriptor, PAGE_BYTES, 0)
            after = os.pread(descriptor, _SEQUENCE_BYTES, _SEQUENCE_OFFSET)
            if len(data) < PAGE_BYTES or len(before) < _SEQUENCE_BYTES:
                return None
            if before == after and before[0] % 2 == 0:
                return _parse(data)
    except OSError:  # a folder, a pipe
        return None
    finally:
        os.close(descriptor)
    return None


def _parse(data: bytes) -> Status | None:
    magic, version = _BEGIN.unpack_from(data)
    pid, rank, attempt, step, phase, micro_batch, updated, count = _HEADER.unpack_from(
        data, _HEADER_OFFSET
    )
    if magic != _MAGIC or version != _VERSION:
        return None
    rows = []
    for index in range(min(count, MAX_ROWS)):
        name, *counts = _ROW.unpack_from(data, _ROWS_OFFSET + index * _ROW.size)
        rows.append(GroupRow(name.rstrip(b"\0").decode(errors="replace"), *counts))
    try:
        return Status(pid, rank, attempt, step, Phase(phase), micro_batch, updated, tuple(rows))
    except ValueError:  # no such phase
        return None


def _map_new(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, PAGE_BYTES)
        return mmap.mmap(descriptor, PAGE_BYTES)
    finally:
        os.close(descriptor)

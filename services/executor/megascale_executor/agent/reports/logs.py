"""Scans the logs of an attempt for trouble, and reads their last and new lines for people.

The matcher of :mod:`megascale_common.node.logs` finds lines in each rank's log and in the kernel's.
The scanner keeps one record per fingerprint, with count, times and one sample, until the next
attempt begins. It reads in a thread, in blocks and within bounds, so that no rank's log delays a
heartbeat.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megascale.v1 import link_pb2
from megascale_common.node.logs.matcher import Finding, Matcher
from megascale_common.service.wire_text import encodable
from megascale_executor.agent.attempt import NO_ATTEMPT, AttemptKey
from megascale_executor.agent.kernel_log import KernelLog

SCAN_S = 0.5
MIN_PAUSE_S = 0.05  # between the end of a scan and the next
KERNEL_RANK = -1
MAX_SAMPLE_BYTES = 512
MAX_FINGERPRINTS = 40
MAX_UNKNOWN = 16  # of these, lines without a signature: they must not displace known ones
_MAX_NAME_CHARS = 160
_BLOCK_BYTES = 262_144
MAX_BEHIND_BYTES = 64 << 20  # of one log; more than that before its end is skipped and counted
_REPORTED = frozenset({"root", "secondary", "teardown"})


@dataclass(slots=True)
class _Record:
    finding: Finding
    rank: int
    first_at_s: float
    last_at_s: float


@dataclass(slots=True)
class _Source:
    """The log of one rank, and how far it was read."""

    rank: int
    path: Path
    offset: int = 0
    matcher: Matcher = field(default_factory=Matcher)


@dataclass(slots=True)
class _Watched:
    """One attempt. A scan in progress when the next one begins changes only its own attempt."""

    key: AttemptKey = NO_ATTEMPT
    sources: tuple[_Source, ...] = ()
    records: dict[str, _Record] = field(default_factory=dict)
    skipped_bytes: int = 0


class LogScanner:
    """Finds trouble in the logs of the present attempt; calls ``news`` for new fingerprints."""

    def __init__(self, kernel: KernelLog, news: Callable[[], None]) -> None:
        self.kernel = kernel
        self._kernel_matcher = Matcher()
        self._news = news
        self._watched = _Watched()
        self._lock = threading.Lock()  # guards the records
        self._scanning = threading.Lock()

    @property
    def key(self) -> AttemptKey:
        """The attempt whose logs are scanned, or were last."""
        return self._watched.key

    @property
    def skipped_bytes(self) -> int:
        """Bytes that were written faster than they could be read."""
        return self._watched.skipped_bytes

    def watch(self, key: AttemptKey, logs: Mapping[int, Path]) -> None:
        """Scan the logs of this attempt, by rank, from now on; forget all earlier records."""
        sources = tuple(_Source(rank, path) for rank, path in logs.items())
        self._watched = _Watched(key, sources)

    async def run(self) -> None:
        """Scan every SCAN_S; the time that a scan takes counts towards that."""
        pause_s = SCAN_S
        while True:
            await asyncio.sleep(pause_s)
            began_s = time.monotonic()
            await self.scan()
            pause_s = max(MIN_PAUSE_S, SCAN_S - (time.monotonic() - began_s))

    async def scan(self, *, last: bool = False) -> None:
        """Scan new lines. ``last``: the processes have ended, so a line without end is complete."""
        if await asyncio.to_thread(self.scan_now, last=last):
            self._news()

    def scan_now(self, *, last: bool = False) -> bool:
        """:meth:`scan` in this thread; returns whether a fingerprint is new."""
        with self._scanning:
            watched, before = self._watched, len(self._watched.records)
            for source in watched.sources:
                self._scan(watched, source, last)
            for at_s, text in self.kernel.read():
                self._kernel_matcher.feed(text)
                self._take(watched, self._kernel_matcher, KERNEL_RANK, at_s)
            return len(watched.records) > before

    def collect(self) -> list[link_pb2.LogFingerprint]:
        """All records of the present attempt, oldest first."""
        with self._lock:
            return [_message(record) for record in self._watched.records.values()]

    def _scan(self, watched: _Watched, source: _Source, last: bool) -> None:
        try:
            with source.path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                behind = status.st_size - source.offset
                if behind > MAX_BEHIND_BYTES:
                    watched.skipped_bytes += behind - MAX_BEHIND_BYTES
                    source.offset = status.st_size - MAX_BEHIND_BYTES
                file.seek(source.offset)
                at_s = min(status.st_mtime, time.time())
                # Only up to the size at the start, so that a rank which keeps writing does not
                # delay the others.
                while source.offset < status.st_size and (data := file.read(_BLOCK_BYTES)):
                    source.offset += len(data)
                    source.matcher.feed(data)
                    self._take(watched, source.matcher, source.rank, at_s)
                if last:
                    source.matcher.close()
                    self._take(watched, source.matcher, source.rank, at_s)
        except OSError:
            return

    def _take(self, watched: _Watched, matcher: Matcher, rank: int, at_s: float) -> None:
        with self._lock:
            for finding in matcher.take():
                if finding.kind.role in _REPORTED:
                    _add(watched.records, finding, rank, at_s)


def _add(records: dict[str, _Record], finding: Finding, rank: int, at_s: float) -> None:
    known = records.get(finding.fingerprint)
    if known is not None:
        known.finding.count += finding.count
        known.last_at_s = max(known.last_at_s, at_s)
        return
    if len(records) >= MAX_FINGERPRINTS:
        return
    if finding.kind.category == "unknown":
        unknown = sum(one.finding.kind.category == "unknown" for one in records.values())
        if unknown >= MAX_UNKNOWN:
            return
    records[finding.fingerprint] = _Record(finding, rank, at_s, at_s)


def _message(record: _Record) -> link_pb2.LogFingerprint:
    finding, kind = record.finding, record.finding.kind
    message = link_pb2.LogFingerprint(
        signature=encodable(finding.fingerprint[:_MAX_NAME_CHARS]),
        count=finding.count,
        first_rank=record.rank,
        sample_line=encodable(
            finding.sample.encode(errors="replace")[:MAX_SAMPLE_BYTES].decode(errors="ignore")
        ),
        category=kind.category,
        role=kind.role,
        action=kind.action,
        kernel=kind.kernel,
        weak=kind.weak,
    )
    message.first_at.FromNanoseconds(round(record.first_at_s * 1e9))
    message.last_at.FromNanoseconds(round(record.last_at_s * 1e9))
    return message


DEFAULT_LINES = 100
MAX_LINES = 100_000
MAX_LINE_CHARS = 16_384
_TAIL_BLOCK_BYTES = 65_536
_MAX_TAIL_BYTES = 16 << 20
_POLL_S = 0.2


def ending(path: Path, lines: int) -> tuple[int, int]:
    """Begin and end of the last ``lines`` lines of a file; :func:`follow` can continue at the end.

    A line that is still being written is left out. At most 16 MiB from the end are searched, and
    none of it is kept in memory.

    Raises:
        OSError: the file cannot be read.
    """
    end, left = 0, lines + 1  # newlines: one per line, and the one before the first line
    with path.open("rb") as file:
        size = position = file.seek(0, 2)
        while position > 0 and size - position < _MAX_TAIL_BYTES:
            position = max(0, position - _TAIL_BLOCK_BYTES)
            file.seek(position)
            block = file.read(min(_TAIL_BLOCK_BYTES, size - position))
            at = len(block)
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                end, left = end or position + at + 1, left - 1
                if not left:
                    return position + at + 1, end
    return position, end or position


async def between(path: Path, begin: int, end: int) -> AsyncIterator[str]:
    """The lines of a part of a file that ends with a newline, read block by block."""
    pending = b""
    while begin < end:
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(min(_TAIL_BLOCK_BYTES, end - begin))
        if not data:  # the file was truncated
            return
        begin += len(data)
        *whole, pending = (pending + data).split(b"\n")
        for line in whole:
            yield _text(line)
        pending = pending[: 4 * MAX_LINE_CHARS]  # the rest of a longer line is never shown


async def follow(path: Path, offset: int, is_over: Callable[[], bool]) -> AsyncIterator[str]:
    """Lines written after ``offset``, as they come; ends at the end of file once ``is_over``."""
    pending = b""
    while True:
        over = is_over()  # before the read, so that nothing written before the end is missed
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(_TAIL_BLOCK_BYTES)
        offset += len(data)
        *whole, pending = (pending + data).split(b"\n")
        for line in whole:
            yield _text(line)
        if len(pending) > MAX_LINE_CHARS:
            yield _text(pending)
            pending = b""
        if not data:
            if over:
                break
            await asyncio.sleep(_POLL_S)
    if pending:
        yield _text(pending)


def _text(line: bytes) -> str:
    return line.rstrip(b"\r").decode(errors="replace")[:MAX_LINE_CHARS]

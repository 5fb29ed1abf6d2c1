"""Passes a rank's spans to the agent through a ring in shared memory, or keeps them in files.

Note [Span ring]
~~~~~~~~~~~~~~~~
One process writes, one reads, and neither waits. Each side has a counter of its own in the header:
records written so far, records read so far. The writer fills a slot and then raises its counter, in
one 8-byte store. If the slot still holds an unread record, the writer drops the new one and counts
that. The reader copies records and then raises its own counter. As with the status page, this
relies on stores that become visible in program order, as on x86-64. The reader does not trust the
numbers in the file: a counter with an impossible value ends the reading of that ring.

The reader uses pread(2) and pwrite(2) for the reason of Note [Files of a rank are never mapped] in
:mod:`megascale_common.node.status_page`. They do not guarantee a single load or store of 8 bytes,
so the reader accepts a counter only if two reads agree. Its own counter can for a moment look like
a mixture of the old and the new value; the worst that follows is that the writer drops a record, or
writes one into a slot that has just been read.

In a run by hand no agent reads the ring. The newest spans of a rank are then kept in plain files of
bounded size next to its log, however long the run is:

    spans-00000.json     the rank, and the table of its operations
    spans-00000.records  packed records, oldest first
    spans-00000.earlier  the records before those, once there are many; older ones are deleted
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from megascale_common.node.spans import ops
from megascale_common.node.spans.ops import Op, OpRegistry
from megascale_common.node.spans.record import SPAN, Span
from megascale_job.layout import RankLayout
from megascale_job.visible import counted

CAPACITY = 8192  # records: 256 KiB
_MAX_CAPACITY = 1 << 20
_MAGIC, _VERSION = b"MSSR", 1
# magic, version, capacity, rank, attempt, pid
_HEADER = struct.Struct("<4sIIIQI")
# Indices of 8-byte counters, each on a cache line of its own.
_WRITTEN, _DROPPED, _OPS_BYTES, _READ = 8, 16, 24, 32
_COUNTER = struct.Struct("<Q")
_COUNTERS_BYTES = 512
_OPS_ROOM = 32 * 1024
_RECORDS = _COUNTERS_BYTES + _OPS_ROOM


class SpanRingWriter:
    """The rank's side. Creates the file at ``path`` with mode 0600."""

    def __init__(self, path: Path, *, rank: int, attempt: int, capacity: int = CAPACITY) -> None:
        if not 0 < capacity <= _MAX_CAPACITY:
            raise ValueError(f"a ring has 1 to {_MAX_CAPACITY} records, got {capacity}")
        self._capacity = capacity
        self._registry = OpRegistry()
        size = _RECORDS + capacity * SPAN.size
        # A file that a reader may have opened is never truncated; the new ring replaces it.
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
            _HEADER.pack_into(self._map, 0, _MAGIC, _VERSION, capacity, rank, attempt, os.getpid())
            fresh.replace(path)
        finally:
            os.close(descriptor)
        # A memoryview stores an item of 8 bytes in one store, which pack_into does not do.
        self._counters = memoryview(self._map)[:_COUNTERS_BYTES].cast("Q")
        self._written = 0

    @property
    def dropped(self) -> int:
        """Number of records dropped because the ring was full."""
        return self._counters[_DROPPED]

    def op(self, op: Op) -> int:
        """Number of an operation for :meth:`add`.

        Raises:
            ValueError: too many operations, or too long a name.
        """
        before = len(self._registry)
        number = self._registry.number(op)
        if len(self._registry) > before:
            data = ops.dump(self._registry.ops())
            # First the longer text, then its length. The part that the reader already has stays the
            # same except for the closing bracket, at which the reader tries again.
            self._map[_COUNTERS_BYTES : _COUNTERS_BYTES + len(data)] = data
            self._counters[_OPS_BYTES] = len(data)
        return number

    def add(self, span: Span) -> bool:
        """Write a record; returns False if the ring is full. Never waits."""
        if self._written - self._counters[_READ] >= self._capacity:
            self._counters[_DROPPED] += 1
            return False
        place = _RECORDS + self._written % self._capacity * SPAN.size
        SPAN.pack_into(self._map, place, *span)
        self._written += 1
        self._counters[_WRITTEN] = self._written  # see Note [Span ring]
        return True

    def close(self) -> None:
        """Unmap the ring; the file stays for the reader."""
        self._counters.release()
        self._map.close()


class SpanRingReader:
    """The agent's side of an existing ring.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is not a ring of this version.
    """

    def __init__(self, path: Path) -> None:
        # O_NONBLOCK, because opening a pipe would wait for its writer.
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        try:
            size = os.fstat(self._descriptor).st_size
            if size < _RECORDS + SPAN.size:
                raise ValueError(f"{path} is no ring of spans: it has {size} bytes")
            magic, version, capacity, self.rank, self.attempt, self.pid = _HEADER.unpack(
                self._read(0, _HEADER.size)
            )
            if magic != _MAGIC or version != _VERSION or size != _RECORDS + capacity * SPAN.size:
                raise ValueError(f"{path} is no ring of spans of version {_VERSION}")
        except BaseException:
            os.close(self._descriptor)
            raise
        self._capacity = capacity
        self._ops: tuple[Op, ...] = ()
        self._ops_bytes = 0

    @property
    def dropped(self) -> int:
        """Number of records that the writer dropped.

        Raises:
            ValueError: the file was truncated.
        """
        return self._counter(_DROPPED)

    def __len__(self) -> int:
        return self._counter(_WRITTEN) - self._counter(_READ)

    def take(self, limit: int) -> bytes:
        """Up to ``limit`` packed records, oldest first; they leave the ring.

        Raises:
            ValueError: the writer's counter is damaged, or the file was truncated.
        """
        done = self._counter(_READ)
        waiting = self._counter(_WRITTEN) - done
        if not 0 <= waiting <= self._capacity:
            raise ValueError(
                f"a ring of {counted(self._capacity, 'span')} claims to hold {waiting}"
            )
        count = min(waiting, limit)
        first = done % self._capacity
        head = min(count, self._capacity - first)
        data = self._slots(first, head) + self._slots(0, count - head)
        os.pwrite(self._descriptor, _COUNTER.pack(done + count), _READ * _COUNTER.size)
        return data

    def ops(self) -> tuple[Op, ...]:
        """The operations registered so far; call it after :meth:`take`.

        Raises:
            ValueError: the table is damaged, or is just being written, so that a retry may succeed.
        """
        size = self._counter(_OPS_BYTES)
        if size != self._ops_bytes:
            if size > _OPS_ROOM:
                raise ValueError(f"a table of operations of {size} bytes has no room in a ring")
            self._ops = ops.load(self._read(_COUNTERS_BYTES, size))
            self._ops_bytes = size
        return self._ops

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _counter(self, place: int) -> int:
        """A counter of the header, read until two reads agree; see Note [Span ring]."""
        before = b""
        while (data := self._read(place * _COUNTER.size, _COUNTER.size)) != before:
            before = data
        return int(_COUNTER.unpack(data)[0])

    def _slots(self, first: int, count: int) -> bytes:
        return self._read(_RECORDS + first * SPAN.size, count * SPAN.size)

    def _read(self, begin: int, size: int) -> bytes:
        data = os.pread(self._descriptor, size, begin)
        if len(data) != size:
            raise ValueError("a ring of spans was cut short")
        return data


@dataclass(frozen=True, slots=True)
class KeptRank:
    """A rank's spans in files; ``unix_offset_ns`` is Unix time minus the rank's clock."""

    rank: int
    node: str
    layout: RankLayout
    unix_offset_ns: int
    ops: tuple[ops.Op, ...]
    records: bytes


class KeptFiles:
    """The files of a rank in ``folder``."""

    def __init__(self, folder: Path, rank: int) -> None:
        name = f"spans-{rank:05d}"
        self.head = folder / f"{name}.json"
        self.records = folder / f"{name}.records"
        self.earlier = folder / f"{name}.earlier"


def kept_ranks(folder: Path) -> list[KeptRank]:
    """The ranks with files of spans in ``folder``, in order.

    Raises:
        ValueError: there are none, or a file is not of this format.
    """
    found = []
    for path in sorted(folder.glob("spans-*.json")):
        try:
            head = json.loads(path.read_text())
            files = KeptFiles(folder, int(head["rank"]))
            records = b"".join(
                part.read_bytes() for part in (files.earlier, files.records) if part.exists()
            )
            whole = len(records) - len(records) % SPAN.size  # the last one may be incomplete
            layout = RankLayout(**head["layout"])
            known = ops.load(head["ops"].encode())
            place = int(head["rank"]), str(head["node"]), layout, int(head["unix_offset_ns"])
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(f"{os.fspath(path)}: no spans of a rank: {error}") from error
        found.append(KeptRank(*place, known, records[:whole]))
    if not found:
        raise ValueError("the folder holds no spans-*.json: give one of an attempt by hand")
    return found

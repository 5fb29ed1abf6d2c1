"""The ring in shared memory through which a rank passes its spans to the agent: Note [Span ring].

Note [Span ring]. One process writes, one reads, neither waits. Each side has a counter of its own
in the header: records written so far, records read so far. The writer fills a slot and then
raises its counter, in one 8-byte store; it drops the record, and counts that, where the slot still
holds an unread one. The reader copies and then raises its own. As with the status page, this relies
on stores that become visible in program order, as on x86-64. The reader takes no number of the file
on trust: a counter that cannot be right ends the reading of that ring.

The reader maps nothing, because a mapping of a file that a rank cuts short kills by SIGBUS. It uses
pread(2) and pwrite(2), which promise no single load or store of 8 bytes. So it takes a counter that
two reads agree on. Its own counter may for a moment look like a mixture of the old and the new one;
the writer then drops a record, or writes one into a slot that has just been read.

Where no agent reads the ring, in a run by hand, a rank's spans are kept in plain files beside its
log, the newest of a run of any length in bounded room:

    spans-00000.json     what the rank is, and the operations that its records count
    spans-00000.records  packed records, oldest first
    spans-00000.earlier  those before, once there are many; what is older still is gone
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
# Places of 8-byte counters, each on a cache line of its own.
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
        # A name that a reader may have opened is never cut: the new ring is another file.
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
            _HEADER.pack_into(self._map, 0, _MAGIC, _VERSION, capacity, rank, attempt, os.getpid())
            fresh.replace(path)
        finally:
            os.close(descriptor)
        # Items of 8 bytes are stored at once, which pack_into does not do.
        self._counters = memoryview(self._map)[:_COUNTERS_BYTES].cast("Q")
        self._written = 0

    @property
    def dropped(self) -> int:
        """Records that found no room."""
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
            # Longer text first, then its length: the part that is already read stays as it was,
            # except for the closing bracket, for which the reader tries again.
            self._map[_COUNTERS_BYTES : _COUNTERS_BYTES + len(data)] = data
            self._counters[_OPS_BYTES] = len(data)
        return number

    def add(self, span: Span) -> bool:
        """Write a record; False if there is no room for it. Never waits."""
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
    """The agent's side of a ring that exists.

    Raises:
        OSError: the file cannot be opened.
        ValueError: it is no ring of this version.
    """

    def __init__(self, path: Path) -> None:
        # Not a pipe's writer, for which opening it would wait.
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
        """Records that the writer dropped.

        Raises:
            ValueError: the file was cut short.
        """
        return self._counter(_DROPPED)

    def __len__(self) -> int:
        return self._counter(_WRITTEN) - self._counter(_READ)

    def take(self, limit: int) -> bytes:
        """Up to ``limit`` packed records, oldest first; they leave the ring.

        Raises:
            ValueError: the writer's counter is damaged, or the file was cut short.
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
        """The operations that are registered now; call it after :meth:`take`.

        Raises:
            ValueError: the table is damaged, or is being written: try again later.
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
        """A counter of the header: see Note [Span ring] on why it is read twice."""
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
    """What a file of spans says of its rank; ``unix_offset_ns``: Unix time less its clock."""

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
    """The ranks whose spans lie in ``folder``, in order.

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
            whole = len(records) - len(records) % SPAN.size  # the last one may be being written
            layout = RankLayout(**head["layout"])
            known = ops.load(head["ops"].encode())
            place = int(head["rank"]), str(head["node"]), layout, int(head["unix_offset_ns"])
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(f"{os.fspath(path)}: no spans of a rank: {error}") from error
        found.append(KeptRank(*place, known, records[:whole]))
    if not found:
        raise ValueError("the folder holds no spans-*.json: give one of an attempt by hand")
    return found

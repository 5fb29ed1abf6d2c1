"""Spans of all jobs in parquet files, read with duckdb. All methods block: one thread calls them.

    FOLDER/JOB/attempt-000001/operations.parquet          op, name, kind, group
    FOLDER/JOB/attempt-000001/spans-FIRST-LAST-N.parquet  a row for each span of these steps

Counters of the nodes lie beside them (:mod:`megascale_driver.telemetry.counter_store`).

``start_ns`` is Unix time on the clock of the rank's node. Small files of an attempt are merged;
the oldest files go when the folder is larger than it may be, or they are older.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megascale.v1 import link_pb2
from megascale_common.node.spans.ops import MAX_OPS, Op
from megascale_common.node.spans.record import SPAN, from_columns
from megascale_driver.analysis.spans.table import RECORD
from megascale_driver.telemetry.counter_store import CounterStore
from megascale_driver.telemetry.files import (
    attempt_folder,
    bounds_of,
    merge_small,
    read_table,
    write_table,
)
from megascale_job.names import is_dns_label

FLUSH_S = 10.0
FLUSH_SPANS = 1 << 18  # 8 MiB
MAX_ATTEMPT_OPS = 4096  # of all ranks together
TRIM_S = 60.0
_OPERATIONS = "operations.parquet"
_SCHEMA = pa.schema([(name, pa.from_numpy_dtype(RECORD[name])) for name in RECORD.names or ()])
_RANK = np.dtype(np.uint32)
_SCHEMA = _SCHEMA.insert(0, pa.field("rank", pa.from_numpy_dtype(_RANK)))

Columns = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class _Attempt:
    """What is held of one attempt: its operations by number, and spans that no file has yet."""

    folder: Path
    ops: dict[Op, int]
    parts: list[tuple[int, npt.NDArray[Any]]] = field(default_factory=list)
    count: int = 0
    since_s: float = 0.0
    newest_step: int = -1
    newest_of: dict[int, int] = field(default_factory=dict)  # step by rank, since the driver began


class SpanStore:
    """The folder, with at most ``most_bytes`` that are at most ``most_age_s`` old."""

    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        most_age_s: float,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._most_bytes, self._most_age_s = folder, most_bytes, most_age_s
        self._now_s = now_s
        self._attempts: dict[tuple[str, int], _Attempt] = {}
        self._trimmed_s = now_s()
        self._files = 0
        self.counters = CounterStore(folder, now_s)
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, batches: Iterable[link_pb2.ReportSpansRequest]) -> Counter[str]:
        """Take batches; how many of their spans are stored, and how many damaged.

        Raises:
            OSError: the folder cannot be written; what was not written is gone.
        """
        counts: Counter[str] = Counter()
        for batch in batches:
            if batch.counters and not batch.count:
                known = is_dns_label(batch.job) and self.counters.add(batch)
                counts["counters" if known else "damaged"] += len(batch.counters)
                continue
            records = _records(batch)
            if records is None or not self._hold(batch, records):
                counts["damaged"] += batch.count
                continue
            counts["stored"] += len(records)
        now_s = self._now_s()
        for attempt in list(self._attempts.values()):
            if attempt.count > FLUSH_SPANS or (attempt.count and now_s - attempt.since_s > FLUSH_S):
                self._write(attempt)
        self.counters.write_due()
        if now_s - self._trimmed_s > TRIM_S:
            self.trim()
        return counts

    def flush(self) -> None:
        """Write all that is held to files."""
        for attempt in self._attempts.values():
            self._write(attempt)
        self.counters.flush()

    def newest_step(self, job: str, attempt: int) -> int:
        """The newest step of which spans are there; -1: none."""
        return self._attempt(job, attempt).newest_step

    def complete_step(self, job: str, attempt: int) -> int:
        """The newest step of which all ranks that send have sent spans; -1: none."""
        held = self._attempt(job, attempt)
        return min(held.newest_of.values(), default=held.newest_step)

    def read(
        self,
        job: str,
        attempt: int,
        first: int,
        last: int,
        names: Sequence[str] = (),
        ranks: Sequence[int] = (),
    ) -> tuple[Columns, tuple[Op, ...]]:
        """The spans of steps ``first`` to ``last``, of these operations and ranks (all: empty).

        Returns:
            The columns of :class:`megascale_driver.analysis.spans.table.SpanTable`, without order,
            and the operations that ``op`` counts.
        """
        held = self._attempt(job, attempt)
        self._write(held)
        ops = tuple(held.ops)
        wanted = [number for number, op in enumerate(ops) if not names or op.name in names]
        files = [
            str(path)
            for path in held.folder.glob("spans-*.parquet")
            if (steps := bounds_of(path)) and steps[0] <= last and steps[1] >= first
        ]
        if not files or not wanted:
            return {name: np.empty(0, kind) for name, kind in _dtypes().items()}, ops
        query = (
            "SELECT * FROM read_parquet($files) "
            "WHERE step BETWEEN $first AND $last AND list_contains($ops, op)"
        )
        given: dict[str, Any] = {"files": files, "first": first, "last": last, "ops": wanted}
        if ranks:
            query += " AND list_contains($ranks, rank)"
            given["ranks"] = list(ranks)
        with duckdb.connect() as connection:
            found = connection.execute(query, given).fetchnumpy()
        return {name: np.asarray(found[name], kind) for name, kind in _dtypes().items()}, ops

    def trim(self) -> None:
        """Remove the oldest files beyond the limits of size and age, and what is empty then."""
        now_s = self._trimmed_s = self._now_s()
        known = []
        for path in self._folder.glob("*/attempt-*/*.parquet"):
            status = path.stat()
            known.append((status.st_mtime, status.st_size, path))
        left = sum(size for _, size, _ in known)
        for written_s, size, path in sorted(known):
            if left <= self._most_bytes and now_s - written_s <= self._most_age_s:
                break
            if path.name != _OPERATIONS:
                path.unlink(missing_ok=True)
                left -= size
        for folder in self._folder.glob("*/attempt-*"):
            kept = any(folder.glob("spans-*")) or any(folder.glob("counters-*"))
            if kept or self._is_held(folder):
                continue
            (folder / _OPERATIONS).unlink(missing_ok=True)
            _remove_if_empty(folder)
            _remove_if_empty(folder.parent)

    def _hold(self, batch: link_pb2.ReportSpansRequest, records: npt.NDArray[Any]) -> bool:
        """Keep them for the next file; False if the attempt has named too many operations."""
        key = batch.job, batch.attempt
        for other in [each for each in self._attempts if each[0] == batch.job and each != key]:
            self._write(self._attempts.pop(other))
        attempt = self._attempt(*key)
        known = len(attempt.ops)
        if known + len(batch.operations) > MAX_ATTEMPT_OPS:
            return False
        numbers = [
            attempt.ops.setdefault(Op(op.name, op.kind, op.group), len(attempt.ops))  # type: ignore[arg-type]
            for op in batch.operations
        ]
        if len(attempt.ops) != known:
            _write_operations(attempt)
        records["op"] = np.array(numbers, np.uint16)[records["op"]]
        records["start_ns"] += batch.unix_offset_ns
        if not attempt.count:
            attempt.since_s = self._now_s()
        attempt.parts.append((batch.rank, records))
        attempt.count += len(records)
        newest = int(records["step"].max())
        attempt.newest_step = max(attempt.newest_step, newest)
        attempt.newest_of[batch.rank] = max(attempt.newest_of.get(batch.rank, -1), newest)
        return True

    def _attempt(self, job: str, number: int) -> _Attempt:
        known = self._attempts.get((job, number))
        if known is None:
            folder = attempt_folder(self._folder, job, number)
            steps = [found[1] for path in folder.glob("spans-*") if (found := bounds_of(path))]
            known = _Attempt(folder, _read_operations(folder), newest_step=max(steps, default=-1))
            if is_dns_label(job):
                self._attempts[job, number] = known
        return known

    def _is_held(self, folder: Path) -> bool:
        return any(each.folder == folder for each in self._attempts.values())

    def _write(self, attempt: _Attempt) -> None:
        parts, attempt.parts, attempt.count = attempt.parts, [], 0
        if not parts:
            return
        spans = np.concatenate([records for _, records in parts])
        ranks = np.repeat(
            np.array([rank for rank, _ in parts], np.uint32), [len(r) for _, r in parts]
        )
        columns = {"rank": ranks, **{name: spans[name] for name in RECORD.names or ()}}
        table = pa.table({name: pa.array(columns[name]) for name in _SCHEMA.names}, _SCHEMA)
        steps = spans["step"]
        name = self._name(int(steps.min()), int(steps.max()))
        write_table(table, attempt.folder / name)
        merge_small(attempt.folder, "spans-*.parquet", self._name)

    def _name(self, first: int, last: int) -> str:
        self._files += 1
        return f"spans-{first:09d}-{last:09d}-{time.time_ns():x}{self._files:04x}.parquet"


def _records(batch: link_pb2.ReportSpansRequest) -> npt.NDArray[Any] | None:
    """The spans of a batch; None if it is not what it says."""
    size = batch.count * SPAN.size
    if not batch.count or not is_dns_label(batch.job) or not 0 < len(batch.operations) <= MAX_OPS:
        return None
    try:
        unpacker = zlib.decompressobj()
        columns = unpacker.decompress(batch.columns, size + 1)
        if len(columns) != size:
            return None
        records = np.frombuffer(from_columns(columns), RECORD).copy()
    except (zlib.error, ValueError):
        return None
    return records if int(records["op"].max()) < len(batch.operations) else None


def _dtypes() -> dict[str, np.dtype[Any]]:
    # Not by pyarrow's own conversion, which needs pandas up to version 19 at least.
    return {name: np.dtype(RECORD[name]) if name != "rank" else _RANK for name in _SCHEMA.names}


def _write_operations(attempt: _Attempt) -> None:
    ops = list(attempt.ops)
    columns: dict[str, Any] = {"op": pa.array(range(len(ops)), pa.uint16())}
    columns |= {name: [getattr(op, name) for op in ops] for name in Op._fields}
    write_table(pa.table(columns), attempt.folder / _OPERATIONS)


def _read_operations(folder: Path) -> dict[Op, int]:
    try:
        rows = read_table(folder / _OPERATIONS).to_pylist()
    except (OSError, pa.ArrowException):
        return {}
    return {Op(row["name"], row["kind"], row["group"]): row["op"] for row in rows}


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return

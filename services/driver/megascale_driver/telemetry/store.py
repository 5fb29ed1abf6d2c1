"""Spans and counters of all jobs in parquet files, read with duckdb.

    FOLDER/JOB/attempt-000001/operations.parquet             op, name, kind, group
    FOLDER/JOB/attempt-000001/spans-FIRST-LAST-N.parquet     one row per span of these steps
    FOLDER/JOB/attempt-000001/counters-FIRST-LAST-N.parquet  node, name, target, at_ns, value

``start_ns`` of a span is Unix time on the clock of the rank's node. FIRST and LAST are steps for
spans and Unix seconds for counters. Small files of an attempt are merged. The oldest files are
removed when they exceed the limit of age, or the folder its limit of size.

All methods block; they are called in one thread (Note [One store thread] in
:mod:`megascale_driver.telemetry.intake`).
"""

from __future__ import annotations

import os
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import parquet

from megascale.v1 import link_pb2
from megascale_common.node.spans.ops import MAX_OPS, Op
from megascale_common.node.spans.record import SPAN, from_columns
from megascale_driver.analysis.spans.decline import CounterChange, StepWindows
from megascale_driver.analysis.spans.table import RECORD
from megascale_job.names import is_dns_label

FLUSH_S = 10.0
FLUSH_SPANS = 1 << 18  # 8 MiB
MAX_ATTEMPT_OPS = 4096  # different operations of all ranks together
TRIM_S = 60.0
_OPERATIONS = "operations.parquet"
_SCHEMA = pa.schema([(name, pa.from_numpy_dtype(RECORD[name])) for name in RECORD.names or ()])
_RANK = np.dtype(np.uint32)
_SCHEMA = _SCHEMA.insert(0, pa.field("rank", pa.from_numpy_dtype(_RANK)))

Columns = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class _Attempt:
    """Held state of one attempt: its operations by number, and spans not yet in a file."""

    folder: Path
    ops: dict[Op, int]
    parts: list[tuple[int, npt.NDArray[Any]]] = field(default_factory=list)
    count: int = 0
    since_s: float = 0.0
    newest_step: int = -1
    newest_of: dict[int, int] = field(default_factory=dict)  # newest step by rank, in this process


class SpanStore:
    """The folder of spans, limited to ``most_bytes`` and to files of at most ``most_age_s``."""

    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        most_age_s: float,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._most_age_s = most_age_s
        self._now_s = now_s
        self._attempts: dict[tuple[str, int], _Attempt] = {}
        self._trimmed_s = now_s()
        self._files = 0
        self.counters = CounterStore(folder, now_s)
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, batches: Iterable[link_pb2.ReportSpansRequest]) -> Counter[str]:
        """Take batches; returns how many of their spans are stored, and how many damaged.

        Raises:
            OSError: the folder cannot be written; spans that were not written are lost.
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
        """Write all held spans and counters to files."""
        for attempt in self._attempts.values():
            self._write(attempt)
        self.counters.flush()

    def newest_step(self, job: str, attempt: int) -> int:
        """The newest step with spans of any rank; -1: none."""
        return self._attempt(job, attempt).newest_step

    def complete_step(self, job: str, attempt: int) -> int:
        """The newest step for which every rank that sends spans has sent some; -1: none."""
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
        """The spans of steps ``first`` to ``last``, both included.

        ``names`` and ``ranks`` select operations and ranks; empty: all.

        Returns:
            The columns of :class:`megascale_driver.analysis.spans.table.SpanTable`, in no order,
            and the operations that the column ``op`` numbers.
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
        """Remove the oldest files beyond the limits of size and age, then empty folders."""
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
        """Keep the records for the next file; False if the attempt has too many operations.

        Other attempts of the job are over: their spans are written, and they are forgotten.
        """
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
        parts = attempt.parts
        attempt.parts = []
        attempt.count = 0
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
    """The spans of a batch; None if the batch is damaged."""
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
    # Not pyarrow's own conversion: up to version 19 at least it needs pandas.
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


# Parquet files of one attempt: folder, names, writing, merging.

MERGE_FILES = 64
SMALL_BYTES = 1 << 20


def attempt_folder(folder: Path, job: str, attempt: int) -> Path:
    """The folder with the files of an attempt."""
    return folder / job / f"attempt-{attempt:06d}"


def bounds_of(path: Path) -> tuple[int, int] | None:
    """FIRST and LAST in the name of a file; None for a file that is not one of ours."""
    parts = path.name.split("-")
    if len(parts) != 4 or not (parts[1].isdecimal() and parts[2].isdecimal()):
        return None
    return int(parts[1]), int(parts[2])


def write_table(table: pa.Table, path: Path) -> None:
    """Write the table under a temporary name and rename it: no query reads half of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    parquet.write_table(table, temporary, compression="zstd")
    os.replace(temporary, path)


def read_table(path: Path) -> pa.Table:
    """Read one whole file.

    ``pyarrow.parquet.read_table`` would first import the code that reads folders, which takes
    0.06 s and is not needed here.

    Raises:
        OSError, pyarrow.ArrowException: the file does not exist, or is damaged.
    """
    with parquet.ParquetFile(path) as file:
        return file.read()


def merge_small(folder: Path, pattern: str, name: Callable[[int, int], str]) -> None:
    """Replace many small files by one; ``name`` makes its name from its bounds.

    The new file is written before the old ones are removed: a crash in between leaves rows twice,
    but loses none.
    """
    small = sorted(p for p in folder.glob(pattern) if p.stat().st_size < SMALL_BYTES)
    if len(small) < MERGE_FILES:
        return
    table = pa.concat_tables([read_table(path) for path in small]).unify_dictionaries()
    bounds = [found for path in small if (found := bounds_of(path))]
    first, last = min(one for one, _ in bounds), max(one for _, one in bounds)
    write_table(table, folder / name(first, last))
    for path in small:
        path.unlink(missing_ok=True)


# Counters of nodes. The store of spans applies its limits of size and age to their files too.

FLUSH_COUNTERS_S = 30.0
FLUSH_ROWS = 1 << 17
MAX_COUNTERS = 256  # per batch
MAX_NAME_CHARS = 128
LEAST_SAMPLES = 3  # per window: with fewer, a mean says nothing
_COUNTER_SCHEMA = pa.schema(
    [
        *((name, pa.dictionary(pa.int32(), pa.string())) for name in ("node", "name", "target")),
        ("at_ns", pa.int64()),
        ("value", pa.float64()),
    ]
)
# `rise` is for counters that only rise: the rise per second from the first to the last sample. A
# counter that fell in between (its host was restarted) is left out afterwards.
_CHANGES = """
SELECT node, name, target, at_ns >= split_ns AS later, count(*) AS samples, avg(value) AS mean,
  (arg_max(value, at_ns) - arg_min(value, at_ns)) / (max(at_ns) - min(at_ns)) * 1e9 AS rise
FROM read_parquet($files) JOIN windows USING (node)
WHERE at_ns BETWEEN first_ns AND last_ns
GROUP BY ALL ORDER BY ALL
"""


@dataclass(slots=True)
class _Held:
    """Rows of one attempt that are not yet in a file."""

    rows: list[tuple[str, str, str, int, float]] = field(default_factory=list)
    since_s: float = 0.0


class CounterStore:
    """The counters, in the same folder as the spans."""

    def __init__(self, folder: Path, now_s: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._now_s = now_s
        self._held: dict[tuple[str, int], _Held] = {}

    def add(self, batch: link_pb2.ReportSpansRequest) -> bool:
        """Keep the counters of a batch for the next file; False if there are invalid ones."""
        counters = batch.counters
        if len(counters) > MAX_COUNTERS or any(
            len(each.name) > MAX_NAME_CHARS or len(each.target) > MAX_NAME_CHARS
            for each in counters
        ):
            return False
        key = batch.job, batch.attempt
        held = self._held.setdefault(key, _Held(since_s=self._now_s()))
        at_ns = batch.counters_at_unix_ns
        held.rows += [(batch.node, each.name, each.target, at_ns, each.value) for each in counters]
        return True

    def write_due(self) -> None:
        """Write the rows of attempts that hold many rows, or have held rows for long.

        Raises:
            OSError: the folder cannot be written; rows that were not written are lost.
        """
        now_s = self._now_s()
        for key, held in list(self._held.items()):
            if len(held.rows) >= FLUSH_ROWS or now_s - held.since_s >= FLUSH_COUNTERS_S:
                self._write(key)

    def flush(self) -> None:
        """Write all held rows to files."""
        for key in list(self._held):
            self._write(key)

    def changes(
        self, job: str, attempt: int, windows: Mapping[str, StepWindows]
    ) -> list[CounterChange]:
        """Changes of counters between the two windows of each node.

        Only files that overlap the windows are read, so the number of rows is bounded.
        """
        self._write((job, attempt))
        if not windows:
            return []
        first_s = min(one.first_ns for one in windows.values()) // 10**9
        last_s = max(one.last_ns for one in windows.values()) // 10**9
        files = [
            str(path)
            for path in attempt_folder(self._folder, job, attempt).glob("counters-*.parquet")
            if (times := bounds_of(path)) and times[0] <= last_s and times[1] >= first_s
        ]
        if not files:
            return []
        given = pa.table(
            {
                "node": list(windows),
                "first_ns": [one.first_ns for one in windows.values()],
                "split_ns": [one.split_ns for one in windows.values()],
                "last_ns": [one.last_ns for one in windows.values()],
            }
        )
        with duckdb.connect() as connection:
            connection.register("windows", given)
            rows = connection.execute(_CHANGES, {"files": files}).fetchall()
        found: dict[tuple[str, str, str], dict[bool, float]] = {}
        for node, name, target, later, samples, mean, rise in rows:
            value = rise if name.endswith("_total") else mean
            if samples >= LEAST_SAMPLES and value is not None:
                found.setdefault((node, name, target), {})[later] = value
        return [
            CounterChange(*key, before=means[False], after=means[True])
            for key, means in found.items()
            if len(means) == 2 and not (key[1].endswith("_total") and min(means.values()) < 0)
        ]

    def _write(self, key: tuple[str, int]) -> None:
        held = self._held.pop(key, None)
        if held is None or not held.rows:
            return
        columns = dict(zip(_COUNTER_SCHEMA.names, zip(*held.rows, strict=True), strict=True))
        table = pa.table({name: list(column) for name, column in columns.items()}).cast(
            _COUNTER_SCHEMA
        )
        times = columns["at_ns"]
        folder = attempt_folder(self._folder, *key)
        bounds = min(times) // 10**9, max(times) // 10**9
        write_table(table, folder / _name(*bounds))
        merge_small(folder, "counters-*.parquet", _name)


def _name(first_s: int, last_s: int) -> str:
    return f"counters-{first_s:010d}-{last_s:010d}-{time.time_ns():x}.parquet"

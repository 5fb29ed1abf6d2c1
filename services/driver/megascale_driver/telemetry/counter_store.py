"""Counters of nodes in parquet files beside the spans of their attempt, read with duckdb.

    FOLDER/JOB/attempt-000001/counters-FIRST-LAST-N.parquet  node, name, target, at_ns, value

FIRST and LAST are Unix seconds. All methods block: the thread of the spans' store calls them, and
its limits of size and age hold for these files too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import pyarrow as pa

from megascale.v1 import link_pb2
from megascale_driver.analysis.spans.decline import CounterChange, StepWindows
from megascale_driver.telemetry.files import attempt_folder, bounds_of, merge_small, write_table

FLUSH_S = 30.0
FLUSH_ROWS = 1 << 17
MAX_COUNTERS = 256  # of a batch
MAX_NAME_CHARS = 128
LEAST_SAMPLES = 3  # in a window: fewer show no mean
_SCHEMA = pa.schema(
    [
        *((name, pa.dictionary(pa.int32(), pa.string())) for name in ("node", "name", "target")),
        ("at_ns", pa.int64()),
        ("value", pa.float64()),
    ]
)
# Of a counter that only rises the rise per second between the first and the last sample; one that
# fell in between (a host that was started again) says nothing.
_CHANGES = """
SELECT node, name, target, at_ns >= split_ns AS later, count(*) AS samples, avg(value) AS mean,
  (arg_max(value, at_ns) - arg_min(value, at_ns)) / (max(at_ns) - min(at_ns)) * 1e9 AS rise
FROM read_parquet($files) JOIN windows USING (node)
WHERE at_ns BETWEEN first_ns AND last_ns
GROUP BY ALL ORDER BY ALL
"""


@dataclass(slots=True)
class _Held:
    """Rows of one attempt that no file has yet, by column."""

    rows: list[tuple[str, str, str, int, float]] = field(default_factory=list)
    since_s: float = 0.0


class CounterStore:
    """The counters in the folder of a store of spans."""

    def __init__(self, folder: Path, now_s: Callable[[], float] = time.time) -> None:
        self._folder, self._now_s = folder, now_s
        self._held: dict[tuple[str, int], _Held] = {}

    def add(self, batch: link_pb2.ReportSpansRequest) -> bool:
        """Keep the counters of a batch for the next file; False if they are not what they say."""
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
        """Write what is held for long or is much.

        Raises:
            OSError: the folder cannot be written; what was not written is gone.
        """
        now_s = self._now_s()
        for key, held in list(self._held.items()):
            if len(held.rows) >= FLUSH_ROWS or now_s - held.since_s >= FLUSH_S:
                self._write(key)

    def flush(self) -> None:
        """Write all that is held to files."""
        for key in list(self._held):
            self._write(key)

    def changes(
        self, job: str, attempt: int, windows: Mapping[str, StepWindows]
    ) -> list[CounterChange]:
        """How counters differ between the two windows of each node; it reads bounded rows only."""
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
        columns = dict(zip(_SCHEMA.names, zip(*held.rows, strict=True), strict=True))
        table = pa.table({name: list(column) for name, column in columns.items()}).cast(_SCHEMA)
        times = columns["at_ns"]
        folder = attempt_folder(self._folder, *key)
        bounds = min(times) // 10**9, max(times) // 10**9
        write_table(table, folder / _name(*bounds))
        merge_small(folder, "counters-*.parquet", _name)


def _name(first_s: int, last_s: int) -> str:
    return f"counters-{first_s:010d}-{last_s:010d}-{time.time_ns():x}.parquet"

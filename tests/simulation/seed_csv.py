"""The CSV of many seeds: a line as each seed ends, so a run that is cut off goes on where it was.

A line has the setup of its seed and every detection time, so the figures of a resumed run are those
of all its seeds. Lines come in the order in which seeds end. Every figure is simulated.
"""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import Any

from tests.simulation.shell.run import Result, Setup

SETUP = ("nodes", "days", "rate", "storms", "spares", "skip")
COLUMNS = (
    "seed", *SETUP, "digest", "ettr", "recoveries", "detections", "detect_p50_s", "detect_p99_s",
    "false_evictions", "node_days", "faults", "cpu_s", "broken", "detected_s",
)  # fmt: skip


class SeedCsv:
    """The file of one run; times in seconds."""

    def __init__(self, path: str, setup: Setup) -> None:
        """Open or continue a file.

        Raises:
            ValueError: its seeds ran with another setup, or it is no such file.
        """
        self._path = Path(path)
        self._setup = [str(getattr(setup, name)) for name in SETUP]
        self.known: dict[int, Result] = {}
        rows = self._rows() if self._path.exists() else []
        # Written anew: a line that was cut off in the middle must not stand before the next one.
        fresh = self._path.with_name(f"{self._path.name}.new")
        with fresh.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([list(COLUMNS), *rows])
        fresh.replace(self._path)

    def add(self, result: Result) -> None:
        """Append the line of a seed that has ended."""
        detected = sorted(result.detected_s)
        row = [
            result.seed, *self._setup, result.digest, round(result.ettr, 5), result.recoveries,
            len(detected), round(percentile(detected, 0.50), 2),
            round(percentile(detected, 0.99), 2), result.false_evictions,
            round(result.node_days, 2), result.fault_count, round(result.cpu_s, 2),
            result.broken, " ".join(f"{at_s:.2f}" for at_s in detected),
        ]  # fmt: skip
        with self._path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow(row)
            file.flush()
            os.fsync(file.fileno())

    def _rows(self) -> list[list[str]]:
        """The whole lines of the file; fills :attr:`known`."""
        with self._path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
        if lines and tuple(lines[0]) != COLUMNS:
            raise ValueError(f"{self._path} is not a file of seeds of this build: name another")
        found = []
        for line in lines[1:]:
            if len(line) != len(COLUMNS):
                continue  # cut off: that seed runs again
            row = dict(zip(COLUMNS, line, strict=True))
            if line[1 : 1 + len(SETUP)] != self._setup:
                theirs = ", ".join(f"{name} {row[name]}" for name in SETUP)
                raise ValueError(f"{self._path} has seeds with {theirs}: name another file")
            self.known[int(row["seed"])] = _result(row)
            found.append(line)
        return found


def percentile(values: list[float], share: float) -> float:
    """By nearest rank; 0 of nothing. ``values`` are sorted."""
    return values[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def _result(row: dict[str, Any]) -> Result:
    return Result(
        int(row["seed"]),
        broken=row["broken"],
        digest=row["digest"],
        ettr=float(row["ettr"]),
        recoveries=int(row["recoveries"]),
        false_evictions=int(row["false_evictions"]),
        detected_s=[float(at_s) for at_s in row["detected_s"].split()],
        node_days=float(row["node_days"]),
        fault_count=int(row["faults"]),
        cpu_s=float(row["cpu_s"]),
    )

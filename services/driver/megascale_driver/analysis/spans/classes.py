"""Ranks compared with the ranks that do the same work.

Spans are of one class if they have the same operation, pipeline stage, chunk, micro-batch, step and
number: their ranks do the same work, so they should take the same time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_driver.analysis.spans.table import SpanTable

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class OutlierRule:
    """Limits for naming a node: see Note [Straggler verdicts] in outliers.

    Windows of ``window_steps`` steps are counted back from the newest step. ``least_deviation`` is
    the lower bound of the spread. A window with fewer than ``least_ranks`` ranks does not count,
    and within a window no rank with fewer than ``least_samples`` steps.
    """

    window_steps: int = 10
    windows: int = 5
    flagged_windows: int = 3
    least_ratio: float = 1.05
    least_z: float = 6.0
    least_deviation: float = 0.002
    least_ranks: int = 3
    least_samples: int = 5

    def windows_of(self, steps: npt.NDArray[np.uint32]) -> Iterator[tuple[int, int]]:
        """First and last step of each window in ``steps``, the newest first.

        An incomplete window is left out: it would be compared over fewer steps than the others.
        """
        newest, oldest = int(steps.max()), int(steps.min())
        for window in range(self.windows):
            last = newest - window * self.window_steps
            first = last - self.window_steps + 1
            if first < oldest:
                break
            yield first, last


@dataclass(frozen=True, slots=True, eq=False)
class Ratios:
    """Time over the median of its class, for each (rank, step) with spans of one operation.

    Columns of equal length. ``ratio``: mean over the spans of the step, each weighted with its
    class's median. ``excess_ns``: time above the medians, summed over the spans of the step.
    """

    rank: npt.NDArray[np.uint32]
    step: npt.NDArray[np.uint32]
    ratio: Floats
    excess_ns: Floats


def ratios(table: SpanTable, op: str, least_ranks: int = 3) -> Ratios:
    """Ratios of the spans of ``op``, without classes of fewer than ``least_ranks`` ranks.

    A smaller class cannot show which rank is slow: with two ranks it could be either.
    """
    spans = table.of_op(op)
    number, count = classes_of(spans)
    kept = count[number] >= least_ranks if len(spans) else np.empty(0, np.bool_)
    spans, number = spans.where(kept), number[kept]
    duration = spans.duration_ns.astype(np.float64)
    median = class_medians(duration, number)[number] if len(spans) else duration
    keys = np.stack([spans.rank, spans.step])
    pairs, place = np.unique(keys, axis=1, return_inverse=True)
    place = place.reshape(-1)  # its shape differs between releases of numpy
    spent = np.bincount(place, duration, pairs.shape[1]).astype(np.float64)
    usual = np.bincount(place, median, pairs.shape[1]).astype(np.float64)
    share = np.divide(spent, usual, out=np.ones_like(spent), where=usual > 0)
    return Ratios(pairs[0], pairs[1], share, spent - usual)


def classes_of(spans: SpanTable) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The class number of each span, and the number of spans of each class."""
    columns: list[npt.NDArray[Any]] = [
        spans.op,
        spans.step,
        spans.along("pp") if len(spans) else spans.op,
        spans.chunk,
        spans.micro_batch,
        spans.seq,
    ]
    keys = np.stack([column.astype(np.int64) for column in columns])
    _, number, count = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    return number.reshape(-1), count


def class_medians(values: Floats, number: npt.NDArray[np.int64]) -> Floats:
    """Median of the values of each class; classes are numbered from 0 without gaps."""
    order = np.lexsort((values, number))
    ordered = values[order]
    begins = np.searchsorted(number[order], np.arange(int(number.max()) + 1))
    counts = np.diff(np.append(begins, len(values)))
    low, high = begins + (counts - 1) // 2, begins + counts // 2
    middle: Floats = (ordered[low] + ordered[high]) / 2
    return middle


def rank_medians(
    rank: npt.NDArray[np.uint32], values: Floats, ranks: int, least_samples: int = 1
) -> Floats:
    """Median of each rank's values; NaN for a rank with fewer than ``least_samples``."""
    found: Floats = np.full(ranks, np.nan)
    # Sort once and slice per rank: a mask per rank would read all values once for each rank.
    order = np.argsort(rank, kind="stable")
    begins = np.searchsorted(rank[order], np.arange(ranks + 1))
    for number in range(ranks):
        own = values[order[begins[number] : begins[number + 1]]]
        if len(own) >= least_samples:
            found[number] = np.median(own)
    return found

"""Like with like: the ratio of each rank's spans to the median of the ranks that do the same work.

Ranks do the same work in a span of the same operation, pipeline stage, chunk, micro-batch, step and
number. Of a collective, which ends everywhere together, the lateness of a rank's entry is compared
instead: the ranks that wait in it are not the slow ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_driver.analysis.spans.table import SpanTable

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Ratios:
    """Of each (rank, step) with spans of one operation: time over the median of its class.

    Columns of equal length. ``ratio`` is the mean over the spans of the step, each weighted with
    its class's median; ``excess_ns`` the time above the medians, over the spans of the step.
    """

    rank: npt.NDArray[np.uint32]
    step: npt.NDArray[np.uint32]
    ratio: Floats
    excess_ns: Floats


def ratios(table: SpanTable, op: str, least_ranks: int = 3) -> Ratios:
    """Ratios of the spans of ``op``; classes of fewer than ``least_ranks`` ranks are left out.

    Their median says too little: of two ranks none is the slow one.
    """
    spans = table.of_op(op)
    number, count = _classes(spans)
    kept = count[number] >= least_ranks if len(spans) else np.empty(0, np.bool_)
    spans, number = spans.where(kept), number[kept]
    duration = spans.duration_ns.astype(np.float64)
    median = _medians(duration, number)[number] if len(spans) else duration
    keys = np.stack([spans.rank, spans.step])
    pairs, place = np.unique(keys, axis=1, return_inverse=True)
    place = place.reshape(-1)
    spent = np.bincount(place, duration, pairs.shape[1]).astype(np.float64)
    usual = np.bincount(place, median, pairs.shape[1]).astype(np.float64)
    share = np.divide(spent, usual, out=np.ones_like(spent), where=usual > 0)
    return Ratios(pairs[0], pairs[1], share, spent - usual)


def lateness(table: SpanTable, op: str) -> Ratios:
    """Of each (rank, step): by how much it enters the collectives of ``op`` behind the median.

    ``excess_ns`` is the mean lateness over the step's spans, ``ratio`` 1 plus its share of the
    step's time where spans of the step itself are there. The clocks of the nodes have to agree.
    """
    spans = table.of_op(op)
    number, _ = _classes(spans)
    start = spans.start_ns - (spans.start_ns.min() if len(spans) else 0)
    late: Floats = start.astype(np.float64)
    if len(spans):
        late = late - _medians(late, number)[number]
    keys = np.stack([spans.rank, spans.step])
    pairs, place = np.unique(keys, axis=1, return_inverse=True)
    place = place.reshape(-1)
    count = np.bincount(place, minlength=pairs.shape[1])
    mean: Floats = np.bincount(place, late, pairs.shape[1]) / np.maximum(count, 1)
    steps = table.of_op("step").duration_ns
    whole = float(np.median(steps)) if len(steps) else 0.0
    share = 1 + mean / whole if whole else np.ones_like(mean)
    return Ratios(pairs[0], pairs[1], share, mean)


def _classes(spans: SpanTable) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Number of each span's class, and how many spans each class has."""
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


def _medians(values: Floats, number: npt.NDArray[np.int64]) -> Floats:
    """Median of the values of each class; the classes are numbered from 0 without gaps."""
    order = np.lexsort((values, number))
    ordered = values[order]
    begins = np.searchsorted(number[order], np.arange(int(number.max()) + 1))
    counts = np.diff(np.append(begins, len(values)))
    low, high = begins + (counts - 1) // 2, begins + counts // 2
    middle: Floats = (ordered[low] + ordered[high]) / 2
    return middle

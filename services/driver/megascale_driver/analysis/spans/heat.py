"""The heat map of a job: what each rank takes for each operation, and beside those alike.

MegaScale section 5.1. A row is an operation; a cell is a rank: the median over the steps of the
time in a step, and the median ratio to the ranks that do the same work
(:mod:`megascale_driver.analysis.spans.classes`). Computation is without the waits inside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megascale_driver.analysis.spans.classes import Floats, ratios
from megascale_driver.analysis.spans.own_time import without_waits
from megascale_driver.analysis.spans.table import SpanTable


@dataclass(frozen=True, slots=True, eq=False)
class HeatRow:
    """One operation. ``median_ns`` and ``ratio``: shape ``[ranks]``, NaN where nothing is known.

    ``ratio`` is NaN as well where fewer than three ranks do the same work.
    """

    name: str
    kind: str
    median_ns: Floats
    ratio: Floats


def heat_map(table: SpanTable, names: tuple[str, ...] = ()) -> list[HeatRow]:
    """The rows of the operations with these names (all: empty), the longest first."""
    table = without_waits(table)
    kinds: dict[str, str] = {op.name: op.kind for op in table.ops}
    wanted = [name for name in kinds if not names or name in names]
    rows = []
    for name in wanted:
        spans = table.of_op(name)
        if not len(spans):
            continue
        compared = ratios(table, name)
        ranks = len(table.nodes)
        median = _medians(*_per_step(spans), ranks)
        rows.append(
            HeatRow(name, kinds[name], median, _medians(compared.rank, compared.ratio, ranks))
        )
    return sorted(rows, key=lambda row: -float(np.nanmedian(row.median_ns)))


def _per_step(spans: SpanTable) -> tuple[npt.NDArray[np.uint32], Floats]:
    """The time of each (rank, step)."""
    pairs, place = np.unique(np.stack([spans.rank, spans.step]), axis=1, return_inverse=True)
    spent: Floats = np.bincount(
        place.reshape(-1), spans.duration_ns.astype(np.float64), pairs.shape[1]
    ).astype(np.float64)
    return pairs[0], spent


def _medians(rank: npt.NDArray[np.uint32], values: Floats, ranks: int) -> Floats:
    found: Floats = np.full(ranks, np.nan)
    order = np.argsort(rank, kind="stable")
    begins = np.searchsorted(rank[order], np.arange(ranks + 1))
    for number in range(ranks):
        own = values[order[begins[number] : begins[number + 1]]]
        if len(own):
            found[number] = np.median(own)
    return found

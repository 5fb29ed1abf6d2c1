"""Made-up spans of overlapped data parallelism: a forward waits inside for the last update."""

from __future__ import annotations

import numpy as np

from megascale_common.node.spans import ops
from megascale_driver.analysis.spans.table import COLUMNS, SpanTable
from megascale_job.layout import RankLayout

MS = 1_000_000


def overlapped(factors: dict[int, float], first: int = 1, steps: int = 40) -> SpanTable:
    """Spans of 4 data-parallel ranks whose forwards wait inside for parameters.

    ``factors``: how many times as long as the others' the optimizer of some ranks takes.
    """
    ranks, random = 4, np.random.default_rng(first)
    names = (
        *(ops.STEP, ops.FORWARD, ops.Op("all_gather_wait", "collective", "dp")),
        *(ops.BACKWARD, ops.OPTIMIZER),
    )
    slow = np.array([factors.get(rank, 1.0) for rank in range(ranks)])
    rows: list[tuple[int, ...]] = []
    clock = np.full(ranks, 10**15)
    for step in range(first, first + steps):
        begin, arrived = clock, np.full(ranks, clock.max() + 2 * MS)
        forward, backward, update = (
            (length * MS * random.normal(1, 0.01, ranks)).astype(np.int64)
            for length in (30, 60, 20)
        )
        update = (update * slow).astype(np.int64)
        ends = np.cumsum([arrived, forward, backward, update], axis=0)
        clock = ends[-1]
        for rank in range(ranks):
            places = [
                *((0, begin, clock), (1, begin, ends[1]), (2, begin, arrived)),
                *((3, ends[1], ends[2]), (4, ends[2], clock)),
            ]
            rows += [
                (rank, step, op, 0xFFFF, 0, one[rank], other[rank] - one[rank], 0)
                for op, one, other in places
            ]
    typed = {
        name: column.astype(dtype)
        for (name, dtype), column in zip(COLUMNS.items(), np.array(rows).T, strict=True)
    }
    nodes = tuple(f"n{rank + 1}" for rank in range(ranks))
    return SpanTable(**typed, ops=names, layout=RankLayout(dp=ranks), nodes=nodes)

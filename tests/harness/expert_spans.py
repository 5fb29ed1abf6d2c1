"""Made-up spans of ranks with experts, whose rows and whose devices can differ."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from megascale_common.node.spans import ops
from megascale_common.node.spans.record import NO_MICRO_BATCH, SUMMED, pack_aux
from megascale_driver.analysis.spans.table import COLUMNS, SpanTable
from megascale_job.layout import RankLayout

MS = 1_000_000
ALL_REDUCE = ops.Op("all_reduce", "collective", "world")
OPS = (
    ops.STEP,
    ops.FORWARD,
    ops.BACKWARD,
    ops.OPTIMIZER,
    ops.DISPATCH,
    ops.EXPERTS,
    ops.COMBINE,
    ALL_REDUCE,
    ops.EXPERT_SHARE,
    ops.HOT_EXPERT,
)
DENSE_MS, EXPERTS_MS, UPDATE_MS, NETWORK_MS = 10.0, 10.0, 5.0, 1.0
HOT_AT = (5, 17, 4.2)  # layer, expert and load of each hot rank


def spans(
    shares: Mapping[int, float],
    slow: Mapping[int, float] | None = None,
    *,
    layout: RankLayout = RankLayout(dp=8, ep=4),
    first: int = 1,
    steps: int = 55,
    noise: float = 0.01,
    parts: bool = True,
    figures: bool = True,
    device_share: float = 1.0,
    nodes: int = 0,
) -> SpanTable:
    """Two micro-batches per step of ``layout``, each rank on a node of its own unless ``nodes``.

    Args:
        shares: rows of the experts of some ranks; the others are even. Ranks of an ep group wait
            in combine for the one with the most, and all ranks at the end of a step.
        slow: how many times as long the device of some ranks takes for everything.
        parts: whether experts, dispatch and combine have spans; without, a layer is one graph.
        figures: whether the shares are passed on, as of a trainer with experts.
        device_share: part of the experts' time that depends on the rows.
    """
    ranks, random, slow = layout.world_size, np.random.default_rng(first), slow or {}
    device = np.array([slow.get(rank, 1.0) for rank in range(ranks)])
    share = np.array([shares.get(rank, 1.0) for rank in range(ranks)])
    costs = 1 - device_share + device_share * share
    groups = [list(layout.members(rank, "ep")) for rank in range(ranks)]
    rows: list[tuple[int, ...]] = []
    clock = np.zeros(ranks)
    summed = pack_aux(flags=SUMMED)

    def add(rank: int, step: int, op: ops.Op, batch: int, seq: int, at: float, took: float) -> None:
        aux = summed if op in ops.SUMMED_OPS else 0
        begin, end = round(at * MS), round((at + took) * MS)
        rows.append((rank, step, OPS.index(op), batch, seq, begin, end - begin, aux))

    for step in range(first, first + steps):
        began = clock.copy()
        for batch in range(2):
            for number, (op, passes) in enumerate(((ops.FORWARD, 1), (ops.BACKWARD, 2))):
                dense, experts = (
                    passes * usual * device * random.normal(1, noise, ranks)
                    for usual in (DENSE_MS, EXPERTS_MS * costs)
                )
                done = clock + dense + NETWORK_MS + experts
                left = np.array([done[group].max() for group in groups]) + NETWORK_MS
                for rank in range(ranks):
                    at, seq = clock[rank], 2 * batch + number
                    add(rank, step, op, batch, batch, at, left[rank] - at)
                    if parts:
                        into, out = at + dense[rank], done[rank]
                        add(rank, step, ops.DISPATCH, batch, seq, into, NETWORK_MS)
                        add(rank, step, ops.EXPERTS, batch, seq, into + NETWORK_MS, experts[rank])
                        add(rank, step, ops.COMBINE, batch, seq, out, left[rank] - out)
                clock = left
        update = UPDATE_MS * device * random.normal(1, noise, ranks)
        for rank in range(ranks):
            add(rank, step, ops.OPTIMIZER, NO_MICRO_BATCH, 0, clock[rank], update[rank])
        ended = np.full(ranks, (clock + update).max() + NETWORK_MS)
        for rank in range(ranks):
            at = clock[rank] + update[rank]
            add(rank, step, ALL_REDUCE, NO_MICRO_BATCH, 0, at, ended[rank] - at)
        clock = ended
        for rank in range(ranks):
            add(rank, step, ops.STEP, NO_MICRO_BATCH, 0, began[rank], clock[rank] - began[rank])
            if figures:
                value = share[rank] * random.normal(1, noise)
                add(rank, step, ops.EXPERT_SHARE, NO_MICRO_BATCH, 0, clock[rank], 0)
                rows[-1] = (*rows[-1][:6], ops.figure_ns(value), 0)
                if share[rank] > 1:
                    layer, expert, load = HOT_AT
                    add(rank, step, ops.HOT_EXPERT, expert, layer, clock[rank], 0)
                    rows[-1] = (*rows[-1][:6], ops.figure_ns(load), 0)
    columns = np.array(rows, np.int64).T
    typed = {
        name: column.astype(dtype)
        for (name, dtype), column in zip(COLUMNS.items(), columns, strict=True)
    }
    typed["start_ns"] += 10**15
    names = tuple(f"n{rank * (nodes or ranks) // ranks}" for rank in range(ranks))
    return SpanTable(**typed, ops=OPS, layout=layout, nodes=names)

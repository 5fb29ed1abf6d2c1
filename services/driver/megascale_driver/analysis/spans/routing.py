"""Time that routing explains: ranks whose experts have more rows than those of other ranks.

Note [Hot experts]. The experts of a rank take time in proportion to their rows, and a router can
send one rank twice as many rows as another. Such a rank is slower in every measure of time, on the
best device. So its share of the rows is measured too (the figure ``expert_share``), and the time
that it explains is taken out before ranks are compared: what is left is time of the same work.

A share explains at most what it costs, and a tenth more. The ranks of a class show what the mean
rows cost, by their times over their shares. A share 0.8 above the median of the class explains 0.8
times that cost, and no more than the rank is in fact above the median time. A rank that is slow
beyond that stays slow in what is left. Fewer rows explain less time in the same way, up to the time
by which the rank is in fact below the median: a rank with few rows is never made to look slow,
whatever part of its time does not depend on rows.

The time of experts is that of the spans ``experts`` inside a forward or backward. Where there are
none, because a whole layer is one CUDA graph, all of the forward or backward may depend on the
rows, and the wait for the hottest rank of the ep group is inside it too. Then the largest share of
the group explains the time of all its ranks, and more than it costs, so that routing is not taken
for a slow device.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megascale_common.node.spans.ops import (
    BACKWARD,
    BACKWARD_WEIGHT,
    COMBINE,
    DISPATCH,
    EXPERT_SHARE,
    EXPERTS,
    FORWARD,
    HOT_EXPERT,
    figure_ns,
)
from megascale_driver.analysis.hot_experts import HotExpert, HotRank
from megascale_driver.analysis.spans.classes import (
    Floats,
    OutlierRule,
    class_medians,
    classes_of,
    rank_medians,
)
from megascale_driver.analysis.spans.table import (
    SpanTable,
    group_numbers,
    inside_ns,
    without_waits,
)

# The operations that have experts inside, and those of them that are compared.
AROUND = (FORWARD.name, BACKWARD.name, BACKWARD_WEIGHT.name)
# Inputs of the verdict besides the operations that are compared.
OF_EXPERTS = (DISPATCH.name, EXPERTS.name, COMBINE.name, EXPERT_SHARE.name, HOT_EXPERT.name)
LEAST_SHARE = 0.5
# Time over rows differs that much between ranks of equal speed: tiles are whole, caches are shared,
# and a share is that of all ep groups together.
SLACK = 1.1
MAX_EXPERTS = 3  # named of a rank


def routing_ns(table: SpanTable) -> Floats:
    """Per span the time that its rank's rows add to the median of its class, or save (negative).

    0 for spans without experts inside, and for a dense model. See Note [Hot experts] above.
    """
    found = np.zeros(len(table))
    if not table.is_op(EXPERT_SHARE.name).any():
        return found
    share, computing = _share_of(table), without_waits(table)
    # With the waits in between: a part can be behind one.
    inside = inside_ns(table, table.is_op(*AROUND), table.is_op(EXPERTS.name))
    for op in AROUND:
        rows = np.flatnonzero(table.is_op(op) & ~np.isnan(share))
        if not len(rows):
            continue
        spans = computing.where(_mask(rows, len(table)))
        spent, own = inside[rows], share[rows]
        if not spent.any():
            spent, own = spans.duration_ns.astype(np.float64), _largest_of_group(spans, own)
        number, _ = classes_of(spans)
        usual, middle = (class_medians(each, number)[number] for each in (spent, own))
        costs = SLACK * _cost_of_rows(spent, own, number) * (own - middle)
        excess = spent - usual
        explains = np.sign(costs) == np.sign(excess)
        found[rows] = np.where(explains, np.sign(costs) * np.minimum(abs(costs), abs(excess)), 0)
    return found


def _mask(rows: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.bool_]:
    found = np.zeros(length, np.bool_)
    found[rows] = True
    return found


def _cost_of_rows(spent: Floats, share: Floats, number: npt.NDArray[np.int64]) -> Floats:
    """For each span the time that its class needs for the mean rows: the median of its ranks.

    Ranks with fewer rows than half of the mean are left out: much of their time is for no row.
    """
    chosen = share >= LEAST_SHARE
    found = np.zeros(int(number.max()) + 1)
    if chosen.any():
        classes, place = np.unique(number[chosen], return_inverse=True)
        found[classes] = class_medians(spent[chosen] / share[chosen], place.reshape(-1))
    return found[number]


def _largest_of_group(spans: SpanTable, share: Floats) -> Floats:
    """For each span the largest share of the ranks of its ep group in its step."""
    group = group_numbers(spans.layout, "ep")[spans.rank]
    _, place = np.unique(np.stack([group, spans.step]), axis=1, return_inverse=True)
    place = place.reshape(-1)
    largest = np.zeros(int(place.max()) + 1)
    np.maximum.at(largest, place, share)
    return largest[place]


def _share_of(table: SpanTable) -> Floats:
    """For each span the share of its rank in its step, else its rank's median; NaN: not known."""
    figures = table.of_op(EXPERT_SHARE.name)
    values = _values(figures)
    known = rank_medians(figures.rank, values, len(table.nodes))[table.rank]
    length = int(table.step.max()) + 1
    keys, place = np.unique(
        figures.rank.astype(np.int64) * length + figures.step, return_index=True
    )
    wanted = table.rank.astype(np.int64) * length + table.step
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[place[at]], known)


def expert_shares(table: SpanTable) -> Floats:
    """Each rank's share of the rows, the median over the steps; NaN: not known. Shape ``[ranks]``.

    Empty for a dense model.
    """
    figures = table.of_op(EXPERT_SHARE.name)
    if not len(figures):
        return np.empty(0)
    return rank_medians(figures.rank, _values(figures), len(table.nodes))


def hot_ranks(table: SpanTable, rule: OutlierRule = OutlierRule()) -> list[HotRank]:
    """The ranks whose rows make them slower now, the hottest first.

    As for a slow node, three of the last five windows have to show it. Two ranks are enough for a
    comparison, because the share shows which of them is the hot one.
    """
    added = routing_ns(table)
    table = without_waits(table)
    if not added.any():
        return []
    worst: dict[int, HotRank] = {}
    for op in (FORWARD.name, BACKWARD.name):
        for found in _hot_in(table, added, op, rule):
            if found.rank not in worst or found.lost_ns > worst[found.rank].lost_ns:
                worst[found.rank] = found
    return sorted(worst.values(), key=lambda found: -found.share)


def _hot_in(table: SpanTable, added: Floats, op: str, rule: OutlierRule) -> list[HotRank]:
    chosen = table.is_op(op)
    spans, added = table.where(chosen), added[chosen]
    if not len(spans):
        return []
    number, _ = classes_of(spans)
    usual = class_medians(spans.duration_ns.astype(np.float64), number)[number]
    pairs, place = np.unique(np.stack([spans.rank, spans.step]), axis=1, return_inverse=True)
    place = place.reshape(-1)
    lost, base = (np.bincount(place, each, pairs.shape[1]) for each in (added, usual))
    ratio = 1 + np.divide(lost, base, out=np.zeros(len(base)), where=base > 0)
    ranks, steps = pairs
    windows: dict[int, list[tuple[int, int]]] = {}
    for first, last in rule.windows_of(steps):
        inside = (steps >= first) & (steps <= last)
        scores = rank_medians(ranks[inside], ratio[inside], len(table.nodes), rule.least_samples)
        for rank in np.flatnonzero(scores >= rule.least_ratio).tolist():
            windows.setdefault(rank, []).append((first, last))
    found = []
    for rank, own in windows.items():
        first, last = min(own)[0], max(own)[1]
        mine = (ranks == rank) & (steps >= first) & (steps <= last)
        figures = table.where((table.rank == rank) & (table.step >= first) & (table.step <= last))
        share = float(expert_shares(figures)[rank]) if len(own) >= rule.flagged_windows else 0.0
        # A rank with fewer rows than the mean can have more than the median: it is not hot.
        if not share >= rule.least_ratio:
            continue
        found.append(
            HotRank(
                rank=rank,
                node=table.nodes[rank],
                share=share,
                op=op,
                ratio=float(np.median(ratio[mine])),
                lost_ns=float(np.median(lost[mine])),
                since_step=first,
                last_step=last,
                experts=_hottest(figures.of_op(HOT_EXPERT.name)),
            )
        )
    return found


def _hottest(figures: SpanTable) -> tuple[HotExpert, ...]:
    """The experts that were hot in the most steps and the most strongly, with their usual loads."""
    loads: dict[tuple[int, int], list[float]] = {}
    for layer, expert, load in zip(
        figures.seq.tolist(), figures.micro_batch.tolist(), _values(figures).tolist(), strict=True
    ):
        loads.setdefault((layer, expert), []).append(load)
    ordered = sorted(loads.items(), key=lambda one: (-sum(one[1]), one[0]))
    return tuple(HotExpert(*at, float(np.median(own))) for at, own in ordered[:MAX_EXPERTS])


def _values(figures: SpanTable) -> Floats:
    return figures.duration_ns / figure_ns(1)

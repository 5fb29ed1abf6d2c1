"""One collective as all of its members have it: the spans of one group, operation, step and number.

It ends for all members together; the last to enter spends the least time in it. So its time
without waiting, and by how much the others waited, need no agreement of clocks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megascale_driver.analysis.spans.table import COLUMNS, SpanTable
from megascale_job.layout import AXES, Axis, RankLayout

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Instances:
    """Collectives with at least two members' spans.

    ``spans`` are sorted by collective; those of number i are ``spans[begin[i] : begin[i + 1]]``.
    The other columns have an entry for each collective. Group 0 of a name has its lowest ranks.
    """

    spans: SpanTable
    begin: Ints
    op: Ints
    step: Ints
    group: Ints
    shortest_ns: Ints
    longest_ns: Ints

    def __len__(self) -> int:
        return len(self.op)

    @property
    def number(self) -> Ints:
        """Of each span the number of its collective."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.begin))


def collectives(table: SpanTable) -> Instances:
    """The collectives of all groups in ``table``."""
    places = [number for number, op in enumerate(table.ops) if op.kind == "collective"]
    spans = table.where(np.isin(table.op, places))
    group = np.zeros(len(spans), np.int64)
    for place in places:
        own = spans.op == place
        group[own] = group_numbers(table.layout, table.ops[place].group)[spans.rank[own]]
    order = np.lexsort((spans.rank, spans.seq, group, spans.op, spans.step))
    spans, group = _in_order(spans, order), group[order]
    keys = np.stack([spans.step, spans.op, group, spans.seq]).astype(np.int64)
    change = np.any(np.diff(keys, axis=1) != 0, axis=0) if len(spans) else np.empty(0, np.bool_)
    begin = np.append(np.flatnonzero(np.insert(change, 0, True)) if len(spans) else [], len(spans))
    begin = begin.astype(np.int64)
    kept = np.diff(begin) >= 2
    members = np.repeat(kept, np.diff(begin))
    spans, group = spans.where(members), group[members]
    begin = np.append(0, np.cumsum(np.diff(begin)[kept])).astype(np.int64)
    first = begin[:-1]
    durations = spans.duration_ns
    return Instances(
        spans=spans,
        begin=begin,
        op=spans.op[first].astype(np.int64),
        step=spans.step[first].astype(np.int64),
        group=group[first],
        shortest_ns=np.minimum.reduceat(durations, first) if len(first) else np.empty(0, np.int64),
        longest_ns=np.maximum.reduceat(durations, first) if len(first) else np.empty(0, np.int64),
    )


def _in_order(spans: SpanTable, order: Ints) -> SpanTable:
    return replace(spans, **{name: getattr(spans, name)[order] for name in COLUMNS})


def group_numbers(layout: RankLayout, name: str) -> Ints:
    """Of each rank the number of its group of this name; an unknown name is one group of all.

    The group ``ends`` joins the ranks of the first and the last stage, which lie along ``pp``.
    """
    axis = "pp" if name == "ends" else name
    axes: tuple[Axis, ...] = tuple(known for known in AXES if known == axis) or AXES
    numbers = np.zeros(layout.world_size, np.int64)
    for number, members in enumerate(layout.groups(axes)):
        numbers[list(members)] = number
    return numbers

"""Causes of a fall of the MFU in recorded spans, with all that follows from them on other ranks.

A window is replayed: each rank's spans keep their durations and the gaps between them, and a
collective ends for a member as long after the last entry as it was recorded to. So what makes one
rank late makes the others wait, as it would have. Without a change the replay is the recording.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from megascale_common.node.spans.ops import DATA_WAIT, FORWARD, GARBAGE, SNAPSHOT, STEP, Op
from megascale_common.node.spans.record import NO_MICRO_BATCH
from megascale_driver.analysis.spans.table import COLUMNS, SpanTable, group_numbers

Pauses = Mapping[tuple[int, int], int]  # nanoseconds by (rank, step)


@dataclass(kw_only=True)
class Change:
    """What is different: factors on computation by rank and on the own time of collectives by name,

    and pauses of the host: at a step's begin, inside its first forward, at its end.
    """

    compute: Mapping[int, float] = field(default_factory=dict)
    network: Mapping[str, float] = field(default_factory=dict)
    data_wait: Pauses = field(default_factory=dict)
    garbage: Pauses = field(default_factory=dict)
    snapshot: Pauses = field(default_factory=dict)


@dataclass(eq=False)
class _Item:
    """A span in the order of its rank; a step's own stands for its begin and takes no time."""

    op: Op
    row: int  # in the table; -1: injected
    rank: int
    step: int
    gap_ns: int  # since the end of the item before
    duration_ns: int
    key: tuple[int, ...] = ()  # of a collective
    start_ns: int = 0


@dataclass(eq=False)
class _Garbage:
    """A garbage collection inside an item or behind it."""

    row: int
    around: _Item
    offset_ns: int
    duration_ns: int


def injected(table: SpanTable, change: Change) -> SpanTable:
    """The spans of ``table`` as they would have been with ``change``."""
    garbage: list[_Garbage] = []
    ranks = [_items(table, rank, change, garbage) for rank in range(len(table.nodes))]
    _run(table, ranks, change)
    return _table(table, ranks, garbage)


def _items(table: SpanTable, rank: int, change: Change, garbage: list[_Garbage]) -> list[_Item]:
    rows = np.flatnonzero(table.rank == rank)
    is_step = np.array([op == STEP for op in table.ops])[table.op[rows]]
    rows = rows[np.lexsort((~is_step, table.start_ns[rows]))]
    items: list[_Item] = []
    end_ns = int(table.start_ns[rows[0]])
    for row in map(int, rows):
        op, step = table.ops[table.op[row]], int(table.step[row])
        start_ns, duration_ns = int(table.start_ns[row]), int(table.duration_ns[row])
        if op == GARBAGE:
            offset_ns = start_ns - int(table.start_ns[items[-1].row])
            garbage.append(_Garbage(row, items[-1], offset_ns, duration_ns))
            continue
        if op == STEP:
            duration_ns = 0
            if items and (pause_ns := change.snapshot.get((rank, items[-1].step))):
                items.append(_Item(SNAPSHOT, -1, rank, items[-1].step, 0, pause_ns))
        items.append(_Item(op, row, rank, step, start_ns - end_ns, duration_ns))
        end_ns = start_ns + duration_ns
        if op.kind == "compute":
            items[-1].duration_ns = round(duration_ns * change.compute.get(rank, 1.0))
        if op.kind == "collective":
            group = int(group_numbers(table.layout, op.group)[rank])
            items[-1].key = (int(table.op[row]), group, step, int(table.seq[row]))
        if op == STEP and (pause_ns := change.data_wait.get((rank, step))):
            items.append(_Item(DATA_WAIT, -1, rank, step, 0, pause_ns))
        first = op == FORWARD and table.seq[row] == 0
        if first and (pause_ns := change.garbage.get((rank, step))):
            items[-1].duration_ns += pause_ns
            garbage.append(_Garbage(-1, items[-1], 0, pause_ns))
    return items


def _run(table: SpanTable, ranks: list[list[_Item]], change: Change) -> None:
    """Set start and duration of all items; ranks meet in collectives."""
    members: dict[tuple[int, ...], list[_Item]] = {}
    for item in (item for items in ranks for item in items if item.key):
        members.setdefault(item.key, []).append(item)
    now_ns = [int(table.start_ns[table.rank == rank].min()) for rank in range(len(ranks))]
    places, arrived = [0] * len(ranks), dict.fromkeys(members, 0)
    while any(place < len(items) for place, items in zip(places, ranks, strict=True)):
        moved = False
        for rank, items in enumerate(ranks):
            while places[rank] < len(items):
                item = items[places[rank]]
                if item.key:
                    if not item.start_ns:
                        item.start_ns = now_ns[rank] + item.gap_ns
                        arrived[item.key] += 1
                        moved = True
                    together = members[item.key]
                    if arrived[item.key] < len(together):
                        break
                    _end(table, item, together, change)
                else:
                    item.start_ns = now_ns[rank] + item.gap_ns
                now_ns[rank] = item.start_ns + item.duration_ns
                places[rank] += 1
                moved = True
        assert moved, "ranks wait for each other in a circle"


def _end(table: SpanTable, item: _Item, together: list[_Item], change: Change) -> None:
    recorded_ns = max(int(table.start_ns[other.row]) for other in together)
    row_end_ns = int(table.start_ns[item.row] + table.duration_ns[item.row])
    factor = change.network.get(item.op.name, 1.0)
    own_ns = round((row_end_ns - recorded_ns) * factor)
    item.duration_ns = max(other.start_ns for other in together) + own_ns - item.start_ns


def _table(table: SpanTable, ranks: list[list[_Item]], garbage: list[_Garbage]) -> SpanTable:
    ops = tuple(dict.fromkeys([*table.ops, DATA_WAIT, SNAPSHOT, GARBAGE]))
    rows: list[tuple[int, ...]] = []
    for items in ranks:
        begins = [item for item in items if item.op == STEP]
        last = begins[-1]
        tail_ns = int(table.start_ns[last.row] + table.duration_ns[last.row])
        before = [item for item in items if item.row >= 0][-1]
        recorded_end = int(table.start_ns[before.row] + table.duration_ns[before.row])
        ends = [item.start_ns for item in begins[1:]]
        ends.append(items[-1].start_ns + items[-1].duration_ns + tail_ns - recorded_end)
        for begin, end_ns in zip(begins, ends, strict=True):
            begin.duration_ns = end_ns - begin.start_ns
        for item in items:
            rows.append(_row(table, ops, item, item.row, item.start_ns, item.duration_ns))
    for one in garbage:
        start_ns = one.around.start_ns + one.offset_ns
        row = _row(table, ops, one.around, one.row, start_ns, one.duration_ns)
        rows.append((row[0], row[1], ops.index(GARBAGE), *row[3:]))
    columns = np.array(rows, np.int64).T
    typed = {
        name: column.astype(dtype)
        for (name, dtype), column in zip(COLUMNS.items(), columns, strict=True)
    }
    return replace(table, **typed, ops=ops)


def _row(
    table: SpanTable, ops: tuple[Op, ...], item: _Item, row: int, start_ns: int, duration_ns: int
) -> tuple[int, ...]:
    """In the order of COLUMNS."""
    op = ops.index(item.op)
    if row < 0:
        return item.rank, item.step, op, NO_MICRO_BATCH, 0, start_ns, duration_ns, 0
    batch, seq, aux = (int(getattr(table, name)[row]) for name in ("micro_batch", "seq", "aux"))
    return item.rank, item.step, op, batch, seq, start_ns, duration_ns, aux

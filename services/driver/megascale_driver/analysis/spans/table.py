"""The table of an attempt's spans as numpy columns, on which all analyses work. Pure.

The driver fills it from the span store, `megascale spans` from recorded files.

**Own time** (:func:`own_ns`): the time of a span without the spans inside it. With overlapped data
parallelism a forward pass contains waits for the parameters of each layer. If these counted as
computation, a wait for one slow rank would make all the others look slow.

**Instances** (:func:`collectives`): one collective as all its members recorded it, that is the
spans of one group, operation, step and number. A collective ends for all members together, so the
last member to enter spends the least time in it. That time is the collective's own, and the rest
of the others' time is waiting. No agreement between clocks is needed for this.

**Transfers** (:func:`receive_of_sends`): pairs of a send and its receive over a pipeline edge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_common.node.spans.ops import GARBAGE, STEP, Op
from megascale_common.node.spans.record import DEVICE_TIMED, SPAN, SUMMED
from megascale_driver.analysis.progress import NamedGroups
from megascale_job.layout import RankLayout
from megascale_job.visible import counted

RECORD = np.dtype(
    [
        ("start_ns", "<i8"),
        ("duration_ns", "<i8"),
        ("step", "<u4"),
        ("op", "<u2"),
        ("micro_batch", "<u2"),
        ("seq", "<u4"),
        ("aux", "<u4"),
    ]
)
assert RECORD.itemsize == SPAN.size


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable:
    """Columns of equal length, one entry per span, in no particular order.

    ``start_ns`` is Unix time on the clock of the rank's node, not corrected for its offset. ``op``
    is an index into ``ops``, one table for all ranks. ``micro_batch`` is NO_MICRO_BATCH for spans
    without one. ``aux`` holds chunk, stream and flags (see megascale_common.node.spans.record).
    ``nodes[r]`` is the node of rank r; ``layout`` is the grid of ranks.

    Raises:
        ValueError: columns of different lengths, or an op or rank that is not in its table.
    """

    rank: npt.NDArray[np.uint32]
    step: npt.NDArray[np.uint32]
    op: npt.NDArray[np.uint16]
    micro_batch: npt.NDArray[np.uint16]
    seq: npt.NDArray[np.uint32]
    start_ns: npt.NDArray[np.int64]
    duration_ns: npt.NDArray[np.int64]
    aux: npt.NDArray[np.uint32]
    ops: tuple[Op, ...]
    layout: RankLayout
    nodes: tuple[str, ...]

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, name)) for name in COLUMNS}
        if len(lengths) > 1:
            raise ValueError(f"columns of spans have different lengths: {sorted(lengths)}")
        if len(self.nodes) != self.layout.world_size:
            raise ValueError(
                f"nodes names {counted(len(self.nodes), 'rank')}, the layout has "
                f"{self.layout.world_size}"
            )
        if len(self):
            if int(self.op.max()) >= len(self.ops):
                raise ValueError(f"span of op {self.op.max()}, and there are {len(self.ops)} ops")
            if int(self.rank.max()) >= len(self.nodes):
                raise ValueError(
                    f"span of rank {self.rank.max()} of {counted(len(self.nodes), 'rank')}"
                )

    def __len__(self) -> int:
        return len(self.rank)

    @classmethod
    def empty(cls, layout: RankLayout, nodes: Sequence[str]) -> SpanTable:
        """A table without spans."""
        columns: dict[str, Any] = {name: np.empty(0, dtype) for name, dtype in COLUMNS.items()}
        return cls(**columns, ops=(), layout=layout, nodes=tuple(nodes))

    @classmethod
    def of_records(
        cls,
        by_rank: Sequence[tuple[int, bytes, tuple[Op, ...]]],
        layout: RankLayout,
        nodes: Sequence[str],
    ) -> SpanTable:
        """A table from ranks, their packed records and their operations.

        Times are taken from the records unchanged.

        Raises:
            ValueError: see the class; or a record has an operation that its rank has not named.
        """
        ops: dict[Op, int] = {}
        parts: list[dict[str, npt.NDArray[Any]]] = []
        for rank, data, own_ops in by_rank:
            records = np.frombuffer(data, RECORD)
            if len(records) and int(records["op"].max()) >= len(own_ops):
                raise ValueError(f"rank {rank} has a span of an operation that it has not named")
            numbers = np.array([ops.setdefault(op, len(ops)) for op in own_ops], np.uint16)
            part = {name: records[name] for name in COLUMNS if name not in ("rank", "op")}
            part["op"] = numbers[records["op"]] if len(records) else records["op"]
            part["rank"] = np.full(len(records), rank, np.uint32)
            parts.append(part)
        if not parts:
            return cls.empty(layout, nodes)
        columns: dict[str, Any] = {
            name: np.concatenate([part[name] for part in parts]) for name in COLUMNS
        }
        return cls(**columns, ops=tuple(ops), layout=layout, nodes=tuple(nodes))

    def where(self, mask: npt.NDArray[np.bool_]) -> SpanTable:
        """The spans for which ``mask`` (bool, one entry per span) holds."""
        chosen = {name: getattr(self, name)[mask] for name in COLUMNS}
        return replace(self, **chosen)

    def mask(self, wanted: Callable[[Op], bool]) -> npt.NDArray[np.bool_]:
        """True for each span of an operation that is ``wanted``."""
        ops = np.array([wanted(op) for op in self.ops], np.bool_)
        found: npt.NDArray[np.bool_] = ops[self.op] if len(ops) else np.zeros(len(self), np.bool_)
        return found

    def is_op(self, *names: str) -> npt.NDArray[np.bool_]:
        """True for each span of an operation with one of these names, in any group."""
        return self.mask(lambda op: op.name in names)

    def is_kind(self, *kinds: str) -> npt.NDArray[np.bool_]:
        """True for each span of an operation of one of these kinds."""
        return self.mask(lambda op: op.kind in kinds)

    def of_op(self, name: str) -> SpanTable:
        """The spans of all operations with that name, in any group."""
        return self.where(self.is_op(name))

    def of_steps(self, first: int, last: int) -> SpanTable:
        """The spans of steps ``first`` to ``last``, both included."""
        return self.where((self.step >= first) & (self.step <= last))

    def along(self, axis: str) -> npt.NDArray[np.int32]:
        """Coordinate of each span's rank along an axis: tp, cp, dp or pp."""
        ranks = range(self.layout.world_size)
        by_rank = [getattr(self.layout.coordinates(rank), axis) for rank in ranks]
        return np.array(by_rank, np.int32)[self.rank]

    @property
    def chunk(self) -> npt.NDArray[np.uint32]:
        """Model chunk of each span: the virtual stage within its rank."""
        return self.aux & np.uint32(0xFF)


COLUMNS: dict[str, str] = {
    "rank": "<u4",
    "step": "<u4",
    "op": "<u2",
    "micro_batch": "<u2",
    "seq": "<u4",
    "start_ns": "<i8",
    "duration_ns": "<i8",
    "aux": "<u4",
}
assert tuple(COLUMNS) == tuple(field.name for field in fields(SpanTable))[: len(COLUMNS)]


Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]


def own_ns(table: SpanTable) -> Floats:
    """Durations of spans without other spans inside.

    From computation all other spans inside it are subtracted, from other spans only garbage
    collections. Parts of a computation are its own time, so they stay in it. Only spans timed by
    the same side are subtracted from each other: a pause that the host measured does not stop the
    device.
    """
    own = table.duration_ns.astype(np.float64)
    computing, garbage = table.is_kind("compute"), table.is_op(GARBAGE.name)
    pausing = table.is_kind("collective", "p2p", "host") & ~table.is_op(STEP.name)
    _subtract(own, table, computing, pausing)
    _subtract(own, table, pausing & ~garbage, garbage)
    found: Floats = np.maximum(own, 0)
    return found


def without_waits(table: SpanTable) -> SpanTable:
    """The spans, with computation reduced by the collectives and transfers inside it."""
    own = table.duration_ns.astype(np.float64)
    computing, waiting = table.is_kind("compute"), table.is_kind("collective", "p2p")
    if not (computing.any() and waiting.any()):
        return table
    _subtract(own, table, computing, waiting)
    return replace(table, duration_ns=np.maximum(own, 0).astype(np.int64))


def _subtract(own: Floats, table: SpanTable, around: Bools, inside: Bools) -> None:
    """Subtract each span of ``inside`` from the last span of ``around`` that began before it."""
    outer, shared = _shared(table, around, inside)
    # Not `own[outer] -= ...`, which counts only one of several spans inside the same outer one.
    np.subtract.at(own, outer, shared)


def inside_ns(table: SpanTable, around: Bools, inside: Bools) -> Floats:
    """For each span the time of the spans of ``inside`` in it; 0 for those not in ``around``."""
    found = np.zeros(len(table))
    np.add.at(found, *_shared(table, around, inside))
    return found


def _shared(table: SpanTable, around: Bools, inside: Bools) -> tuple[Ints, Floats]:
    """For each span of ``inside``: the last of ``around`` that began before it, and the time in it.

    The time is 0 where the two were timed by different sides.
    """
    outer, inner = np.flatnonzero(around), np.flatnonzero(inside)
    if not len(outer) or not len(inner):
        return np.empty(0, np.int64), np.empty(0)
    on_device = flags(table) & np.uint32(DEVICE_TIMED) != 0
    # All ranks on one axis of time, one after the other, so that one sorted search serves them all.
    begin = table.start_ns - table.start_ns.min()
    length = int((begin + table.duration_ns).max()) + 1  # longer than any rank's span of time
    begin = begin + table.rank.astype(np.int64) * length
    end = begin + table.duration_ns
    outer = outer[np.argsort(begin[outer], kind="stable")]
    place = np.searchsorted(begin[outer], begin[inner], side="right") - 1
    inner, outer = inner[place >= 0], outer[place[place >= 0]]
    shared = np.maximum(np.minimum(end[outer], end[inner]) - begin[inner], 0)
    same_clock = on_device[outer] == on_device[inner]
    return outer, np.where(same_clock, shared, 0).astype(np.float64)


def flags(table: SpanTable) -> npt.NDArray[np.uint32]:
    """The flags of each span (megascale_common.node.spans.record)."""
    return table.aux >> np.uint32(16)


def single(table: SpanTable) -> SpanTable:
    """The spans with a place in time: no figures, and no sums of several pieces."""
    left_out = table.is_kind("figure", "part") | (flags(table) & np.uint32(SUMMED) != 0)
    return table.where(~left_out) if left_out.any() else table


@dataclass(frozen=True, slots=True, eq=False)
class Instances:
    """Collectives of which at least two members have spans.

    ``spans`` are sorted by collective; those of number i are ``spans[begin[i] : begin[i + 1]]``.
    ``place``: the row of each of these spans in the original table. The other columns have one
    entry per collective. Group 0 of a name has its lowest ranks.
    """

    spans: SpanTable
    place: Ints
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
        """The number of each span's collective."""
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.begin))


def collectives(table: SpanTable) -> Instances:
    """The collectives in ``table``, of all groups."""
    place = np.flatnonzero(table.is_kind("collective"))
    spans = _rows(table, place)
    # The record has only the group's name; the number follows from the rank's place in the layout.
    group = np.zeros(len(spans), np.int64)
    for number in np.unique(spans.op):
        own = spans.op == number
        group[own] = group_numbers(table.layout, table.ops[number].group)[spans.rank[own]]
    order = np.lexsort((spans.rank, spans.seq, group, spans.op, spans.step))
    spans, group, place = _rows(spans, order), group[order], place[order]
    # Sorted by key, so a collective begins wherever any column of the key changes.
    keys = np.stack([spans.step, spans.op, group, spans.seq]).astype(np.int64)
    change = np.any(np.diff(keys, axis=1) != 0, axis=0) if len(spans) else np.empty(0, np.bool_)
    begin = np.append(np.flatnonzero(np.insert(change, 0, True)) if len(spans) else [], len(spans))
    begin = begin.astype(np.int64)
    # With a single member's span nothing can be said about waiting.
    kept = np.diff(begin) >= 2
    members = np.repeat(kept, np.diff(begin))
    spans, group, place = spans.where(members), group[members], place[members]
    begin = np.append(0, np.cumsum(np.diff(begin)[kept])).astype(np.int64)
    first = begin[:-1]
    durations = spans.duration_ns
    return Instances(
        spans=spans,
        place=place,
        begin=begin,
        op=spans.op[first].astype(np.int64),
        step=spans.step[first].astype(np.int64),
        group=group[first],
        shortest_ns=np.minimum.reduceat(durations, first) if len(first) else np.empty(0, np.int64),
        longest_ns=np.maximum.reduceat(durations, first) if len(first) else np.empty(0, np.int64),
    )


def _rows(spans: SpanTable, rows: Ints) -> SpanTable:
    return replace(spans, **{name: getattr(spans, name)[rows] for name in COLUMNS})


def group_numbers(layout: RankLayout, name: str) -> Ints:
    """The number of each rank's group with this name; an unknown name is one group of all ranks.

    The group ``ends`` joins ranks of the first and the last stage, so its axis is ``pp``.
    """
    groups = NamedGroups("pp" if name == "ends" else name, layout)
    return np.array(groups.keys(range(layout.world_size)), np.int64)


# By send over a pipeline edge: its receive, and the direction along the virtual stages.
_EDGES = {
    "send_activation": ("receive_activation", 1),
    "send_gradient": ("receive_gradient", -1),
}


def receive_of_sends(table: SpanTable) -> dict[int, int]:
    """The row of the send by the row of its receive in ``table``, for transfers with both."""
    by_place: dict[tuple[str, int, int, int, int], int] = {}
    sends: list[tuple[int, str]] = []
    receives = {receive for receive, _ in _EDGES.values()}
    names = [op.name for op in table.ops]
    for place, number in enumerate(table.op.tolist()):
        name = names[number]
        if name in receives:
            by_place[_at(table, place, name)] = place
        elif name in _EDGES:
            sends.append((place, name))
    found: dict[int, int] = {}
    for place, name in sends:
        receive, way = _EDGES[name]
        _, rank, step, batch, chunk = _at(table, place, name)
        neighbour, its_chunk = _neighbour(table.layout, rank, chunk, way)
        target = by_place.get((receive, neighbour, step, batch, its_chunk))
        if target is not None:
            found[target] = place
    return found


def _at(table: SpanTable, place: int, name: str) -> tuple[str, int, int, int, int]:
    """The transfer's name, rank, step, micro-batch and chunk."""
    columns = (table.rank, table.step, table.micro_batch, table.chunk)
    rank, step, batch, chunk = (int(column[place]) for column in columns)
    return name, rank, step, batch, chunk


def _neighbour(layout: RankLayout, rank: int, chunk: int, way: int) -> tuple[int, int]:
    """Rank and chunk of the next virtual stage, or with ``way`` -1 of the one before."""
    place = layout.coordinates(rank)
    stage = place.pp + way
    return layout.rank(replace(place, pp=stage % layout.pp)), chunk + stage // layout.pp

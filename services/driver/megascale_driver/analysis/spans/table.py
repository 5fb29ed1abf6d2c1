"""Spans of an attempt as numpy columns, with what is known about their ranks: what analysers take.

Pure: the store fills it from its files, tests from recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_common.node.spans.ops import Op
from megascale_common.node.spans.record import SPAN
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

    ``start_ns`` is Unix time on the clock of the rank's node, whose offset is not taken out.
    ``op`` is a place in ``ops``, one table for all ranks. ``micro_batch`` is NO_MICRO_BATCH where
    there is none. ``aux`` holds chunk, stream and flags (see megascale_common.node.spans.record).
    ``nodes[r]`` is the node of rank r, and the ranks lie in ``layout``.

    Raises:
        ValueError: columns of different lengths, an op or rank that is not in its table.
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
        """Packed records of ranks, each with the rank and the operations of that rank.

        The times stay as they are in the records.

        Raises:
            ValueError: see the class; or a record of an operation that its rank has not named.
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
        """Whether each span is of an operation that is ``wanted``."""
        ops = np.array([wanted(op) for op in self.ops], np.bool_)
        found: npt.NDArray[np.bool_] = ops[self.op] if len(ops) else np.zeros(len(self), np.bool_)
        return found

    def of_op(self, name: str) -> SpanTable:
        """The spans of all operations of that name, whatever their group."""
        return self.where(self.mask(lambda op: op.name == name))

    def of_steps(self, first: int, last: int) -> SpanTable:
        """The spans of steps ``first`` to ``last``, both included."""
        return self.where((self.step >= first) & (self.step <= last))

    def along(self, axis: str) -> npt.NDArray[np.int32]:
        """Coordinate of each span's rank along an axis of the layout (tp, cp, dp or pp)."""
        ranks = range(self.layout.world_size)
        by_rank = [getattr(self.layout.coordinates(rank), axis) for rank in ranks]
        return np.array(by_rank, np.int32)[self.rank]

    @property
    def chunk(self) -> npt.NDArray[np.uint32]:
        """Model chunk of each span (virtual stage of its rank)."""
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

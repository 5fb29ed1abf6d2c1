"""Slow nodes and the heat map of a job: ranks compared with the ranks that do the same work.

MegaScale section 5.1 finds hosts that are a little slower than the rest by the latency of the same
computation across machines. Here the spans of a rank are compared with the median of their class:
the spans of the same operation, pipeline stage, chunk, micro-batch, step and number. Computation is
without the waits inside it.

In the heat map a row is an operation and a cell is a rank: the median over the steps of its time
per step, and its median ratio to the ranks that do the same work.

Note [Straggler verdicts]. A verdict can cost a node its jobs, so a run without a slow node must
raise none, however long it trains. A node is named only if, in three of the last five windows of
ten steps, one of its ranks is an outlier in both measures: its score (the median ratio over the
window's steps) is at least 5 % above the median of all ranks and at least 6 robust standard
deviations away from it. Each part removes one kind of false alarm:

- The median over a window's steps removes single slow steps (a garbage collection, a snapshot).
- Three windows of five remove short slowness: noise in one window does not return in the next ones.
- The 5 % keep steady but tiny differences out; the deviations keep out ratios that are ordinary on
  a noisy cluster. The deviation has a lower bound, because equal ranks would make any difference
  an outlier.
- Waits inside of computation are subtracted first; else a rank that waits for the slow one would
  look slow too.
- Classes of fewer than three ranks, windows with fewer than three ranks and ranks with fewer than
  five steps in a window are left out: their medians say too little. A job on one node has no slow
  node, because there is no other node to compare it with.

The score is per rank, not per node: the median over a node's ranks would hide one slow device
among eight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_common.node.spans.ops import BACKWARD, FORWARD, OPTIMIZER
from megascale_driver.analysis.spans.table import SpanTable, without_waits
from megascale_job.visible import counted

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
        median = _rank_medians(*_per_step(spans), ranks)
        rows.append(
            HeatRow(name, kinds[name], median, _rank_medians(compared.rank, compared.ratio, ranks))
        )
    return sorted(rows, key=lambda row: -float(np.nanmedian(row.median_ns)))


def _per_step(spans: SpanTable) -> tuple[npt.NDArray[np.uint32], Floats]:
    """The time of each (rank, step)."""
    pairs, place = np.unique(np.stack([spans.rank, spans.step]), axis=1, return_inverse=True)
    spent: Floats = np.bincount(
        place.reshape(-1), spans.duration_ns.astype(np.float64), pairs.shape[1]
    ).astype(np.float64)
    return pairs[0], spent


def _rank_medians(
    rank: npt.NDArray[np.uint32], values: Floats, ranks: int, least_samples: int = 1
) -> Floats:
    """Median of each rank's values; NaN for a rank with fewer than ``least_samples``."""
    found: Floats = np.full(ranks, np.nan)
    order = np.argsort(rank, kind="stable")
    begins = np.searchsorted(rank[order], np.arange(ranks + 1))
    for number in range(ranks):
        own = values[order[begins[number] : begins[number + 1]]]
        if len(own) >= least_samples:
            found[number] = np.median(own)
    return found


LEAST_NODES = 2  # of a job whose nodes are compared
MAD_TO_DEVIATION = 1.4826  # of a normal distribution
COMPARED = (FORWARD.name, BACKWARD.name, OPTIMIZER.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class OutlierRule:
    """When a node is named. Steps are cut into windows of ``window_steps`` from the newest back.

    ``least_deviation`` bounds the spread from below, so that equal ranks do not make a hair's
    breadth an outlier. A window with fewer than ``least_ranks`` ranks does not count, nor in it a
    rank with fewer than ``least_samples`` steps.
    """

    window_steps: int = 10
    windows: int = 5
    flagged_windows: int = 3
    least_ratio: float = 1.05
    least_z: float = 6.0
    least_deviation: float = 0.002
    least_ranks: int = 3
    least_samples: int = 5


@dataclass(frozen=True, slots=True)
class SlowNode:
    """A verdict: ``node`` is slow in spans of ``op``, in windows from ``since_step`` on.

    ``rank`` is its slowest one: ``ratio`` is the median over the flagged windows, ``z`` the least
    of them, ``lost_ns`` the time above the class's median that a step has.
    """

    node: str
    rank: int
    op: str
    ratio: float
    z: float
    since_step: int
    last_step: int
    windows: int
    lost_ns: float

    @property
    def sentence(self) -> str:
        """The verdict for people."""
        return (
            f"node {self.node} is slow: its {self.op} spans take {100 * (self.ratio - 1):.1f} % "
            f"longer than those of the ranks that do the same work, most on rank {self.rank} "
            f"({self.lost_ns / 1e6:.2f} ms a step), from step {self.since_step} on "
            f"({counted(self.windows, 'window')} until step {self.last_step}, at least "
            f"{self.z:.1f} "
            "deviations from the other ranks)"
        )


@dataclass(frozen=True, slots=True)
class _Flag:
    first_step: int
    last_step: int
    ratio: float
    z: float


def slow_nodes(
    table: SpanTable, rule: OutlierRule = OutlierRule(), ops: tuple[str, ...] = COMPARED
) -> list[SlowNode]:
    """The nodes that are slow now, the slowest first; of each the operation that shows it most.

    It takes the steps of the table: those of the last ``windows`` x ``window_steps`` are enough.
    """
    if len(set(table.nodes) - {""}) < LEAST_NODES:
        return []
    # A rank that updates sooner than others waits longer for them, inside its forward.
    table = without_waits(table)
    worst: dict[str, SlowNode] = {}
    for op in ops:
        for found in _slow_in(table, op, rule):
            if found.node not in worst or found.z > worst[found.node].z:
                worst[found.node] = found
    return sorted(worst.values(), key=lambda found: -found.ratio)


def _slow_in(table: SpanTable, op: str, rule: OutlierRule) -> list[SlowNode]:
    compared = ratios(table, op)
    if not len(compared.rank):
        return []
    newest, oldest = int(compared.step.max()), int(compared.step.min())
    flags: dict[int, list[_Flag]] = {}
    for window in range(rule.windows):
        last = newest - window * rule.window_steps
        first = last - rule.window_steps + 1
        if first < oldest:
            break
        inside = (compared.step >= first) & (compared.step <= last)
        scores = _rank_medians(
            compared.rank[inside], compared.ratio[inside], len(table.nodes), rule.least_samples
        )
        for rank, z in _far(scores, rule):
            flags.setdefault(rank, []).append(_Flag(first, last, float(scores[rank]), z))
    found = [
        _verdict(table.nodes[rank], rank, op, own, compared)
        for rank, own in flags.items()
        if len(own) >= rule.flagged_windows
    ]
    worst: dict[str, SlowNode] = {}
    for verdict in sorted(found, key=lambda verdict: verdict.ratio):
        worst[verdict.node] = verdict
    return list(worst.values())


def _far(scores: Floats, rule: OutlierRule) -> list[tuple[int, float]]:
    """Ranks far above the others, each with its robust deviations from them."""
    known = np.flatnonzero(~np.isnan(scores))
    if len(known) < rule.least_ranks:
        return []
    middle = float(np.median(scores[known]))
    spread = MAD_TO_DEVIATION * float(np.median(np.abs(scores[known] - middle)))
    z = (scores - middle) / max(spread, rule.least_deviation)
    return [
        (int(rank), float(z[rank]))
        for rank in known
        if scores[rank] >= rule.least_ratio * middle and z[rank] >= rule.least_z
    ]


def _verdict(node: str, rank: int, op: str, found: list[_Flag], compared: Ratios) -> SlowNode:
    since = min(flag.first_step for flag in found)
    ours = (compared.rank == rank) & (compared.step >= since)
    return SlowNode(
        node=node,
        rank=rank,
        op=op,
        ratio=float(np.median([flag.ratio for flag in found])),
        z=min(flag.z for flag in found),
        since_step=since,
        last_step=max(flag.last_step for flag in found),
        windows=len(found),
        lost_ns=float(np.median(compared.excess_ns[ours])),
    )

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
- So is time that a rank spends on more rows of its experts than others have: see Note [Hot experts]
  in :mod:`megascale_driver.analysis.spans.routing`.
- Classes of fewer than three ranks, windows with fewer than three ranks and ranks with fewer than
  five steps in a window are left out: their medians say too little. A job on one node has no slow
  node, because there is no other node to compare it with.

The score is per rank, not per node: the median over a node's ranks would hide one slow device
among eight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megascale_common.node.spans.ops import BACKWARD, FORWARD, OPTIMIZER
from megascale_driver.analysis.spans.classes import (
    Floats,
    OutlierRule,
    Ratios,
    rank_medians,
    ratios,
)
from megascale_driver.analysis.spans.routing import routing_ns
from megascale_driver.analysis.spans.table import SpanTable, without_waits
from megascale_job.visible import counted


@dataclass(frozen=True, slots=True, eq=False)
class HeatRow:
    """One operation. ``median_ns`` and ``ratio`` have shape ``[ranks]``; NaN: not known.

    ``ratio`` is also NaN if fewer than three ranks do the same work.
    """

    name: str
    kind: str
    median_ns: Floats
    ratio: Floats


def heat_map(table: SpanTable, names: tuple[str, ...] = ()) -> list[HeatRow]:
    """Rows of the operations with these names (empty: all), the longest first."""
    table = without_waits(table)
    kinds: dict[str, str] = {op.name: op.kind for op in table.ops}
    wanted = [
        name for name, kind in kinds.items() if kind != "figure" and (not names or name in names)
    ]
    rows = []
    for name in wanted:
        spans = table.of_op(name)
        if not len(spans):
            continue
        compared = ratios(table, name)
        ranks = len(table.nodes)
        median = rank_medians(*_per_step(spans), ranks)
        rows.append(
            HeatRow(name, kinds[name], median, rank_medians(compared.rank, compared.ratio, ranks))
        )
    return sorted(rows, key=lambda row: -float(np.nanmedian(row.median_ns)))


def _per_step(spans: SpanTable) -> tuple[npt.NDArray[np.uint32], Floats]:
    """Rank and total time of each (rank, step)."""
    pairs, place = np.unique(np.stack([spans.rank, spans.step]), axis=1, return_inverse=True)
    spent: Floats = np.bincount(
        place.reshape(-1), spans.duration_ns.astype(np.float64), pairs.shape[1]
    ).astype(np.float64)
    return pairs[0], spent


LEAST_NODES = 2  # for a comparison of nodes
MAD_TO_DEVIATION = 1.4826  # of a normal distribution
COMPARED = (FORWARD.name, BACKWARD.name, OPTIMIZER.name)


@dataclass(frozen=True, slots=True)
class SlowNode:
    """A verdict: ``node`` is slow in spans of ``op``, in windows from ``since_step`` on.

    ``rank``: its slowest rank. Of that rank, ``ratio`` is the median and ``z`` the least over the
    flagged windows, and ``lost_ns`` is the time per step above the class's median.
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
        """The verdict as a sentence for people."""
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
    """The nodes that are slow now, the slowest first, each with the operation that shows it most.

    The newest ``windows`` x ``window_steps`` steps are enough as a table.
    """
    if len(set(table.nodes) - {""}) < LEAST_NODES:
        return []
    # A rank whose optimizer is faster waits longer for the others, inside its forward pass.
    table = without_waits(table)
    routing = routing_ns(table)
    if routing.any():
        evened = np.maximum(table.duration_ns - routing, 0).astype(np.int64)
        table = replace(table, duration_ns=evened)
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
    flags: dict[int, list[_Flag]] = {}
    for first, last in rule.windows_of(compared.step):
        inside = (compared.step >= first) & (compared.step <= last)
        scores = rank_medians(
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
    # One verdict per node: the last one to be set is that of its slowest rank.
    for verdict in sorted(found, key=lambda verdict: verdict.ratio):
        worst[verdict.node] = verdict
    return list(worst.values())


def _far(scores: Floats, rule: OutlierRule) -> list[tuple[int, float]]:
    """Ranks that are outliers above the others, each with its robust deviations from them."""
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

"""Which node is slow: one of its ranks takes longer than all others for the same work.

MegaScale section 5.1: hosts that are a little slower than the rest are found by the latency of the
same computation across machines. A node is named where, in three of the last five windows of steps,
the score of one of its ranks (median over the steps) is at least 5 % above all ranks' and 6 robust
deviations away. A host that is slow has slow ranks; a median over its ranks would hide one slow
device among eight. What is noise in one window does not come back in the next ones. A job
on one node has no slow node: there is no other to compare it with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megascale_common.node.spans.ops import BACKWARD, FORWARD, OPTIMIZER
from megascale_driver.analysis.spans.classes import Floats, Ratios, ratios
from megascale_driver.analysis.spans.own_time import without_waits
from megascale_driver.analysis.spans.table import SpanTable
from megascale_job.visible import counted

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
    table: SpanTable, rule: OutlierRule | None = None, ops: tuple[str, ...] = COMPARED
) -> list[SlowNode]:
    """The nodes that are slow now, the slowest first; of each the operation that shows it most.

    It takes the steps of the table: those of the last ``windows`` x ``window_steps`` are enough.
    """
    if len(set(table.nodes) - {""}) < LEAST_NODES:
        return []
    rule = rule or OutlierRule()
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
        scores = _scores(
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


def _scores(rank: npt.NDArray[np.uint32], ratio: Floats, ranks: int, least_samples: int) -> Floats:
    """Median ratio of each rank; NaN for one with too few samples."""
    scores: Floats = np.full(ranks, np.nan)
    order = np.argsort(rank, kind="stable")
    begins = np.searchsorted(rank[order], np.arange(ranks + 1))
    for number in range(ranks):
        own = ratio[order[begins[number] : begins[number + 1]]]
        if len(own) >= least_samples:
            scores[number] = np.median(own)
    return scores


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

"""The heat map: how long each node takes beside those that do the same work (MegaScale 5.1)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

from megascale.v1 import driver_pb2
from megascale_client import Job, Node
from megascale_dashboard import node_view
from megascale_dashboard.shown import Page

MARKED = 1.1  # a tile of so large a ratio has a mark
WORST = "worst"  # the column of the page that has each node's largest ratio over all operations


def heat(job: Job, answer: driver_pb2.GetHeatMapResponse, nodes: list[Node]) -> Page:
    """For each operation and node the largest ratio of its ranks to their peers' median.

    A ratio is None where nothing was measured or a rank has no peers. ``nodes`` stand by switch and
    name; ``ratios`` of an operation has one number for each of them.
    """
    switches = {node.proto.name: node_view.switch(node) for node in nodes}
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(answer.rank_nodes):
        ranks.setdefault(name, []).append(rank)
    names = sorted(
        (name for name in ranks if name),
        key=lambda name: (
            node_view.in_order(switches.get(name, "")),
            node_view.in_order(name),
        ),
    )
    operations = [_operation(row, names, ranks) for row in answer.rows]
    columns = zip(*(each["ratios"] for each in operations), strict=True)
    worst = [_largest(column) for column in columns]
    return {
        "name": job.spec.name,
        "phase": job.phase.name.lower(),
        "attempt": answer.attempt,
        "first_step": answer.first_step,
        "last_step": answer.last_step,
        "nodes": [{"name": name, "switch": switches.get(name, "")} for name in names],
        "operations": operations,
        WORST: worst,
        "headline": _headline(answer, names, worst),
        "slow": [
            {
                "node": slow.node,
                "rank": slow.rank,
                "operation": slow.operation,
                "ratio": slow.ratio,
                "since_step": slow.since_step,
                "sentence": slow.sentence,
            }
            for slow in answer.slow_nodes
        ],
        "command": f"megascale heat {job.spec.name}",
    }


def _headline(
    answer: driver_pb2.GetHeatMapResponse, names: list[str], worst: list[float | None]
) -> str:
    """What the tiles show, in one sentence."""
    if answer.slow_nodes:
        return answer.slow_nodes[0].sentence
    if len(names) == 1:
        return f"Only {names[0]} runs the job: there is no other node to compare it with."
    marked = [
        (ratio, name)
        for ratio, name in zip(worst, names, strict=False)
        if ratio is not None and ratio >= MARKED
    ]
    if not marked:
        return "No node is slow by these steps."
    ratio, name = max(marked)
    return (
        f"No node is slow for long enough to be named; {name} takes up to {100 * (ratio - 1):.0f} "
        "% longer than the ranks that do the same work."
    )


def _operation(row: driver_pb2.HeatMapRow, names: list[str], ranks: dict[str, list[int]]) -> Page:
    known = [value for value in row.median_ms if not math.isnan(value)]
    ratio = list(row.ratio)  # a fleet has tens of thousands: plain numbers, each looked at once
    return {
        "operation": row.operation,
        "kind": row.kind,
        "median_ms": round(statistics.median(known), 3) if known else None,
        "ratios": [_worst(ratio, ranks[name]) for name in names],
    }


def _worst(ratio: list[float], ranks: list[int]) -> float | None:
    """The largest ratio of these ranks; one that was not measured is not a number (NaN)."""
    known = [value for rank in ranks if not math.isnan(value := ratio[rank])]
    return round(max(known), 3) if known else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)

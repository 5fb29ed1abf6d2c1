"""The ranks of a job as a block of tp x dp x pp, each with its node and the node's state.

When no rank advances, it also shows which ranks each rank waits for, and how far the culprits got
(MegaScale, section 5.2). The heat map compares the time of each node with that of the nodes that
do the same work (section 5.1).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from megascale.v1 import driver_pb2
from megascale_client import Job, JobPhase, Node
from megascale_dashboard import job_view, node_view
from megascale_dashboard.page_values import Page

AXES = ("tp", "cp", "dp", "pp")  # innermost first, as the rank layout has them
MOST_EDGES = 2_000  # each from a waiting rank to one that it waits for
MOST_BEHIND = 16  # ranks of a standstill whose operations are shown: culprits, then waiting ones


def grid(
    job: Job, nodes: Iterable[Node], topology: driver_pb2.GetTopologyResponse | None = None
) -> Page:
    """The block: sizes of the axes, and for each rank its node and what is known of it.

    ``node`` has indices into ``names``; -1 where no node reports the rank. ``state`` of a rank is
    "lost" (its node is dead), "silent" (suspect or unknown), "culprit" (it holds the others up in
    a standstill), "training", "waiting" (for another rank in a standstill, or the job is in another
    phase than RUNNING), or "absent".
    ``strides`` has, for each axis longer than 1, the distance between the numbers of two
    neighbours: with it a page finds a rank's three lines. ``standstill`` is a sentence, "" while
    the job advances; ``waits`` has the operation of each rank and the ranks that it waits for,
    ``edges`` the same as pairs of ranks, and ``behind`` how far the culprits got.
    """
    sizes = job_view.layout(job)
    world = world_size(sizes)
    mine = sorted(
        (node for node in nodes if node.proto.job == job.spec.name and node.proto.ranks),
        key=lambda node: node_view.in_order(node.proto.name),
    )
    alive = "training" if job.phase == JobPhase.RUNNING else "waiting"
    node_of, states = [-1] * world, ["absent"] * world
    for index, node in enumerate(mine):
        state = _state(node, alive)
        for rank in node.proto.ranks:  # plain numbers: a fleet has tens of thousands
            if rank < world:
                node_of[rank], states[rank] = index, state
    places = [] if topology is None else list(topology.ranks)
    standstill = "" if topology is None else topology.standstill
    # Most of tens of thousands of places are neither: one pass for each list.
    inside = [place for place in places if place.inside and place.rank < world]
    culprits = [place for place in places if place.holds_up and place.rank < world]
    for place in inside:
        if standstill and place.waits_for and states[place.rank] == "training":
            states[place.rank] = "waiting"
    for place in culprits:
        states[place.rank] = "culprit"
    return {
        "standstill": standstill,
        "waits": {str(place.rank): _waits(place) for place in inside},
        "edges": _edges(inside),
        "behind": _behind(places, culprits, inside) if standstill else [],
        "name": job.spec.name,
        "phase": job.phase.name.lower(),
        "phase_reason": job.phase_reason,
        "axes": sizes,
        "world": world,
        "names": [node.proto.name for node in mine],
        "node": node_of,
        "state": states,
        "strides": {axis: stride for axis, stride in _strides(sizes).items() if sizes[axis] > 1},
        "command": f"megascale topology {job.spec.name}",
    }


def world_size(sizes: Mapping[str, int]) -> int:
    """Number of ranks of a block of these sizes."""
    return sizes["tp"] * sizes["cp"] * sizes["dp"] * sizes["pp"]


def line(sizes: Mapping[str, int], rank: int, axis: str) -> list[int]:
    """The ranks of a rank's group along an axis, in order."""
    stride, size = _strides(sizes)[axis], sizes[axis]
    first = rank - rank // stride % size * stride  # the member at position 0 of the axis
    return [first + position * stride for position in range(size)]


def _waits(place: driver_pb2.RankPlace) -> str:
    """The operation of a rank and the ranks that it waits for, in words."""
    inside = f"inside {', '.join(place.inside)}"
    if not place.waits_for:
        return inside
    more = f" and {place.waits_for_more} more" if place.waits_for_more else ""
    return f"{inside}, waits for {', '.join(map(str, place.waits_for))}{more}"


def _edges(places: Iterable[driver_pb2.RankPlace]) -> list[list[int]]:
    """Pairs [waiting rank, awaited rank], at most MOST_EDGES, the first of each rank before others.

    So a page that cannot draw all of them leaves out no waiting rank.
    """
    waiting = [place for place in places if place.waits_for]
    first = [[place.rank, place.waits_for[0]] for place in waiting]
    rest = [[place.rank, other] for place in waiting for other in place.waits_for[1:]]
    return [*first, *rest][:MOST_EDGES]


def _behind(
    places: Iterable[driver_pb2.RankPlace],
    culprits: Sequence[driver_pb2.RankPlace],
    inside: Iterable[driver_pb2.RankPlace],
) -> list[Page]:
    """Culprits of a standstill and some waiting ranks: how many operations each has entered."""
    others = [place for place in inside if place.waits_for and not place.holds_up]
    most: dict[str, int] = {}
    for place in places:
        for each in place.operations:
            most[each.group] = max(most.get(each.group, 0), each.entered)
    return [
        {
            "rank": place.rank,
            "node": place.node,
            "holds_up": place.holds_up,
            "phase": place.phase,
            "step": place.step,
            "silent_s": place.silent_s,
            "operations": [
                {
                    "group": each.group,
                    "entered": each.entered,
                    "completed": each.completed,
                    "lags": each.entered < most[each.group],
                }
                for each in place.operations
            ],
            "waits": _waits(place) if place.inside else "",
        }
        for place in [*culprits, *others][:MOST_BEHIND]
    ]


def _strides(sizes: Mapping[str, int]) -> dict[str, int]:
    """The distance between the numbers of two neighbours along each axis."""
    strides, stride = {}, 1
    for axis in AXES:
        strides[axis] = stride
        stride *= sizes[axis]
    return strides


_GONE = {"dead": "lost", "suspect": "silent", "unknown": "silent"}


def _state(node: Node, alive: str) -> str:
    """The state of a node's ranks: ``alive`` if the node is."""
    return _GONE.get(node_view.state(node), alive)


MARKED = 1.1  # a tile of this ratio or more has a mark
WORST = "worst"  # the column of the page that has each node's largest ratio over all operations


def heat(job: Job, answer: driver_pb2.GetHeatMapResponse, nodes: list[Node]) -> Page:
    """For each operation and node the largest ratio of its ranks to their peers' median.

    A ratio is None where nothing was measured or a rank has no peers. ``nodes`` are sorted by
    switch and name; ``ratios`` of an operation has one number for each of them.
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
        **_routing(answer),
        "command": f"megascale heat {job.spec.name}",
    }


def _routing(answer: driver_pb2.GetHeatMapResponse) -> Page:
    """Ranks with hot experts, and by node what its tile says about them; empty for a dense model.

    The words of a node are those of its hottest rank.
    """
    if not answer.HasField("routing"):
        return {}
    hot = answer.routing.hot_ranks
    by_node = {each.node: each for each in reversed(hot)}
    return {
        "hot": [
            {
                "node": each.node,
                "rank": each.rank,
                "operation": each.operation,
                "ratio": each.ratio,
                "rows": each.expert_share,
                "since_step": each.since_step,
                "sentence": each.sentence,
            }
            for each in hot
        ],
        "hot_nodes": {
            node: f"hot experts ({each.expert_share:.1f} times the mean rows)"
            for node, each in by_node.items()
        },
    }


def _headline(
    answer: driver_pb2.GetHeatMapResponse, names: list[str], worst: list[float | None]
) -> str:
    """The tiles in one sentence."""
    if answer.slow_nodes:
        return answer.slow_nodes[0].sentence
    if answer.routing.hot_ranks:
        sentence = answer.routing.hot_ranks[0].sentence
        return f"{sentence[0].upper()}{sentence[1:]}."
    if len(names) == 1:
        return f"Only {names[0]} runs the job: there is no other node to compare it with."
    marked = [
        (ratio, name)
        for ratio, name in zip(worst, names, strict=False)
        if ratio is not None and ratio >= MARKED
    ]
    if not marked:
        return "No node was slow in these steps."
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

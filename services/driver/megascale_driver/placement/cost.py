"""The cheapest placement of a gang.

:func:`megascale_driver.placement.gang.place` chooses the nodes, on the fewest switches. With more
than one switch the order of the nodes matters. Three kinds of order are compared by the planner's
cost: data-inner (ranks in their own order), pipeline-inner (all stages of a few replicas next to
each other), and blocks of both that fit on one switch. The queue
(:mod:`megascale_driver.placement.queue`) decides which nodes a job can use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from megascale_driver.placement.gang import Candidate, Part, place
from megascale_driver.placement.queue_values import Choice, WaitingJob
from megascale_job.visible import counted
from megascale_planner.placement_cost import Score, Traffic, score

MAX_BLOCKS = 8  # most shapes of blocks to compare, the largest first


def cheapest(job: WaitingJob, candidates: Iterable[Candidate]) -> Choice | None:
    """The placement on the fewest switches and nodes, in the cheapest order; None: no room."""
    candidates = list(candidates)
    parts = place(job.world_size, job.node_group, candidates)
    if parts is None:
        return None
    by_name = {c.name: c for c in candidates}
    switches = {by_name[part.node].switch for part in parts}
    nodes = counted(len(parts), "node")
    # Without any known switch all orders look the same, so there is nothing to compare.
    if switches == {""}:
        return Choice(parts, f"{nodes}, the fewest that have room")
    count = counted(len(switches), "switch")
    why = f"{nodes} on {count}, the fewest that have room"
    if job.traffic is None:
        return Choice(parts, why)
    if len(switches) == 1:
        return Choice(parts, why, score=_score(job.traffic, parts, by_name))
    found = compared(job.traffic, parts, by_name)
    (name, best, cost), *others = sorted(found, key=lambda each: each[2].cost)
    why += f"; {name}: {described(cost)}"
    # Several orders can cost the same; name the first one that is really worse.
    dearer = next((each for each in others if each[2].cost > cost.cost), None)
    if dearer is not None:
        why += f"; next {dearer[0]}, at {dearer[2].cost / cost.cost:.2f} times the cost"
    return Choice(best, why, name, cost)


def rescored(
    job: WaitingJob, found: Choice, fresh: Sequence[str], nodes: Mapping[str, Candidate]
) -> Choice:
    """The placement of a recovering job with its score; ``fresh`` nodes replaced lost ones."""
    switches = {nodes[part.node].switch for part in found.parts}
    if job.traffic is None or switches == {""}:
        return found
    cost = _score(job.traffic, found.parts, nodes)
    why = found.why
    if fresh and len(switches) > 1:
        chosen = "it adds" if len(fresh) == 1 else "they add"
        why += f"; {chosen} the fewest edges between switches: {described(cost)}"
    return replace(found, why=why, score=cost)


def compared(
    traffic: Traffic, parts: Sequence[Part], nodes: Mapping[str, Candidate]
) -> list[tuple[str, tuple[Part, ...], Score]]:
    """Name, placement and score of each possible order of the nodes of ``parts``.

    Other orders than the first need nodes of equal size, and a whole number of nodes per stage.
    """
    first = tuple(parts)
    found = [("data-inner", first, _score(traffic, first, nodes))]
    sizes = {len(part.ranks) for part in first}
    layout = traffic.layout
    of_stage = layout.world_size // layout.pp
    if len(sizes) > 1 or layout.pp == 1 or of_stage % (size := sizes.pop()):
        return found
    columns = of_stage // size
    # Nodes sorted from the top of the network down, so that neighbours share the lowest switches.
    together = sorted(first, key=lambda part: (*nodes[part.node].path[::-1], part.ranks[0]))
    room = max(Counter(nodes[part.node].switch for part in first).values())
    for name, order in _orders(columns, layout.pp, room):
        moved = [
            Part(part.node, first[index].ranks, part.devices)
            for part, index in zip(together, order, strict=True)
        ]
        moved.sort(key=lambda part: part.ranks[0])
        found.append((name, tuple(moved), _score(traffic, moved, nodes)))
    return found


def described(cost: Score) -> str:
    """A score in words."""
    return (
        f"{100 * cost.cross_share:.0f} % of the {_text(cost.between_bytes)} a step between nodes "
        f"crosses switches ({counted(cost.crossing_edges, 'edge')}), cost {_text(cost.cost)} "
        "x tiers"
    )


def _orders(columns: int, stages: int, room: int) -> Iterator[tuple[str, list[int]]]:
    """Name of each order, and its places; places are numbered stage after stage."""
    yield "data-inner by switch", list(range(columns * stages))
    yield "pipeline-inner", _tiled(columns, stages, 1, stages)
    shapes = [
        (wide, deep)
        for wide in _divisors(columns)
        for deep in _divisors(stages)
        if wide * deep <= room and deep > 1 and wide > 1
    ]
    shapes.sort(key=lambda shape: (-shape[0] * shape[1], shape))
    for wide, deep in shapes[:MAX_BLOCKS]:
        yield f"blocks of {wide} x {counted(deep, 'stage')}", _tiled(columns, stages, wide, deep)


def _tiled(columns: int, stages: int, wide: int, deep: int) -> list[int]:
    return [
        stage * columns + column
        for top in range(0, stages, deep)
        for left in range(0, columns, wide)
        for column in range(left, left + wide)
        for stage in range(top, top + deep)
    ]


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _score(traffic: Traffic, parts: Sequence[Part], nodes: Mapping[str, Candidate]) -> Score:
    tp = traffic.layout.tp
    of_rank = sorted(parts, key=lambda part: part.ranks[0])
    node_of = [part.node for part in of_rank for _ in range(len(part.ranks) // tp)]
    return score(traffic, node_of, {part.node: nodes[part.node].path for part in parts})


def _text(size: float) -> str:
    """Bytes in the largest unit that leaves at least 1."""
    power = max(0, min(5, (len(f"{size:.0f}") - 1) // 3))
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB', 'PB')[power]}"

"""Transfers over pipeline edges: which receive takes what a send has sent."""

from __future__ import annotations

from dataclasses import replace

from megascale_driver.analysis.spans.table import SpanTable
from megascale_job.layout import RankLayout

# Of each transfer over a pipeline edge: its receive, and the way along the virtual stages.
_EDGES = {
    "send_activation": ("receive_activation", 1),
    "send_gradient": ("receive_gradient", -1),
}


def receive_of_sends(table: SpanTable) -> dict[int, int]:
    """By place of a receive's span in ``table``, that of the send's; those with both alone."""
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
    """Name, rank, step, micro-batch and chunk of a transfer."""
    columns = (table.rank, table.step, table.micro_batch, table.chunk)
    rank, step, batch, chunk = (int(column[place]) for column in columns)
    return name, rank, step, batch, chunk


def _neighbour(layout: RankLayout, rank: int, chunk: int, way: int) -> tuple[int, int]:
    """Rank and chunk of the next virtual stage, or of the one before (``way`` -1)."""
    place = layout.coordinates(rank)
    stage = place.pp + way
    return layout.rank(replace(place, pp=stage % layout.pp)), chunk + stage // layout.pp

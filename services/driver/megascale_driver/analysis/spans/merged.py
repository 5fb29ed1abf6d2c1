"""One trace of all ranks on one clock, in the JSON that Perfetto and Chrome open.

A process of the trace is a rank, named with its place in the layout and the error of its clock; a
track of it is a kind of spans. Arrows join what depends on each other: in a collective the last
rank to enter with those that waited for it, over a pipeline edge a send with its receive. An arrow
is left out where the clocks' errors allow the other order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from megascale_common.job.rank_layout import RankLayout
from megascale_common.node.spans.ops import KINDS
from megascale_common.node.spans.record import NO_MICRO_BATCH
from megascale_driver.analysis.spans.clocks import Clock, aligned
from megascale_driver.analysis.spans.instances import collectives
from megascale_driver.analysis.spans.table import SpanTable

# Of each transfer over a pipeline edge: its receive, and the way along the virtual stages.
_EDGES = {
    "send_activation": ("receive_activation", 1),
    "send_gradient": ("receive_gradient", -1),
}
Event = dict[str, Any]


def merged(table: SpanTable, found: Mapping[str, Clock]) -> dict[str, Any]:
    """The trace of ``table``, with the nodes' clocks (:func:`clocks.clocks`).

    Returns:
        An object with traceEvents (times in microseconds since the first span), and under otherData
        each node's clock in words.
    """
    table = aligned(table, found)
    begin_ns = int(table.start_ns.min()) if len(table) else 0
    events = [*_names(table, found), *_spans(table, begin_ns)]
    arrows = [*_collective_arrows(table, found), *_edge_arrows(table, found)]
    for number, (name, source, target, at_ns) in enumerate(arrows):
        start_ns = int(table.start_ns[source])
        end_ns = int(table.start_ns[target] + table.duration_ns[target])
        inside_ns = min(max(at_ns, int(table.start_ns[target])), end_ns)
        for place, phase, at in ((source, "s", start_ns), (target, "f", inside_ns)):
            event = _event(table, place, phase, at - begin_ns) | {"id": number, "cat": "order"}
            events.append(event | {"name": name} | ({"bp": "e"} if phase == "f" else {}))
    present = {table.nodes[rank] for rank in np.unique(table.rank).tolist()}
    clocks_in_words = {
        f"clock of {node}": _words(clock) for node, clock in found.items() if node in present
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": clocks_in_words}


def _names(table: SpanTable, found: Mapping[str, Clock]) -> Iterable[Event]:
    for rank in np.unique(table.rank).tolist():
        place = table.layout.coordinates(rank)
        node = table.nodes[rank]
        where = " ".join(f"{axis}{getattr(place, axis)}" for axis in ("tp", "pp", "dp"))
        name = f"rank {rank} {where} {node} ({_words(found[node])})"
        yield {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        for track, kind in enumerate(KINDS):
            yield {
                "ph": "M",
                "pid": rank,
                "tid": track,
                "name": "thread_name",
                "args": {"name": kind},
            }


def _words(clock: Clock) -> str:
    if clock.error_ns is None:
        return "clock unknown"
    return f"clock within {clock.error_ns / 1e6:.3f} ms, {clock.source}"


def _spans(table: SpanTable, begin_ns: int) -> Iterable[Event]:
    for place in np.argsort(table.start_ns, kind="stable").tolist():
        op, micro_batch = table.ops[table.op[place]], int(table.micro_batch[place])
        shown = {"step": int(table.step[place]), "number": int(table.seq[place])}
        if micro_batch != NO_MICRO_BATCH:
            shown |= {"micro-batch": micro_batch, "chunk": int(table.chunk[place])}
        event = _event(table, place, "X", int(table.start_ns[place]) - begin_ns)
        duration_us = int(table.duration_ns[place]) / 1000
        name = f"{op.name} {op.group}".rstrip() if op.kind == "collective" else op.name
        yield event | {"name": name, "cat": op.kind, "dur": duration_us, "args": shown}


def _event(table: SpanTable, place: int, phase: str, at_ns: int) -> Event:
    track = KINDS.index(table.ops[table.op[place]].kind)
    return {"ph": phase, "pid": int(table.rank[place]), "tid": track, "ts": at_ns / 1000}


def _error_ns(table: SpanTable, found: Mapping[str, Clock], one: int, other: int) -> int | None:
    """By how much two spans' times may be wrong against each other; None: unknown."""
    first, second = (table.nodes[table.rank[place]] for place in (one, other))
    if first == second:
        return 0
    errors = found[first].error_ns, found[second].error_ns
    return None if errors[0] is None or errors[1] is None else errors[0] + errors[1]


def _collective_arrows(
    table: SpanTable, found: Mapping[str, Clock]
) -> Iterable[tuple[str, int, int, int]]:
    """Name, span of the last to enter, span of one that waited, and when it did."""
    places = {_identity(table, place): place for place in range(len(table))}
    groups = collectives(table)
    for number in range(len(groups)):
        members = [
            places[_identity(groups.spans, row)]
            for row in range(int(groups.begin[number]), int(groups.begin[number + 1]))
        ]
        last = max(members, key=lambda place: int(table.start_ns[place]))
        entered_ns = int(table.start_ns[last])
        for place in members:
            error_ns = _error_ns(table, found, last, place)
            if place == last or error_ns is None:
                continue
            begin_ns = int(table.start_ns[place])
            end_ns = begin_ns + int(table.duration_ns[place])
            if begin_ns + error_ns < entered_ns <= end_ns:
                yield "waits for", last, place, entered_ns


def _identity(table: SpanTable, place: int) -> tuple[int, ...]:
    columns = (table.rank, table.step, table.op, table.seq, table.start_ns)
    return tuple(int(column[place]) for column in columns)


def _edge_arrows(
    table: SpanTable, found: Mapping[str, Clock]
) -> Iterable[tuple[str, int, int, int]]:
    by_place: dict[tuple[str, int, int, int, int], int] = {}
    sends: list[tuple[int, str]] = []
    receives = {receive for receive, _ in _EDGES.values()}
    for place in range(len(table)):
        name = table.ops[table.op[place]].name
        if name in receives:
            by_place[_at(table, place, name)] = place
        elif name in _EDGES:
            sends.append((place, name))
    for place, name in sends:
        receive, way = _EDGES[name]
        _, rank, step, batch, chunk = _at(table, place, name)
        neighbour = _neighbour(table.layout, rank, chunk, way)
        target = by_place.get((receive, *neighbour[:1], step, batch, neighbour[1]))
        if target is None:
            continue
        error_ns = _error_ns(table, found, place, target)
        arrived_ns = int(table.start_ns[target] + table.duration_ns[target])
        if error_ns is not None and arrived_ns - int(table.start_ns[place]) > error_ns:
            yield name.removeprefix("send_"), place, target, arrived_ns


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

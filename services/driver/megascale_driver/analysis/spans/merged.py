"""One trace of all ranks on one clock, in the JSON that Perfetto and Chrome open.

A process of the trace is a rank, named with its place in the layout and the error of its clock; a
track of it is a kind of spans. Arrows join what depends on each other: in a collective the last
rank to enter with those that waited for it, over a pipeline edge a send with its receive. An arrow
is left out where the clocks' errors allow the other order.

A track before those of the ranks has the critical path of each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from megascale_common.node.spans.ops import KINDS
from megascale_common.node.spans.record import NO_MICRO_BATCH
from megascale_driver.analysis.spans.clocks import Clock, aligned
from megascale_driver.analysis.spans.critical_path import CriticalPath, critical_path
from megascale_driver.analysis.spans.edges import receive_of_sends
from megascale_driver.analysis.spans.instances import collectives
from megascale_driver.analysis.spans.table import SpanTable

Event = dict[str, Any]
PATH_PROCESS = 1 << 24  # beyond every rank


def merged(table: SpanTable, found: Mapping[str, Clock]) -> dict[str, Any]:
    """The trace of ``table``, with the nodes' clocks (:func:`clocks.clocks`).

    Returns:
        An object with traceEvents (times in microseconds since the first span), and under otherData
        the critical path of each step and each node's clock in words.
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
    paths = [critical_path(table, step) for step in np.unique(table.step).tolist()]
    events += _path_events([path for path in paths if path is not None], begin_ns, table)
    present = {table.nodes[rank] for rank in np.unique(table.rank).tolist()}
    clocks_in_words = {
        f"clock of {node}": _words(clock) for node, clock in found.items() if node in present
    }
    sentences = {
        f"critical path of step {path.step}": path.sentence for path in paths if path is not None
    }
    # Before the events, which are many: who wants the sentences alone reads the beginning.
    other = {**sentences, **clocks_in_words}
    return {"otherData": other, "displayTimeUnit": "ms", "traceEvents": events}


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


def _path_events(paths: Iterable[CriticalPath], begin_ns: int, table: SpanTable) -> Iterable[Event]:
    """A process of its own, whose number no rank has."""
    named = False
    for path in paths:
        if not named:
            named = True
            args: Event = {"name": "critical path"}
            yield {"ph": "M", "pid": PATH_PROCESS, "name": "process_name", "args": args}
            order = {"ph": "M", "pid": PATH_PROCESS, "name": "process_sort_index"}
            yield {**order, "args": {"sort_index": -1}}
        for rank, name, start_ns, duration_ns in path.segments:
            yield {
                "ph": "X",
                "pid": PATH_PROCESS,
                "tid": 0,
                "ts": (start_ns - begin_ns) / 1000,
                "dur": duration_ns / 1000,
                "name": f"rank {rank}: {name}",
                "cat": "critical path",
                "args": {"step": path.step, "rank": rank, "node": table.nodes[rank]},
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
    for target, place in receive_of_sends(table).items():
        error_ns = _error_ns(table, found, place, target)
        arrived_ns = int(table.start_ns[target] + table.duration_ns[target])
        if error_ns is not None and arrived_ns - int(table.start_ns[place]) > error_ns:
            name = table.ops[table.op[place]].name
            yield name.removeprefix("send_"), place, target, arrived_ns

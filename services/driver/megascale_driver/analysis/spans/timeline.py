"""One trace of all ranks on one clock, as JSON for Perfetto and Chrome, with critical paths.

Each rank is a process of the trace, named with its place in the layout and the error of its clock.
Each kind of spans is a track of it; parts of layers with experts are left out, because they are
sums over the layers without a place in time. Arrows join dependent spans: in a collective the last
rank to enter with the ranks that waited for it, over a pipeline edge a send with its receive. An
arrow is left out if the errors of the clocks allow the opposite order. The critical path of each
step is a process before the ranks.

Note [Critical path]. The critical path is the chain of spans across ranks whose lengths add up to
the length of the step. Shortening a span on the path shortens the step; shortening any other span
does not (MegaScale section 5.2 asks the timeline for such dependencies). The path is walked
backwards from the span that ends last. A span that waited for another rank leads to that rank: a
collective to its last member to enter, a receive to the send of its activation or gradient if the
send began after the receive. Any other span leads to the span before it on the same rank. Ends of
collectives and the order of transfers are compared on aligned clocks. The last member to enter a
collective is found without clocks: its time inside is the shortest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_common.node.spans.ops import EVALUATION, KINDS, STEP, Kind
from megascale_common.node.spans.record import NO_MICRO_BATCH
from megascale_driver.analysis.spans.clocks import Clock, aligned
from megascale_driver.analysis.spans.table import (
    SpanTable,
    collectives,
    receive_of_sends,
    single,
)

UNMEASURED = "between spans"
MOST_SEGMENTS = 20_000  # a step of many micro-batches and stages has a few thousand
MOST_NAMED = 3  # ranks in a sentence, and operations of each
SLACK_NS = 1_000  # shorter gaps come from the timer
_AROUND = (STEP.name, EVALUATION.name)
# Parts and figures have no place in time.
_TRACKS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind not in ("part", "figure"))


class Segment(NamedTuple):
    """A piece of the path: an operation of a rank, or a transfer to it; ``start_ns`` is aligned."""

    rank: int
    name: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The path of one step, its first segment first, and one sentence about it."""

    step: int
    segments: tuple[Segment, ...]
    sentence: str

    @property
    def length_ns(self) -> int:
        """Total length of the segments."""
        return sum(segment.duration_ns for segment in self.segments)


def critical_path(table: SpanTable, step: int) -> CriticalPath | None:
    """The path of ``step`` through the ranks of ``table``, whose clocks are aligned.

    If the table has only some ranks, it is the path among them. None: there is no span of that
    step. See Note [Critical path] above.
    """
    table = single(table.where((table.step == step) & ~table.is_op(*_AROUND)))
    if not len(table):
        return None
    walk = _Walk(table)
    segments = tuple(_joined(list(reversed(walk.backwards()))))
    return CriticalPath(step, segments, _sentence(step, segments, table.nodes))


class _Walk:
    """The spans of each rank in order of their starts, and the span to which each leads."""

    def __init__(self, table: SpanTable) -> None:
        self._table = table
        self._start: list[int] = table.start_ns.tolist()
        self._end: list[int] = (table.start_ns + table.duration_ns).tolist()
        self._rank: list[int] = table.rank.tolist()
        self._stream: list[int] = ((table.aux >> np.uint32(8)) & np.uint32(0xFF)).tolist()
        self._sends = receive_of_sends(table)
        self._last = _last_to_enter(table)
        order = np.lexsort((table.start_ns, table.rank))
        ranks, first = np.unique(table.rank[order], return_index=True)
        parts: list[npt.NDArray[np.int64]] = np.split(order, first[1:])
        self._places: dict[int, list[int]] = {
            int(r): part.tolist() for r, part in zip(ranks, parts, strict=True)
        }
        self._begins = {int(r): table.start_ns[part] for r, part in zip(ranks, parts, strict=True)}
        # By rank, the latest end up to each span: shows how far back a span can still be running.
        self._reach = {rank: _latest(self._end, part) for rank, part in self._places.items()}

    def backwards(self) -> list[Segment]:
        """The segments from the last to the first."""
        place = max(range(len(self._end)), key=self._end.__getitem__)
        at_ns, found = self._end[place], list[Segment]()
        while len(found) < MOST_SEGMENTS:
            segment, rank, at_ns = self._before(place, at_ns)
            found.append(segment)
            before = self._covering(rank, at_ns)
            if before is None:
                break
            gap_ns = at_ns - self._end[before]
            if gap_ns > SLACK_NS:
                found.append(Segment(rank, UNMEASURED, self._end[before], gap_ns))
            place, at_ns = before, min(at_ns, self._end[before])
        return found

    def _before(self, place: int, at_ns: int) -> tuple[Segment, int, int]:
        """The part of a span on the path up to ``at_ns``, and rank and time where it continues."""
        rank, start_ns = self._rank[place], self._start[place]
        op = self._table.ops[self._table.op[place]]
        name = f"{op.name} {op.group}".rstrip()
        last = self._last.get(place)
        if last is not None and last != place:
            # After the last member's entry all members are inside: that time is the collective's
            # own. It is at least what the last member spends in it, whatever the clocks show.
            own_ns = max(self._end[last] - self._start[last], at_ns - self._start[last])
            own_ns = min(own_ns, at_ns - start_ns)
            segment = Segment(self._rank[last], name, self._start[last], own_ns)
            # Always continue at an earlier time: wrong clocks must not lead the walk into a ring.
            return segment, self._rank[last], min(self._start[last], at_ns - 1)
        send = self._sends.get(place)
        if send is not None and start_ns < self._start[send] < at_ns:
            segment = Segment(rank, name, self._start[send], at_ns - self._start[send])
            return segment, self._rank[send], self._start[send]
        begin_ns = max(start_ns, self._inner_end(place, at_ns))
        return Segment(rank, name, begin_ns, at_ns - begin_ns), rank, begin_ns

    def _inner_end(self, place: int, at_ns: int) -> int:
        """When the last span inside this one ended, such as a garbage collection; 0: none.

        A span on another stream is not inside.
        """
        rank, latest_ns = self._rank[place], 0
        begins, places = self._begins[rank], self._places[rank]
        number = int(np.searchsorted(begins, self._start[place], side="right"))
        until = int(np.searchsorted(begins, at_ns, side="left"))
        for other in places[number:until]:
            if self._stream[other] == self._stream[place] and self._end[other] < at_ns:
                latest_ns = max(latest_ns, self._end[other])
        return latest_ns

    def _covering(self, rank: int, at_ns: int) -> int | None:
        """The span in which a rank was just before ``at_ns``, or the last one that ended before."""
        places = self._places.get(rank, [])
        behind = int(np.searchsorted(self._begins.get(rank, np.empty(0)), at_ns, side="left"))
        if not behind:
            return None
        best, reach = -1, self._reach[rank]
        for number in range(behind - 1, -1, -1):
            until_ns = min(self._end[places[number]], at_ns)
            if best < 0 or until_ns > min(self._end[places[best]], at_ns):
                best = number
            # No span further back ends later than the best one.
            if not number or min(reach[number - 1], at_ns) <= min(self._end[places[best]], at_ns):
                break
        return places[best]


def _latest(ends: Sequence[int], places: Sequence[int]) -> list[int]:
    found, latest = list[int](), 0
    for place in places:
        latest = max(latest, ends[place])
        found.append(latest)
    return found


def _last_to_enter(table: SpanTable) -> dict[int, int]:
    """The row of the last member to enter, by the row of each span of a collective."""
    found = collectives(table)
    rows, durations = found.place.tolist(), found.spans.duration_ns
    last: dict[int, int] = {}
    for begin, end in zip(found.begin[:-1].tolist(), found.begin[1:].tolist(), strict=True):
        shortest = rows[begin + int(np.argmin(durations[begin:end]))]
        last.update(dict.fromkeys(rows[begin:end], shortest))
    return last


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Segments without empty ones; neighbours with the same rank and name are joined."""
    found: list[Segment] = []
    for each in segments:
        if each.duration_ns <= 0:
            continue
        if found and (found[-1].rank, found[-1].name) == (each.rank, each.name):
            whole_ns = found[-1].duration_ns + each.duration_ns
            found[-1] = found[-1]._replace(duration_ns=whole_ns)
        else:
            found.append(each)
    return found


def _sentence(step: int, segments: Sequence[Segment], nodes: Sequence[str]) -> str:
    whole_ns = sum(segment.duration_ns for segment in segments) or 1
    of_ranks: dict[int, dict[str, int]] = {}
    for each in segments:
        names = of_ranks.setdefault(each.rank, {})
        names[each.name] = names.get(each.name, 0) + each.duration_ns
    ordered = sorted(of_ranks.items(), key=lambda item: -sum(item[1].values()))
    parts = []
    for rank, names in ordered[:MOST_NAMED]:
        spent_ns = sum(names.values())
        most = sorted(names.items(), key=lambda item: -item[1])[:MOST_NAMED]
        shown = ", ".join(f"{name} {_ms(took)}" for name, took in most)
        where = f"rank {rank} on {nodes[rank]}" if nodes[rank] else f"rank {rank}"
        parts.append(f"{where} for {spent_ns / whole_ns:.0%} of it ({shown})")
    more = len(ordered) - MOST_NAMED
    rest = f", and {more} more ranks" if more > 1 else ", and one more rank" if more == 1 else ""
    return f"The critical path of step {step} takes {_ms(whole_ns)}: {'; '.join(parts)}{rest}."


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / 1e6:,.1f} ms"


Event = dict[str, Any]
PATH_PROCESS = 1 << 24  # beyond every rank


def merged(table: SpanTable, found: Mapping[str, Clock]) -> dict[str, Any]:
    """The trace of ``table``, with the nodes' clocks from :func:`clocks.clocks`.

    Returns:
        An object with traceEvents (times in microseconds since the first span), and in otherData
        the critical path of each step and each node's clock as text.
    """
    table = aligned(single(table), found)
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
    # Before the many events, so that a reader of the sentences only needs the beginning.
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
        for track, kind in enumerate(_TRACKS):
            yield {
                "ph": "M",
                "pid": rank,
                "tid": track,
                "name": "thread_name",
                "args": {"name": kind},
            }


def _path_events(paths: Iterable[CriticalPath], begin_ns: int, table: SpanTable) -> Iterable[Event]:
    """The critical paths, as a process with a number that no rank has."""
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
    track = _TRACKS.index(table.ops[table.op[place]].kind)
    return {"ph": phase, "pid": int(table.rank[place]), "tid": track, "ts": at_ns / 1000}


def _error_ns(table: SpanTable, found: Mapping[str, Clock], one: int, other: int) -> int | None:
    """Largest error between the times of two spans; None: unknown."""
    first, second = (table.nodes[table.rank[place]] for place in (one, other))
    if first == second:
        return 0
    errors = found[first].error_ns, found[second].error_ns
    return None if errors[0] is None or errors[1] is None else errors[0] + errors[1]


def _collective_arrows(
    table: SpanTable, found: Mapping[str, Clock]
) -> Iterable[tuple[str, int, int, int]]:
    """Name, row of the last member to enter, row of a member that waited, and time of entry."""
    groups = collectives(table)
    for number in range(len(groups)):
        members = groups.place[groups.begin[number] : groups.begin[number + 1]].tolist()
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


def _edge_arrows(
    table: SpanTable, found: Mapping[str, Clock]
) -> Iterable[tuple[str, int, int, int]]:
    for target, place in receive_of_sends(table).items():
        error_ns = _error_ns(table, found, place, target)
        arrived_ns = int(table.start_ns[target] + table.duration_ns[target])
        if error_ns is not None and arrived_ns - int(table.start_ns[place]) > error_ns:
            name = table.ops[table.op[place]].name
            yield name.removeprefix("send_"), place, target, arrived_ns

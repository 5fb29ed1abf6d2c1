"""The critical path of a step: the chain of spans across ranks whose lengths add up to the step's.

It is walked backwards from the last span to end. A span that waits for another rank leads there: a
collective to the last of its members to enter, a receive to the send of its activation or gradient
if that began later. All else leads to what the same rank did before. What is shorter on the path
makes the step shorter; what lies beside it does not (MegaScale, section 5.2, asks the timeline for
what depends on what).

Ends of collectives and the order of transfers are compared on clocks that are aligned; who entered
a collective last is not: its time inside is the shortest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_common.node.spans.ops import EVALUATION, STEP
from megascale_driver.analysis.spans.edges import receive_of_sends
from megascale_driver.analysis.spans.instances import collectives
from megascale_driver.analysis.spans.table import SpanTable

UNMEASURED = "between spans"
MOST_SEGMENTS = 20_000  # a step of many micro-batches and stages has some thousand
MOST_NAMED = 3  # ranks, and operations of each, in a sentence
SLACK_NS = 1_000  # shorter gaps are the timer's own
_AROUND = (STEP.name, EVALUATION.name)


class Segment(NamedTuple):
    """A piece of the path: what a rank did, or what was on the way to it (``start_ns`` aligned)."""

    rank: int
    name: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The path of one step, first segment first, and what it says in one sentence."""

    step: int
    segments: tuple[Segment, ...]
    sentence: str

    @property
    def length_ns(self) -> int:
        """What the segments take together."""
        return sum(segment.duration_ns for segment in self.segments)


def critical_path(table: SpanTable, step: int) -> CriticalPath | None:
    """The path of ``step`` through the ranks of ``table``, whose clocks are aligned.

    Where the table has only some ranks it is the path among them. None: no span of that step.
    """
    around = [number for number, op in enumerate(table.ops) if op.name in _AROUND]
    table = table.where((table.step == step) & ~np.isin(table.op, around))
    if not len(table):
        return None
    walk = _Walk(table)
    segments = tuple(_joined(list(reversed(walk.backwards()))))
    return CriticalPath(step, segments, _sentence(step, segments, table.nodes))


class _Walk:
    """Of each rank the spans in order of their begin, and where a span leads to."""

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
        # Of each rank the latest end so far: what began earlier and goes on is found without a
        # search over all of it.
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
        """What of a span lies on the path up to ``at_ns``, and on which rank it goes on when."""
        rank, start_ns = self._rank[place], self._start[place]
        op = self._table.ops[self._table.op[place]]
        name = f"{op.name} {op.group}".rstrip()
        last = self._last.get(place)
        if last is not None and last != place:
            # Behind the last one's entry all members are inside: that much is the collective's own,
            # and at least what the last one spends in it, whatever the clocks say.
            own_ns = max(self._end[last] - self._start[last], at_ns - self._start[last])
            own_ns = min(own_ns, at_ns - start_ns)
            segment = Segment(self._rank[last], name, self._start[last], own_ns)
            # Earlier in any case: clocks that are wrong against each other must not lead in a ring.
            return segment, self._rank[last], min(self._start[last], at_ns - 1)
        send = self._sends.get(place)
        if send is not None and start_ns < self._start[send] < at_ns:
            segment = Segment(rank, name, self._start[send], at_ns - self._start[send])
            return segment, self._rank[send], self._start[send]
        begin_ns = max(start_ns, self._inner_end(place, at_ns))
        return Segment(rank, name, begin_ns, at_ns - begin_ns), rank, begin_ns

    def _inner_end(self, place: int, at_ns: int) -> int:
        """When the last span inside of this one ended, such as a garbage collection; 0: none.

        What runs beside it on another stream is not inside.
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
        """The span that a rank was in just before ``at_ns``, or the last to end before."""
        places = self._places.get(rank, [])
        behind = int(np.searchsorted(self._begins.get(rank, np.empty(0)), at_ns, side="left"))
        if not behind:
            return None
        best, reach = -1, self._reach[rank]
        for number in range(behind - 1, -1, -1):
            until_ns = min(self._end[places[number]], at_ns)
            if best < 0 or until_ns > min(self._end[places[best]], at_ns):
                best = number
            # Nothing further back reaches further than the best.
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
    """By place of a collective's span, that of the member whose time inside is the shortest."""
    keys = (table.rank, table.step, table.op, table.seq, table.start_ns)
    places = {key: place for place, key in enumerate(zip(*(k.tolist() for k in keys), strict=True))}
    found = collectives(table)
    spans = found.spans
    same = (spans.rank, spans.step, spans.op, spans.seq, spans.start_ns)
    rows = [places[key] for key in zip(*(k.tolist() for k in same), strict=True)]
    last: dict[int, int] = {}
    durations = spans.duration_ns
    for begin, end in zip(found.begin[:-1].tolist(), found.begin[1:].tolist(), strict=True):
        shortest = rows[begin + int(np.argmin(durations[begin:end]))]
        last.update(dict.fromkeys(rows[begin:end], shortest))
    return last


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Pieces of one rank and name that follow each other as one; without empty ones."""
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

"""Clocks of nodes against each other: from heartbeats, refined by collectives, with the error.

A heartbeat and its acknowledgement give two times of each clock, and with them the node's offset
from the driver, exact to half of the round trip; the sample with the shortest one counts (RFC 5905,
section 10). Members of a collective finish it together: within the time that the last of them to
enter spends in it. The offsets of two nodes that share one are compared by their exits, so the
error is that time in the fastest collective plus the spread over the steps.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megascale_driver.analysis.spans.table import Instances, SpanTable, collectives

# Collectives that are always measured whole: of others a span may be the wait for what had ended.
WHOLE_COLLECTIVES = ("all_reduce",)
LEAST_INSTANCES = 5
_MAD_TO_DEVIATION = 1.4826
_DRIVER = ""  # the vertex that heartbeats join nodes to


class Exchange(NamedTuple):
    """A heartbeat and its acknowledgement: Unix times in nanoseconds, each on its own clock."""

    node_sent_ns: int
    driver_received_ns: int
    driver_sent_ns: int
    node_received_ns: int

    @classmethod
    def of(cls, round_trip_ns: int, offset_ns: int) -> Exchange:
        """One with this round trip and offset, of an answer given at once."""
        received_ns = offset_ns + round_trip_ns // 2
        return cls(0, received_ns, received_ns, round_trip_ns)

    @property
    def round_trip_ns(self) -> int:
        """Time on the way, both ways together."""
        away = self.node_received_ns - self.node_sent_ns
        return away - (self.driver_sent_ns - self.driver_received_ns)

    @property
    def offset_ns(self) -> int:
        """The driver's clock minus the node's."""
        there = self.driver_received_ns - self.node_sent_ns
        return (there + self.driver_sent_ns - self.node_received_ns) // 2


@dataclass(frozen=True, slots=True)
class Clock:
    """What to add to a node's times to have the reference node's: exact to ``error_ns``.

    ``error_ns`` is None where nothing joins the node to the reference: then nothing is added.
    """

    offset_ns: int
    error_ns: int | None
    source: str  # reference, heartbeats, collectives, or both joined by "+"


@dataclass(frozen=True, slots=True)
class _Edge:
    """Adding ``offset_ns`` to times of ``node`` gives those of ``to``."""

    node: str
    to: str
    offset_ns: int
    error_ns: int
    source: str


def clocks(
    table: SpanTable, heartbeats: Mapping[str, Sequence[Exchange]] | None = None
) -> dict[str, Clock]:
    """The clock of each node of ``table`` against the node of the lowest rank that has spans.

    Each goes the way with the least error: through collectives that two nodes share, or through the
    driver. What contradicts the heartbeats by more than both errors is not believed.
    """
    by_heartbeat = list(_of_heartbeats(heartbeats or {}))
    reference = table.nodes[int(table.rank.min()) if len(table) else 0]
    direct = _joined(reference, by_heartbeat)
    best = _joined(reference, [*by_heartbeat, *_of_exits(table)])
    found: dict[str, Clock] = {}
    for node in dict.fromkeys(table.nodes):
        clock = best.get(node, Clock(0, None, "none"))
        sure = direct.get(node)
        if sure is not None and sure.error_ns is not None and clock.error_ns is not None:
            apart = abs(clock.offset_ns - sure.offset_ns)
            clock = sure if apart > clock.error_ns + sure.error_ns else clock
        found[node] = clock
    return found


def aligned(table: SpanTable, found: Mapping[str, Clock]) -> SpanTable:
    """The same spans with all starts on the reference node's clock."""
    offsets = np.array([found[node].offset_ns for node in table.nodes], np.int64)
    starts = table.start_ns + offsets[table.rank] if len(table) else table.start_ns
    return replace(table, start_ns=starts)


def _of_heartbeats(heartbeats: Mapping[str, Sequence[Exchange]]) -> Iterable[_Edge]:
    for node, exchanges in heartbeats.items():
        sound = [one for one in exchanges if one.round_trip_ns >= 0]  # else a clock was set
        if sound:
            best = min(sound, key=lambda one: one.round_trip_ns)
            yield _Edge(node, _DRIVER, best.offset_ns, (best.round_trip_ns + 1) // 2, "heartbeats")


def _of_exits(table: SpanTable) -> Iterable[_Edge]:
    """Of each group the nodes of its members against the first of them."""
    found = collectives(table.where(table.is_op(*WHOLE_COLLECTIVES)))
    for op in np.unique(found.op):
        for group in np.unique(found.group[found.op == op]):
            yield from _of_group(found, (found.op == op) & (found.group == group))


def _of_group(found: Instances, chosen: npt.NDArray[np.bool_]) -> list[_Edge]:
    spans, numbers = found.spans, np.flatnonzero(chosen)
    ends = spans.start_ns + spans.duration_ns
    by_node: dict[str, dict[int, int]] = {}  # of each node the last exit by collective
    for number in numbers.tolist():
        for place in range(found.begin[number], found.begin[number + 1]):
            exits = by_node.setdefault(spans.nodes[spans.rank[place]], {})
            exits[number] = max(exits.get(number, int(ends[place])), int(ends[place]))
    names = sorted(by_node)
    edges = []
    for name in names[1:]:
        first, other = by_node[names[0]], by_node[name]
        shared = sorted(first.keys() & other.keys())
        if len(shared) < LEAST_INSTANCES:
            continue
        apart = np.array([first[number] - other[number] for number in shared], np.int64)
        middle = int(np.median(apart))
        spread = _MAD_TO_DEVIATION * float(np.median(np.abs(apart - middle)))
        error = int(np.ceil(spread)) + int(found.shortest_ns[shared].min())
        edges.append(_Edge(name, names[0], middle, error, "collectives"))
    return edges


def _joined(reference: str, edges: Iterable[_Edge]) -> dict[str, Clock]:
    """Clocks against the reference by the ways of the least error (Dijkstra)."""
    ways: dict[str, list[tuple[str, int, int, str]]] = {}
    for edge in edges:
        ways.setdefault(edge.to, []).append((edge.node, edge.offset_ns, edge.error_ns, edge.source))
        ways.setdefault(edge.node, []).append(
            (edge.to, -edge.offset_ns, edge.error_ns, edge.source)
        )
    found: dict[str, Clock] = {}
    waiting: list[tuple[int, str, int, frozenset[str]]] = [(0, reference, 0, frozenset())]
    while waiting:
        error, place, offset, sources = heapq.heappop(waiting)
        if place in found:
            continue
        found[place] = Clock(offset, error, "+".join(sorted(sources)) or "reference")
        for other, more, its_error, source in ways.get(place, ()):
            if other not in found:
                way = (error + its_error, other, offset + more, sources | {source})
                heapq.heappush(waiting, way)
    return found

"""The parts of a switch: queues with their links, ECN marks, and priority flow control (PFC)."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megascale_planner.network.congestion.control import PACKET_BITS, PACKET_BYTES

Packet = tuple[int, float, bool]  # flow, when it was sent, whether it is marked


class Events:
    """Virtual time: calls in the order of their times, those of one time as they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def later(self, delay_s: float, call: Callable[[Any], None], argument: Any) -> None:
        """Call it after ``delay_s``."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, call, argument))

    def run(self, until_s: float, ended: Callable[[], bool]) -> None:
        """Until ``ended``, nothing is left, or ``until_s``."""
        heap, pop = self._heap, heapq.heappop
        while heap and not ended():
            self.now_s, _, call, argument = pop(heap)
            if self.now_s > until_s:
                self.now_s = until_s
                return
            call(argument)


@dataclass(frozen=True, slots=True)
class Marking:
    """ECN by the length of the queue (RED).

    From ``least_bytes`` on with a probability that grows to ``most`` at ``all_bytes``; beyond that
    every packet.
    """

    least_bytes: int
    all_bytes: int
    most: float

    def times(self, factor: float) -> Marking:
        """The same for a link that is ``factor`` times as fast."""
        return Marking(int(self.least_bytes * factor), int(self.all_bytes * factor), self.most)


class Marks:
    """Draws marks: by a counter and a seed, so that a run can be repeated."""

    def __init__(self, marking: Marking, seed: int) -> None:
        self._marking, self._state = marking, (seed * 2 + 1) & 0xFFFFFFFF
        self.count = 0

    def draw(self, queue_bytes: int) -> bool:
        """Whether a packet that finds such a queue is marked."""
        given = self._marking
        if queue_bytes <= given.least_bytes:
            return False
        chance = 1.0
        if queue_bytes < given.all_bytes:
            span = given.all_bytes - given.least_bytes
            chance = given.most * (queue_bytes - given.least_bytes) / span
        # A linear congruential generator (Numerical Recipes): good enough for marks.
        self._state = (1664525 * self._state + 1013904223) & 0xFFFFFFFF
        marked = self._state < chance * 4294967296.0
        self.count += marked
        return marked


class Ingress:
    """PFC of one port in: it pauses who sends while too many bytes of its own are in the switch."""

    def __init__(self, events: Events, delay_s: float, xoff_bytes: int, xon_bytes: float) -> None:
        self._events, self._delay_s = events, delay_s
        self._xoff, self._xon = xoff_bytes, xon_bytes
        self._bytes, self._stopped = 0, False
        self.pause: Callable[[Any], None] = lambda _: None
        self.go_on: Callable[[Any], None] = lambda _: None

    def came(self) -> None:
        """A packet came in by this port."""
        self._bytes += PACKET_BYTES
        if not self._stopped and self._bytes > self._xoff:
            self._stopped = True
            self._events.later(self._delay_s, self.pause, None)

    def went(self) -> None:
        """One of them has left."""
        self._bytes -= PACKET_BYTES
        if self._stopped and self._bytes < self._xon:
            self._stopped = False
            self._events.later(self._delay_s, self.go_on, None)


class Port:
    """A port out: a queue, its link, and what the link leads to.

    Attributes:
        lengths: how long the queue had each length, in seconds, by its length in packets.
    """

    def __init__(
        self,
        events: Events,
        marks: Marks,
        bps: float,
        delay_s: float,
        sink: Callable[[Packet], None],
        left: Callable[[Packet], None],
    ) -> None:
        self._events, self._marks, self._packet_s = events, marks, PACKET_BITS / bps
        self._delay_s, self._sink, self._left = delay_s, sink, left
        self._queue: deque[Packet] = deque()
        self._busy = False
        self._stopped_s = -1.0
        self._paused_s = 0.0
        self._changed_s = 0.0
        self.lengths: dict[int, float] = {}

    def push(self, packet: Packet) -> None:
        """A packet for this link."""
        if not packet[2] and self._marks.draw(len(self._queue) * PACKET_BYTES):
            packet = (packet[0], packet[1], True)
        self._count()
        self._queue.append(packet)
        if not self._busy:
            self._next()

    def pause(self, _: Any) -> None:
        """PFC: the packet that is on the link is sent whole, and no other."""
        if self._stopped_s < 0:
            self._stopped_s = self._events.now_s

    def go_on(self, _: Any) -> None:
        """PFC: send again."""
        if self._stopped_s >= 0:
            self._paused_s += self._events.now_s - self._stopped_s
            self._stopped_s = -1.0
            if not self._busy:
                self._next()

    @property
    def paused_s(self) -> float:
        """Seconds so far."""
        since_s = self._events.now_s - self._stopped_s if self._stopped_s >= 0 else 0.0
        return self._paused_s + since_s

    def queue_bytes(self) -> tuple[float, float]:
        """The mean over time, and the 99th percentile."""
        self._count()
        total_s = sum(self.lengths.values())
        if not total_s:
            return 0.0, 0.0
        mean = sum(length * held_s for length, held_s in self.lengths.items()) / total_s
        left_s, longest = 0.99 * total_s, 0
        for length, held_s in sorted(self.lengths.items()):
            longest, left_s = length, left_s - held_s
            if left_s <= 0:
                break
        return mean * PACKET_BYTES, float(longest * PACKET_BYTES)

    def _next(self) -> None:
        if self._stopped_s >= 0 or not self._queue:
            return
        self._count()
        packet = self._queue.popleft()
        self._left(packet)
        self._busy = True
        self._events.later(self._packet_s, self._sent, packet)

    def _sent(self, packet: Packet) -> None:
        self._busy = False
        self._events.later(self._delay_s, self._sink, packet)
        self._next()

    def _count(self) -> None:
        length, now_s = len(self._queue), self._events.now_s
        self.lengths[length] = self.lengths.get(length, 0.0) + now_s - self._changed_s
        self._changed_s = now_s

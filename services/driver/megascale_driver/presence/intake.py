"""Takes in heartbeats: the lane notes each, and those with news become events for the core.

The newest heartbeat of each link is kept in bytes, as it came. What the core needs only rarely,
such as the status pages of stalled ranks, is read from it on demand.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence

from megascale.v1 import link_pb2, types_pb2
from megascale_driver.core.jobs import timers
from megascale_driver.core.values.cluster import Cluster
from megascale_driver.core.values.events import NodeReport, RankPages
from megascale_driver.core.values.policy import Policy
from megascale_driver.presence import arrival, evidence, reports
from megascale_driver.presence.arrival import Arrival
from megascale_driver.presence.lane import Lane, News

PAGES_AT_ONCE = 32  # nodes read before other tasks get a turn


class Seat:
    """State of one linked node: its newest heartbeat, when it came, and its clock."""

    def __init__(self, node: str, incarnation: str, received_at_s: float) -> None:
        self.node = node
        self.incarnation = incarnation
        self.raw = b""  # the newest heartbeat, serialized in its request; empty before the first
        self.received_at_s = received_at_s
        self.clock = ClockOffset()
        # Signature of the newest evaluated heartbeat, and the turn of the lane before it.
        self.signature = b""
        self.turn = -1

    @property
    def beat(self) -> link_pb2.Heartbeat | None:
        """The newest heartbeat."""
        return arrival.whole(self.raw) if self.raw else None


class Intake:
    """Takes in the heartbeats of all links."""

    def __init__(self, policy: Policy) -> None:
        self.lane = Lane(policy)
        self.pace = Pace(self.lane, policy)

    def take(self, seat: Seat, beat: Arrival | None, now_s: float) -> News:
        """Note a heartbeat that arrived at ``now_s``; returns whether the core has to see it.

        None: it cannot be used, but proves that the agent is alive.

        Raises:
            google.protobuf.message.DecodeError: a part of it is not a valid message.
        """
        seat.received_at_s = now_s
        lane = self.lane
        if beat is None:
            return lane.alive(now_s, seat.node)
        seat.raw = beat.raw
        sent_ns, driver_received_ns, driver_sent_ns, received_ns = beat.clocks()
        # First the answer to the heartbeat before, which completes a sample; then this one.
        if received_ns:
            seat.clock.returned(driver_received_ns, driver_sent_ns, received_ns)
        seat.clock.acknowledged(sent_ns, int(now_s * 1e9))
        if now_s >= lane.backlog.next_sample_s and seat.clock.known:
            lane.backlog.note(now_s, now_s - sent_ns / 1e9 - seat.clock.offset_s)
        # Snapshots in memory change with every save. While they are not due, the signature leaves
        # them out, and such a heartbeat is a repetition.
        slow_due = lane.slow_due(now_s, seat.node)
        signature = beat.signature(memory=slow_due or not beat.at_work)
        if signature == seat.signature and lane.repeats(now_s, seat.node, seat.turn):
            return News.NONE
        seat.signature = signature
        # Before beat(), which may change the turn: then the next repetition is evaluated again.
        seat.turn = lane.turn
        return lane.beat(now_s, seat.node, *evidence.of(beat.whole(), slow_due))

    def report(
        self, seat: Seat, epoch: types_pb2.Epoch, now_s: float, newest: Arrival | None = None
    ) -> NodeReport | None:
        """The event of the newest heartbeat (``newest``, if parsed); None before the first.

        Raises:
            ValueError: it has a value that this build does not know.
        """
        beat = newest.whole() if newest is not None else seat.beat
        if beat is None:
            return None
        report = reports.report(beat, epoch, seat.clock.offset_s)
        return NodeReport(now_s, seat.node, seat.incarnation, report)


async def pages_of(seats: Sequence[Seat], job: str, attempt: int) -> list[RankPages]:
    """The status pages of the attempt's ranks by the newest heartbeats of these nodes."""
    found = []
    for first in range(0, len(seats), PAGES_AT_ONCE):
        for seat in seats[first : first + PAGES_AT_ONCE]:
            beat = seat.beat
            if beat is not None and (beat.job, beat.attempt) == (job, attempt):
                pages = reports.pages(beat)
                found.append(RankPages(seat.node, seat.incarnation, seat.received_at_s, pages))
        await asyncio.sleep(0)  # so that acknowledgements are not held up
    return found


# Clock offset: the difference between a node's clock and the driver's, from four timestamps.
#
# A heartbeat has the time at which it was sent. The acknowledgement of the one before has the times
# at which that one arrived and the answer left, and the next heartbeat has the time at which the
# answer was received: two times of each clock. The offset is exact to half of the round trip, so
# among the newest samples the one with the shortest round trip counts (RFC 5905, section 10).


SAMPLES = 8
PENDING = 8  # heartbeats whose acknowledgement can still come back


class ClockOffset:
    """The clock of one node; times in nanoseconds since 1970, each on its own clock."""

    __slots__ = ("_pending", "_samples")

    def __init__(self) -> None:
        self._pending: dict[int, int] = {}  # driver_received_ns: node_sent_ns
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES)

    def acknowledged(self, node_sent_ns: int, driver_received_ns: int) -> None:
        """A heartbeat was sent and received at these times; its acknowledgement is on the way."""
        if node_sent_ns <= 0:
            return
        if len(self._pending) >= PENDING:
            del self._pending[next(iter(self._pending))]
        self._pending[driver_received_ns] = node_sent_ns

    def returned(self, driver_received_ns: int, driver_sent_ns: int, node_received_ns: int) -> None:
        """A node reports when an acknowledgement reached it; a repeated report is one sample."""
        node_sent_ns = self._pending.pop(driver_received_ns, None)
        if node_sent_ns is None:
            return
        round_trip_ns = (node_received_ns - node_sent_ns) - (driver_sent_ns - driver_received_ns)
        if round_trip_ns < 0:
            return  # a clock was set meanwhile
        offset_ns = (driver_received_ns - node_sent_ns + driver_sent_ns - node_received_ns) // 2
        self._samples.append((round_trip_ns, offset_ns))

    @property
    def known(self) -> bool:
        """True if there is a sample."""
        return bool(self._samples)

    @property
    def samples(self) -> list[tuple[int, int]]:
        """The newest samples: round trip, and the driver's clock minus the node's; nanoseconds."""
        return list(self._samples)

    @property
    def offset_s(self) -> float:
        """The driver's clock minus the node's, in seconds; 0 until it is known."""
        return min(self._samples)[1] / 1e9 if self._samples else 0.0


# Pace of the ticks: four times a second, or when there is something to decide.
#
# A driver ticks at a fixed interval, which also shows whether its event loop is blocked. Under a
# virtual clock most ticks change nothing: with :attr:`Pace.max_pause_s` above the interval those
# are left out, and the others come at the same moments as before.
#
# Note [Skipping]
# ~~~~~~~~~~~~~~~
# To skip stretches in which nothing changes, a simulation sets ``max_pause_s`` to infinity and
# declares with :meth:`megascale_driver.presence.lane.Lane.assume` which nodes repeat their newest
# heartbeat from now on. Their heartbeats need not be sent, and the loop's next timer is the next
# moment at which the core has something to decide.


TICK_INTERVAL_S = 0.25


class Pace:
    """The times of the ticks of one driver."""

    def __init__(self, lane: Lane, policy: Policy) -> None:
        self.max_pause_s = TICK_INTERVAL_S
        self._lane = lane
        self._policy = policy

    @property
    def skips(self) -> bool:
        """True if ticks that change nothing are left out."""
        return self.max_pause_s > TICK_INTERVAL_S

    def next_tick_s(self, last_s: float, now_s: float, state: Cluster, events_wait: bool) -> float:
        """When to tick after the tick at ``last_s``; ``events_wait``: an event came since."""
        if not self.skips:
            return now_s + TICK_INTERVAL_S
        due_s = last_s + TICK_INTERVAL_S
        if not events_wait:
            due_s = min(
                self._lane.next_deadline_s(),
                timers.next_s(state, last_s, self._policy),
                last_s + self.max_pause_s,
            )
        due_s = max(due_s, now_s)
        if due_s == math.inf:
            return due_s
        # Rounded to the grid of the ticks that are not left out.
        return last_s + max(1, math.ceil((due_s - last_s) / TICK_INTERVAL_S)) * TICK_INTERVAL_S

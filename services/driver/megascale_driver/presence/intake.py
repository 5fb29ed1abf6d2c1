"""What becomes of a heartbeat: noted by the lane, and an event for the core if it is news.

The newest heartbeat of each link is kept as it came, in bytes. What the core needs of it only now
and then, such as the status pages of ranks that stand still, is read when it is asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megascale.v1 import link_pb2, types_pb2
from megascale_driver.core.values.events import NodeReport, RankPages
from megascale_driver.core.values.policy import Policy
from megascale_driver.presence import arrival, evidence, reports
from megascale_driver.presence.arrival import Arrival
from megascale_driver.presence.clock_offset import ClockOffset
from megascale_driver.presence.lane import Lane, News
from megascale_driver.presence.pace import Pace

PAGES_AT_ONCE = 32  # nodes, before other tasks get a turn


class Seat:
    """What is kept of one linked node: its newest heartbeat, when it came, its clock."""

    def __init__(self, node: str, incarnation: str, received_at_s: float) -> None:
        self.node, self.incarnation = node, incarnation
        self.raw = b""  # the newest heartbeat, in its request; empty before the first
        self.received_at_s = received_at_s
        self.clock = ClockOffset()
        # Of the newest heartbeat that was evaluated, and the lane's turn before that.
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
        """Note a heartbeat that arrived at ``now_s``; whether the core has to see it.

        None: it cannot be used, but proves the agent alive.

        Raises:
            google.protobuf.message.DecodeError: a part of it is no message of its kind.
        """
        seat.received_at_s = now_s
        lane = self.lane
        if beat is None:
            return lane.alive(now_s, seat.node)
        seat.raw = beat.raw
        sent_ns, driver_received_ns, driver_sent_ns, received_ns = beat.clocks()
        if received_ns:
            seat.clock.returned(driver_received_ns, driver_sent_ns, received_ns)
        seat.clock.acknowledged(sent_ns, int(now_s * 1e9))
        if now_s >= lane.backlog.next_sample_s and seat.clock.known:
            lane.backlog.note(now_s, now_s - sent_ns / 1e9 - seat.clock.offset_s)
        slow_due = lane.slow_due(now_s, seat.node)
        signature = beat.signature(memory=slow_due or not beat.at_work)
        if signature == seat.signature and lane.repeats(now_s, seat.node, seat.turn):
            return News.NONE
        seat.signature, seat.turn = signature, lane.turn
        return lane.beat(now_s, seat.node, *evidence.of(beat.whole(), slow_due))

    def report(
        self, seat: Seat, epoch: types_pb2.Epoch, now_s: float, newest: Arrival | None = None
    ) -> NodeReport | None:
        """The event of the newest heartbeat, from ``newest`` if that is it; None before the first.

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
        await asyncio.sleep(0)  # acknowledgements go first
    return found

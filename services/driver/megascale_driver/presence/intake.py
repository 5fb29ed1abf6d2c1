"""What becomes of a heartbeat: noted by the lane, and an event for the core if it is news.

The newest heartbeat of each link is kept as it came. What the core needs of it only now and then,
such as the status pages of ranks that stand still, is converted when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from megascale.v1 import link_pb2, types_pb2
from megascale_driver.core.events import NodeReport, RankPages
from megascale_driver.core.policy import Policy
from megascale_driver.presence import evidence, reports
from megascale_driver.presence.clock_offset import ClockOffset
from megascale_driver.presence.lane import Lane, News
from megascale_driver.presence.pace import Pace


class Seat:
    """What is kept of one linked node: its newest heartbeat, when it came, its clock."""

    def __init__(self, node: str, incarnation: str, received_at_s: float) -> None:
        self.node, self.incarnation = node, incarnation
        self.beat: link_pb2.Heartbeat | None = None
        self.received_at_s = received_at_s
        self.clock = ClockOffset()


class Intake:
    """Takes in the heartbeats of all links."""

    def __init__(self, policy: Policy) -> None:
        self.lane = Lane(policy)
        self.pace = Pace(self.lane, policy)

    def take(self, seat: Seat, beat: link_pb2.Heartbeat | None, now_s: float) -> News:
        """Note a heartbeat that arrived at ``now_s``; whether the core has to see it.

        None: it cannot be used, but proves the agent alive.
        """
        seat.received_at_s = now_s
        if beat is None:
            return self.lane.alive(now_s, seat.node)
        seat.beat = beat
        clock = seat.clock
        if beat.HasField("ack_received_at"):
            clock.returned(
                _nanoseconds(beat.ack_driver_received_at),
                _nanoseconds(beat.ack_driver_sent_at),
                _nanoseconds(beat.ack_received_at),
            )
        clock.acknowledged(_nanoseconds(beat.sent_at), int(now_s * 1e9))
        slow_due = self.lane.slow_due(now_s, seat.node)
        return self.lane.beat(now_s, seat.node, *evidence.of(beat, slow_due))

    def report(self, seat: Seat, epoch: types_pb2.Epoch, now_s: float) -> NodeReport | None:
        """The event of the newest heartbeat; None before the first.

        Raises:
            ValueError: it has a value that this build does not know.
        """
        if seat.beat is None:
            return None
        report = reports.report(seat.beat, epoch, seat.clock.offset_s)
        return NodeReport(now_s, seat.node, seat.incarnation, report)

    def pages(self, seats: Iterable[Seat], job: str, attempt: int) -> tuple[RankPages, ...]:
        """The status pages of the attempt's ranks by the newest heartbeats of these nodes."""
        return tuple(
            RankPages(seat.node, seat.incarnation, seat.received_at_s, reports.pages(seat.beat))
            for seat in seats
            if seat.beat is not None and (seat.beat.job, seat.beat.attempt) == (job, attempt)
        )


def _nanoseconds(stamp: Timestamp) -> int:
    return stamp.seconds * 1_000_000_000 + stamp.nanos

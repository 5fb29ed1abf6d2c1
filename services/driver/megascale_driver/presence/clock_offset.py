"""By how much a node's clock differs from the driver's, from four timestamps of a heartbeat.

A heartbeat carries when it was sent, and the acknowledgement before it carries when that one
arrived, when the answer left and (with the next heartbeat) when the answer was received: two times
of each clock. The offset is exact to half of the round trip, so the sample with the shortest one
counts, among the newest (RFC 5905, section 10).
"""

from __future__ import annotations

from collections import deque

SAMPLES = 8
PENDING = 8  # heartbeats whose acknowledgement may still come back


class ClockOffset:
    """The clock of one node; times in nanoseconds since 1970, each on its own clock."""

    __slots__ = ("_pending", "_samples")

    def __init__(self) -> None:
        self._pending: dict[int, int] = {}  # driver_received_ns: node_sent_ns
        self._samples: deque[tuple[int, int]] = deque(maxlen=SAMPLES)

    def acknowledged(self, node_sent_ns: int, driver_received_ns: int) -> None:
        """A heartbeat was sent and received then; its acknowledgement is on the way."""
        if node_sent_ns <= 0:
            return
        if len(self._pending) >= PENDING:
            del self._pending[next(iter(self._pending))]
        self._pending[driver_received_ns] = node_sent_ns

    def returned(self, driver_received_ns: int, driver_sent_ns: int, node_received_ns: int) -> None:
        """The node reports when an acknowledgement reached it; one twice is one sample."""
        node_sent_ns = self._pending.pop(driver_received_ns, None)
        if node_sent_ns is None:
            return
        round_trip_ns = (node_received_ns - node_sent_ns) - (driver_sent_ns - driver_received_ns)
        if round_trip_ns < 0:
            return  # a clock was set in between
        offset_ns = (driver_received_ns - node_sent_ns + driver_sent_ns - node_received_ns) // 2
        self._samples.append((round_trip_ns, offset_ns))

    @property
    def known(self) -> bool:
        """Whether there is a sample."""
        return bool(self._samples)

    @property
    def samples(self) -> list[tuple[int, int]]:
        """The newest: round trip, and the driver's clock minus the node's; nanoseconds."""
        return list(self._samples)

    @property
    def offset_s(self) -> float:
        """The driver's clock minus the node's, in seconds; 0 until it is known."""
        return min(self._samples)[1] / 1e9 if self._samples else 0.0

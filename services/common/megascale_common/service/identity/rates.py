"""How many calls one peer may begin, and how many streams it may have open.

For calls there is a bucket of tokens for each peer, and a bound on the buckets.

It keeps a program that has gone wrong from taking a server's time from all others. Messages within
a stream are not counted: gRPC's flow control and the bounds of their readers hold for those.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

from megascale_common.service.errors import LimitError
from megascale_job.visible import counted

CALLS_PER_S = 200.0
BURST_CALLS = 1000.0
# Peers that are remembered; the one that called longest ago is forgotten first, and has a full
# bucket when it comes back. More than the links that a driver holds.
MAX_PEERS = 65_536


class CallRate:
    """The calls of all peers of one server."""

    def __init__(
        self,
        calls_per_s: float = CALLS_PER_S,
        burst_calls: float = BURST_CALLS,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._calls_per_s, self._burst_calls, self._now_s = calls_per_s, burst_calls, now_s
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # calls left, when

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, peer: str) -> None:
        """Count a call.

        Raises:
            LimitError: the peer has begun too many; after a moment it may call again.
        """
        now_s = self._now_s()
        left, at_s = self._buckets.pop(peer, (self._burst_calls, now_s))
        left = min(self._burst_calls, left + (now_s - at_s) * self._calls_per_s)
        allowed = left >= 1.0
        self._buckets[peer] = (left - 1.0 if allowed else left, now_s)
        if len(self._buckets) > MAX_PEERS:
            self._buckets.popitem(last=False)
        if not allowed:
            raise LimitError(
                f"{peer} begins more than {counted(self._calls_per_s, 'call')} a second: "
                "wait a second, and "
                "keep channels and streams open instead of calling again",
                reason="TOO_MANY_CALLS",
            )


class OpenStreams:
    """Streams of one kind that callers have open at once: each takes memory while it lasts.

    Args:
        most_of_one: of one caller. Where callers show no certificate all of them are one.
        most: of all together.
    """

    def __init__(self, most_of_one: int, most: int) -> None:
        self._most_of_one = most_of_one
        self._most = most
        self._open: Counter[str] = Counter()

    def problem(self, caller: object) -> str:
        """Why the caller may open no further one; "" where it may."""
        own, everybodys = self._open[str(caller)], self._open.total()
        if own < self._most_of_one and everybodys < self._most:
            return ""
        return (
            f"{everybodys} of such streams are open here, {own} of them are yours: one caller may "
            f"have {self._most_of_one} and all together {self._most}; close some"
        )

    @contextlib.contextmanager
    def one_more(self, caller: object) -> Iterator[None]:
        """Hold one open while the block lasts."""
        self._open[str(caller)] += 1
        try:
            yield
        finally:
            self._open[str(caller)] -= 1
            self._open += Counter()  # forgets callers that have none

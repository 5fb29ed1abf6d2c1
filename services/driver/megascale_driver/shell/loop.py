"""The event loop: detection of stalls, garbage collection without any, and turns for messages.

Everything that waits on the loop (acknowledgements, ticks, etcd's answers) waits as long as the
longest piece of work between two turns of it. LoopWatch measures that by a timer that is due 50
times a second: its delay is the time for which something else has run. LoopTurns keeps a turn
short.
"""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Awaitable, Callable

INTERVAL_S = 0.02
STALL_S = 0.01  # a longer delay counts as a stall
WINDOW_S = 60
FREEZE_STEP = 256  # links
FREEZE_SHARE = 4  # and a quarter of the links that were open before
# Allocations until a collection of the youngest generation, and collections of it until one of the
# next. The oldest generation is never collected by Python itself (collect_periodically).
THRESHOLDS = (5_000, 20, 1_000_000)
FULL_S = 600.0


class LoopWatch:
    """Watches the running loop from :meth:`start` to :meth:`stop`."""

    def __init__(self) -> None:
        self.stalls = 0  # stalls longer than STALL_S since the start
        self._seconds: deque[tuple[int, float]] = deque()  # (second, longest delay), newest last
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._wait(asyncio.get_running_loop())

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()

    def late(self, at_s: float, lag_s: float) -> None:
        """Note that the timer fired ``lag_s`` late at ``at_s``, a time of the clock of the loop."""
        self.stalls += lag_s > STALL_S
        second = int(at_s)
        if self._seconds and self._seconds[-1][0] == second:
            lag_s = max(lag_s, self._seconds.pop()[1])
        self._seconds.append((second, lag_s))
        while self._seconds[0][0] <= second - WINDOW_S:
            self._seconds.popleft()

    def longest_s(self) -> float:
        """The longest stall within the last minute."""
        return max((lag_s for _, lag_s in self._seconds), default=0.0)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        due_s = loop.time() + INTERVAL_S

        def fire() -> None:
            now_s = loop.time()
            self.late(now_s, max(0.0, now_s - due_s))
            self._wait(loop)

        self._timer = loop.call_at(due_s, fire)


class LongLived:
    """Takes the objects of links and nodes out of garbage collection, as they come.

    A full collection goes through all objects and blocks the loop meanwhile, for a quarter of a
    second at ten thousand links. Python runs one whenever a quarter has been added, and several a
    second if most objects are frozen. So Python runs none by itself: the objects of new links are
    frozen, and every FULL_S a full collection finds the cyclic garbage since. A frozen object is
    still freed when nothing refers to it; only cycles that were garbage when they were frozen stay.
    """

    def __init__(self, freeze: Callable[[], None] | None = None) -> None:
        self._freeze = freeze if freeze is not None else freeze_all
        self._frozen = 0

    def linked(self, count: int) -> None:
        """Freeze what exists, if many more links are open than at the last time."""
        if count >= self._frozen + max(FREEZE_STEP, self._frozen // FREEZE_SHARE):
            self._frozen = count
            self._freeze()


def freeze_all() -> None:
    """Freeze what exists, after collecting young garbage, which would stay for good."""
    gc.collect(1)
    gc.freeze()


def freezing_with_term(
    notify: Callable[[bool], Awaitable[None]], freeze: Callable[[], None] = freeze_all
) -> Callable[[bool], Awaitable[None]]:
    """``notify``, preceded by a freeze when a term begins (True).

    The state that was just read from etcd lives as long as the term, so it is never collected.
    """

    async def frozen(leads: bool) -> None:
        if leads:
            freeze()
        await notify(leads)

    return frozen


async def collect_periodically() -> None:
    """Disable full collections by Python itself, and run one every FULL_S."""
    gc.set_threshold(*THRESHOLDS)
    while True:
        await asyncio.sleep(FULL_S)
        gc.collect()


# Turns: how many messages of nodes are handled in one turn of the event loop.
#
# gRPC delivers all messages that have arrived as one batch, each in its own task, together with one
# new call. If more arrives than the driver can handle at once (an attempt starts on all its nodes,
# a fleet returns, the processor is busy), thousands of messages are ready in a turn. No tick and no
# answer of etcd gets a turn before they are done, and only one of the nodes that dial gets in.
# Nodes that are in send heartbeats meanwhile, so the turns grow, and the rest never gets in. So
# each message first takes a place in a turn; if none is free, it waits for the next turns, in order
# of arrival.


AT_ONCE = 8  # messages in a turn, besides one new call: less than a millisecond


class LoopTurns:
    """Places in the turns of the running loop, AT_ONCE in each."""

    def __init__(self) -> None:
        self._left = AT_ONCE
        self._scheduled = False
        self._waiting: deque[tuple[asyncio.Future[None], float]] = deque()

    def take(self) -> bool:
        """Take a place in this turn; False if none is left: then :meth:`wait` for one.

        Separate from wait(), since most messages need no more than this.
        """
        if self._waiting or not self._left:
            return False
        self._left -= 1
        self._renew()
        return True

    async def wait(self) -> None:
        """Take a place in one of the next turns."""
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append((place, loop.time()))
        self._renew()
        await place

    def waited_s(self) -> float:
        """Waiting time of the first message in line; 0 if none waits."""
        if not self._waiting:
            return 0.0
        return asyncio.get_running_loop().time() - self._waiting[0][1]

    def _renew(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._scheduled = False
        self._left = AT_ONCE
        while self._waiting and self._left:
            place, _ = self._waiting.popleft()
            if not place.done():  # its link may have ended meanwhile
                place.set_result(None)
                self._left -= 1
        # Renewed only while messages come: an idle driver has no callbacks.
        if self._left < AT_ONCE or self._waiting:
            self._renew()

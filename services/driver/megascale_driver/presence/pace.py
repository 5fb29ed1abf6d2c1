"""When the core gets its next tick: four times a second, or when there is something to decide.

A driver ticks at its fixed interval, which also shows whether its event loop stands still. Under a
virtual clock most ticks change nothing: with :attr:`Pace.max_pause_s` above the interval those are
left out, and the others come at the same moments as before.

Note [Skipping]
~~~~~~~~~~~~~~~
To skip stretches in which nothing changes, a simulation sets ``max_pause_s`` to infinity and
declares with :meth:`megascale_driver.presence.lane.Lane.assume` which nodes repeat their newest
heartbeat from now on. Their heartbeats need not be sent, and the loop's next timer is the next
moment at which the core has something to decide.
"""

from __future__ import annotations

import math

from megascale_driver.core.jobs import timers
from megascale_driver.core.values.policy import Policy
from megascale_driver.core.values.state import Cluster
from megascale_driver.presence.lane import Lane

TICK_INTERVAL_S = 0.25


class Pace:
    """The times of the ticks of one driver."""

    def __init__(self, lane: Lane, policy: Policy) -> None:
        self.max_pause_s = TICK_INTERVAL_S
        self._lane, self._policy = lane, policy

    @property
    def skips(self) -> bool:
        """Whether ticks that change nothing are left out."""
        return self.max_pause_s > TICK_INTERVAL_S

    def next_tick_s(self, last_s: float, now_s: float, state: Cluster, events_wait: bool) -> float:
        """When to tick after the tick at ``last_s``; ``events_wait``: something came since."""
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
        # On the grid of the ticks that are not left out.
        return last_s + max(1, math.ceil((due_s - last_s) / TICK_INTERVAL_S)) * TICK_INTERVAL_S

"""When nodes that a driver refuses may dial again: one after the other, whatever their number.

While no driver leads, a standby refuses every node of the fleet, and each dials again with a
back-off of its own, of two seconds at most. Of ten thousand nodes these are as many connections a
second, for which a driver that is just about to lead has no time.
"""

from __future__ import annotations

from megascale_common.node.link_limits import DIALS_PER_S, MAX_RETRY_S


class DialPace:
    """Gives each refused dial a moment of its own; ``now_s`` is any clock's."""

    def __init__(self) -> None:
        self._taken_s = float("-inf")  # moments up to here are given away

    def next_s(self, now_s: float) -> float:
        """Seconds from now until this one may dial again, MAX_RETRY_S at most."""
        after_s = max(now_s, self._taken_s) + 1.0 / DIALS_PER_S
        self._taken_s = min(after_s, now_s + MAX_RETRY_S)
        return self._taken_s - now_s

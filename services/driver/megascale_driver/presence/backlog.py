"""How far the driver is behind its nodes: how long heartbeats wait before they are read.

A driver that has more to do than its processor allows reads each heartbeat a while after it came.
Then a node seems silent though its heartbeats lie in a socket, all nodes alike. Each heartbeat says
when it was sent, and the offset of its node's clock is known (:mod:`presence.clock_offset`), so
those that arrive show how long the others may wait. Deadlines of silence move by that, but never
by more than MAX_BEHIND_S: so long after its last tick a driver loses its lease, too
(``SILENCE_LIMIT_S`` of :mod:`megascale_common.etcd.keeper_process`), and one that is further behind
must not keep verdicts from being passed.
"""

from __future__ import annotations

import statistics
from collections import deque

MAX_BEHIND_S = 15.0
SAMPLES_PER_S = 32.0  # heartbeats that are looked at, at most
WINDOW_S = 10.0
MIN_SAMPLES = 3  # one node whose clock was set must not count for all


class Backlog:
    """The delays of the heartbeats of the last WINDOW_S; times in Unix seconds."""

    def __init__(self) -> None:
        self.next_sample_s = 0.0  # before that, none is wanted
        self._samples: deque[tuple[float, float]] = deque()  # (when it was read, its delay)

    def note(self, now_s: float, delay_s: float) -> None:
        """A heartbeat was read so long after it was sent."""
        self.next_sample_s = now_s + 1.0 / SAMPLES_PER_S
        self._samples.append((now_s, delay_s))
        self._expire(now_s)

    def behind_s(self, now_s: float) -> float:
        """The median delay of late, from 0 to MAX_BEHIND_S: half of the nodes may have bad clocks.

        It grows while heartbeats wait for longer, so the newer half of the samples counts.
        """
        self._expire(now_s)
        if len(self._samples) < MIN_SAMPLES:
            return 0.0
        newer = list(self._samples)[-max(MIN_SAMPLES, len(self._samples) // 2) :]
        return min(MAX_BEHIND_S, max(0.0, statistics.median(delay_s for _, delay_s in newer)))

    def clear(self) -> None:
        """Forget all samples."""
        self._samples.clear()

    def _expire(self, now_s: float) -> None:
        while self._samples and not 0.0 <= now_s - self._samples[0][0] < WINDOW_S:
            self._samples.popleft()

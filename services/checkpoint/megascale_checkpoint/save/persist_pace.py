"""Slows persistence down while steps are slower beside it than without it: pure, no clock.

The daemon gets the time of each step, and knows beside which of them it wrote to storage. Where
those take longer than the quiet ones by more than the job tolerates, the job's bandwidth on this
node is lowered, and raised again as soon as they do not. Nodes decide for themselves: a step takes
the same time on all of them.
"""

from __future__ import annotations

from collections import deque
from statistics import median

KEPT_QUIET = 64  # steps
LEAST_QUIET = 3  # steps without a write before others are compared with them
WINDOW_STEPS = 8  # beside a write, between two decisions
LOWER, RAISE = 0.7, 1.25
# The bound: a checkpoint becomes durable at most so many times later for it.
LEAST_SHARE = 1 / 8
# A store that is busy all the time leaves no quiet steps: then writing is held for a few.
FIRST_HOLD_AFTER, HOLD_AFTER = 2 * WINDOW_STEPS, 512


class PersistPace:
    """The bandwidth of one job on one node; ``tolerated`` as checkpoint.max_step_slowdown.

    Attributes:
        limit: bytes per second that may be written; 0 is no limit.
        hold: write nothing, until quiet steps have been measured.
        slowdown: by which share steps beside a write took longer, when that was last compared.
    """

    def __init__(self, tolerated: float) -> None:
        self.tolerated = tolerated
        self.limit, self.hold, self.slowdown = 0.0, False, 0.0
        self._step = 0
        self._quiet: deque[float] = deque(maxlen=KEPT_QUIET)
        self._beside: list[float] = []
        self._written, self._beside_s = 0, 0.0
        self._fastest = 0.0  # bytes per second, without a limit
        self._since_quiet, self._was_writing, self._was_held = 0, False, False

    def add(self, step: int, time_s: float, *, writing: bool, written: int) -> None:
        """``step`` took ``time_s``; every rank of the node reports it, and the first one counts.

        ``writing``: a state is on its way to storage; ``written``: bytes since the step before.
        """
        if not self.tolerated or step <= self._step:
            return
        self._step = step
        beside = writing and not self.hold
        # A step in which a write, or a hold, began or ended is neither the one nor the other.
        mixed = beside is not self._was_writing or self.hold is not self._was_held
        self._was_writing, self._was_held = beside, self.hold
        if beside:
            self._written += written
            self._beside_s += time_s
            self._since_quiet += 1
        if mixed:
            return
        if beside:
            self._beside.append(time_s)
        else:
            self._quiet.append(time_s)
            self._since_quiet = 0
        self._decide()

    def _decide(self) -> None:
        known = len(self._quiet) >= LEAST_QUIET
        if self.hold:
            self.hold = not known
            return
        if self._since_quiet >= (HOLD_AFTER if known else FIRST_HOLD_AFTER):
            # What a quiet step takes may have changed since: the old ones are forgotten.
            self._quiet.clear()
            self.hold = True
            return
        if known and len(self._beside) >= WINDOW_STEPS:
            self._compare()

    def _compare(self) -> None:
        self.slowdown = median(self._beside) / median(self._quiet) - 1
        rate = self._written / self._beside_s if self._beside_s else 0.0
        if not self.limit:
            self._fastest = max(self._fastest, rate)
        self._beside.clear()
        self._written, self._beside_s = 0, 0.0
        if not self._fastest:
            return
        if self.slowdown > self.tolerated:
            lowered = LOWER * (self.limit or rate)
            self.limit = max(LEAST_SHARE * self._fastest, lowered)
        elif self.limit and self.slowdown < self.tolerated / 2:
            raised = RAISE * self.limit
            self.limit = 0.0 if raised >= self._fastest else raised

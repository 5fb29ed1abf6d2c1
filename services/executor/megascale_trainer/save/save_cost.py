"""What a save costs a run, from the times of its steps: pure, without a clock.

A step is disturbed while a copy or a write to storage is under way beside it. What disturbed steps
take beyond the median of quiet ones is the cost of the save that disturbed them.
"""

from __future__ import annotations

from collections import deque
from statistics import median

KEPT_STEPS, KEPT_SAVES = 64, 8
LEAST_QUIET = 3  # quiet steps before anything is compared with them
WARM_UP_STEPS = 2  # their times are those of kernels that are compiled and connections that open


class SaveCost:
    """The cost of a save, measured by the run itself."""

    def __init__(self) -> None:
        self._quiet: deque[float] = deque(maxlen=KEPT_STEPS)
        self._saves: deque[float] = deque(maxlen=KEPT_SAVES)
        self._warm_up = WARM_UP_STEPS
        self._began, self._disturbed = False, list[float]()

    @property
    def step_s(self) -> float | None:
        """Time of a quiet step; None before there are enough."""
        return median(self._quiet) if len(self._quiet) >= LEAST_QUIET else None

    @property
    def cost_s(self) -> float | None:
        """Cost of a save: the median of the newest; None before one has ended."""
        return median(self._saves) if self._saves else None

    def began(self) -> None:
        """A save begins; what was measured of the one before is complete."""
        self._close()
        self._began = True

    def add(self, time_s: float, *, disturbed: bool) -> None:
        """A step took ``time_s``; ``disturbed``: a save was under way beside it."""
        if self._warm_up:
            self._warm_up -= 1
        elif disturbed:
            if self._began:
                self._disturbed.append(time_s)
        else:
            self._quiet.append(time_s)
            if self._disturbed:
                self._close()

    def _close(self) -> None:
        """The save has ended. One that disturbed no step has cost nothing."""
        step_s = self.step_s
        if self._began and step_s is not None:
            extra_s = sum(time_s - step_s for time_s in self._disturbed)
            self._saves.append(max(0.0, extra_s))
        self._began, self._disturbed = False, []

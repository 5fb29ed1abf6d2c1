"""Time as a parameter: the system's clock for services, a virtual one for simulations.

Deadlines and audit times use one scale: Unix seconds that never step, because the wall clock is
read once and the monotonic clock continues from there.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def now_s(self) -> float:
        """Unix time in seconds; never goes back."""
        ...


class SystemClock:
    """The host's time, anchored at construction."""

    def __init__(self) -> None:
        self._offset_s = time.time() - time.monotonic()

    def now_s(self) -> float:
        """Unix time in seconds; never goes back, even if the wall clock is set."""
        return time.monotonic() + self._offset_s


class VirtualClock:
    """A clock that moves only by :meth:`advance`."""

    def __init__(self, start_s: float = 1_700_000_000.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        """The virtual time in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Advance by ``seconds``.

        Raises:
            ValueError: they are negative.
        """
        if seconds < 0:
            raise ValueError(f"seconds: {seconds} is negative; a clock never goes back")
        self._now_s += seconds

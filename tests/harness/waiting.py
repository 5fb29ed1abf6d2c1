"""Waits that fail for lack of progress, and not after a fixed time.

A wait names what it waits for and, where there is any, a value that shows progress: steps, events,
lines of a log, CPU time of a process. The wait continues while that value changes, however slow the
machine, and fails when it has not changed for the limit. Progress that never ends is stopped by the
timeout of every test (pyproject.toml).
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")

# A machine that gives a healthy process no CPU time for this long is of no use for tests.
STANDSTILL_S = 60.0
# For a single call (an RPC, the end of a process, a socket's answer), which shows no progress.
CALL_TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.02
LOOK_INTERVAL_S = 0.5  # between two readings of the progress, which may be many files


class Standstill(AssertionError):
    """There was no progress for the limit of a wait."""


class ProgressWatch:
    """Watches a value that shows progress, for a wait of any kind.

    Args:
        what: what is waited for, for the error.
        moves: returns any value that changes with progress; None where there is no such value.
        limit_s: how long it may stay the same.
        story: returns more text for the error, called when it is raised.
    """

    def __init__(
        self,
        what: str,
        moves: Callable[[], object] | None = None,
        limit_s: float = STANDSTILL_S,
        story: Callable[[], str] = str,
    ) -> None:
        self._what, self._moves, self._limit_s, self._story = what, moves, limit_s, story
        self._last = moves() if moves is not None else None
        self._looked_at_s = self._moved_at_s = time.monotonic()

    def check(self) -> None:
        """Read the value, if it is time to.

        Raises:
            Standstill: it has not changed for the limit.
        """
        now_s = time.monotonic()
        if now_s - self._looked_at_s < min(LOOK_INTERVAL_S, self._limit_s / 4):
            return
        self._looked_at_s = now_s
        seen = self._moves() if self._moves is not None else None
        if seen != self._last:
            self._last, self._moved_at_s = seen, now_s
        elif now_s - self._moved_at_s > self._limit_s:
            still = "" if self._moves is None else f"; still at {self._last}"
            story = self._story()
            raise Standstill(
                f"{self._what}: no progress for {self._limit_s:g} s{still}"
                + (f"\n{story}" if story else "")
            )


def until(
    condition: Callable[[], Found],
    what: str,
    moves: Callable[[], object] | None = None,
    *,
    limit_s: float = STANDSTILL_S,
    story: Callable[[], str] = str,
) -> Found:
    """Wait until ``condition()`` returns something true, and return that.

    The other arguments and the error are those of :class:`ProgressWatch`.
    """
    watch = ProgressWatch(what, moves, limit_s, story)
    while not (found := condition()):
        watch.check()
        time.sleep(POLL_INTERVAL_S)
    return found


async def eventually(
    condition: Callable[[], Any],
    what: str,
    moves: Callable[[], object] | None = None,
    *,
    limit_s: float = STANDSTILL_S,
    story: Callable[[], str] = str,
) -> Any:
    """:func:`until` for asyncio; ``condition`` may be a coroutine function."""
    watch = ProgressWatch(what, moves, limit_s, story)
    while True:
        found = condition()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        watch.check()
        await asyncio.sleep(POLL_INTERVAL_S)


def log_bytes(folder: Path, pattern: str = "**/*.log") -> int:
    """Bytes of all logs below a folder: it grows with every line."""
    total = 0
    for path in folder.glob(pattern):
        try:
            total += path.stat().st_size
        except OSError:  # removed in the meantime
            continue
    return total

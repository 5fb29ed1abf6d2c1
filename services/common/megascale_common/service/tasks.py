"""Background tasks of a service, and the waits between their attempts and rounds.

A task that is not awaited must be one of these kinds. If an **essential** one fails, the process
ends, so that its supervisor starts it again. A **repeated** one is started again. The error of a
**single** one is only logged.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from megascale_common.service import logs

STOP_S = 30.0  # for a process to stop in order after an essential task failed
AGAIN_S = 1.0  # before a repeated task is started again
DEFECT = 70  # exit status of a process that ended for an essential task (sysexits: EX_SOFTWARE)

_log = logs.get(__name__)
_failed: list[str] = []


def essential(part: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a part without which the process is useless: if it fails, the process ends.

    The process gets SIGTERM, so that it stops in order, and is killed after STOP_S if it does not.
    Its status is then :func:`exit_status`.
    """
    return asyncio.create_task(_essential(part, name), name=name)


async def _essential(part: Coroutine[Any, Any, None], name: str) -> None:
    try:
        await part
    except (Exception, asyncio.CancelledError) as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
            raise  # the process is stopping
        _failed.append(name)
        _log.exception("an essential part failed; the process ends", part=name)
        limit = threading.Timer(STOP_S, os._exit, (DEFECT,))
        limit.daemon = True
        limit.start()
        os.kill(os.getpid(), signal.SIGTERM)
        raise


def exit_status() -> int:
    """The exit status of a process that has stopped in order: 0, or DEFECT if a part failed."""
    return DEFECT if _failed else 0


def repeated(
    start: Callable[[], Coroutine[Any, Any, None]], name: str, again_s: float = AGAIN_S
) -> asyncio.Task[None]:
    """Start a part that the process can spare for a while; if it fails, it is started again."""

    async def run() -> None:
        while True:
            try:
                await start()
            except Exception:
                _log.exception("a part failed and is started again", part=name, after_s=again_s)
                await asyncio.sleep(again_s)
            else:
                return

    return asyncio.create_task(run(), name=name)


def single(part: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task that runs once; an error is logged when it happens."""
    task = asyncio.create_task(part, name=name)
    task.add_done_callback(_log_error)
    return task


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a task failed", task=task.get_name(), exc_info=error)


class Backoff:
    """Exponential back-off with full jitter, so that peers of one service do not return in step.

    Args:
        lowest_s: limit of the first wait; no wait is shorter than half of it.
        highest_s: the limit doubles up to here.
    """

    def __init__(self, lowest_s: float, highest_s: float) -> None:
        self._lowest_s = lowest_s
        self._highest_s = highest_s
        self._limit_s = lowest_s

    def reset(self) -> None:
        """Start with short waits again, after a success."""
        self._limit_s = self._lowest_s

    def next_s(self) -> float:
        """Seconds to wait now: random, up to the limit, which doubles."""
        wait_s = random.uniform(self._lowest_s / 2, self._limit_s)
        self._limit_s = min(2 * self._limit_s, self._highest_s)
        return wait_s

    async def sleep(self) -> None:
        """Wait for `next_s`."""
        await asyncio.sleep(self.next_s())


class Periodic:
    """Moments that are ``interval_s`` apart, by the clock of the running event loop."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._began_s = asyncio.get_running_loop().time()
        self._beats = 0

    async def wait(self) -> None:
        """Sleep until the next moment; moments that passed during the work are skipped."""
        now_s = asyncio.get_running_loop().time()
        passed = (now_s - self._began_s) / self._interval_s
        self._beats = max(self._beats + 1, math.ceil(passed))
        await asyncio.sleep(self._began_s + self._beats * self._interval_s - now_s)

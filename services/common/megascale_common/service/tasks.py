"""Tasks in the background of a service: none ends by an error without a consequence.

A task that nobody awaits must be one of these. An **essential** one ends its process, so that its
supervisor starts it again; a **repeated** one is started again; the error of a **single** one is
logged, and costs no more than what the task was for.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from megascale_common.service import logs

# What a process that ends for an essential task may take to stop in order.
STOP_S = 30.0
AGAIN_S = 1.0  # before a repeated task is started again
DEFECT = 70  # exit status of a process that ended for an essential task (sysexits: EX_SOFTWARE)

_log = logs.get(__name__)
_failed: list[str] = []


def essential(part: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a part that the process is of no use without: if it fails, the process ends.

    The process gets SIGTERM, so that it stops in order, and is ended after STOP_S if it does not.
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
    """The status of a process that has stopped in order: 0, or DEFECT if a part failed."""
    return DEFECT if _failed else 0


def repeated(
    start: Callable[[], Coroutine[Any, Any, None]], name: str, again_s: float = AGAIN_S
) -> asyncio.Task[None]:
    """Start a part that the process can do without for a while: if it fails, it starts again."""

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
    """Start something that is done once; an error is logged when it happens."""
    task = asyncio.create_task(part, name=name)
    task.add_done_callback(_log_error)
    return task


def _log_error(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a task failed", task=task.get_name(), exc_info=error)

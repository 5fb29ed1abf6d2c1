"""Whether a worker failed only because a peer did not come: it is a victim, not the culprit.

A collective that a peer does not join ends in one of three ways. The worker gets an error and
reports it: nothing is to be decided here. Or NCCL's watchdog aborts the process, and only the log
has the reason. Or, over peer memory (``overlap.tp``), the barrier times out inside its kernel and
destroys the CUDA context: the next library that uses the device fails with some error of its own,
or a destructor does and the process aborts without a message. The evidence that remains is the
status page: an operation in progress for longer than any may take. NCCL counts the same way, from
the host's call on.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from megascale_common.node.status_page import Status, read_status_page

STOPPED = "STOPPED"  # error kind of workers that the agent itself ended
_WATCHDOG_WORDS = (
    "Watchdog caught",
    "watchdog thread terminated with exception",
    "watchdog got stuck",
)
# The watchdog polls the device, and so may be the first to get an error that no peer has caused.
_OWN_DEVICE_WORD = "CUDA error"
_LOG_TAIL_BYTES = 1 << 16
_STILL_S = 2.0  # a rank that waits for a peer which has just ended has been still for less


def waited_in_vain(
    exit_status: int, error_kind: str, log_path: Path, page: Path, timeout_s: float
) -> str:
    """The evidence that a worker which failed is a victim; "" if there is none.

    Args:
        exit_status: minus the signal's number if one ended it.
        error_kind: what it reported itself; "" if nothing. STOPPED if the agent killed it while an
            abort was in progress, which takes some time.
        log_path, page: its log and its status page.
        timeout_s: longest that an operation may take (``recovery.collective_timeout_s``).
    """
    aborted = exit_status == -signal.SIGABRT and error_kind in ("", STOPPED)
    if aborted and (line := watchdog_line(log_path)):
        return line
    if aborted or error_kind == "OTHER":
        return overdue(read_status_page(page), timeout_s, time.monotonic_ns())
    return ""


def overdue(status: Status | None, timeout_s: float, now_ns: int) -> str:
    """The operation that a rank has been inside for ``timeout_s`` or longer, or "".

    ``now_ns`` is CLOCK_MONOTONIC.
    """
    rows = status.rows if status is not None else ()
    oldest = min((row for row in rows if row.since_ns), key=lambda row: row.since_ns, default=None)
    if oldest is None or now_ns - oldest.since_ns < timeout_s * 1e9:
        return ""
    inside_s = (now_ns - oldest.since_ns) / 1e9
    return (
        f"its operation {oldest.completed + 1} in group {oldest.name} was in progress for "
        f"{inside_s:.1f} s: a peer did not come (recovery.collective_timeout_s = {timeout_s:g})"
    )


def stands_still(page: Path, now_ns: int) -> bool:
    """Whether a rank has not written its status page for _STILL_S: its stacks are of interest."""
    status = read_status_page(page)
    return status is not None and now_ns - status.updated_ns > _STILL_S * 1e9


def watchdog_line(log_path: Path) -> str:
    """The line with which NCCL's watchdog aborted the process; "" for other causes."""
    try:
        with log_path.open("rb") as log:
            log.seek(max(log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES, 0))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    last = next(
        (line for line in reversed(lines) if any(word in line for word in _WATCHDOG_WORDS)), ""
    )
    return "" if _OWN_DEVICE_WORD in last else last

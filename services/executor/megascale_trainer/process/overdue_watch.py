"""Ends a process whose operation with other ranks does not end, where nothing else would.

A stream that waits for a peer's memory (:mod:`megascale_kernels.overlap.stream_signals`) waits for
as long as it takes. NCCL's watchdog detects a collective behind it, but may then stand still while
it aborts a communicator whose kernels are behind that wait. This thread reads the process's own
status page, which the host writes, and asks the device nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from megascale_common.node.status_page import overdue, read_status_page

_LOOK_S = 1.0
_MARGIN_S = 5.0  # NCCL's watchdog counts alike and comes first: it leaves a record of all ranks


def watch_operations(page: Path, timeout_s: float, *, margin_s: float = _MARGIN_S) -> None:
    """Abort this process (SIGABRT) when an operation on ``page``, its own, is not over in time.

    Args:
        timeout_s: longest that an operation may take (``recovery.collective_timeout_s``).
        margin_s: that others who count alike have before.
    """
    threading.Thread(
        target=_watch, args=(page, timeout_s + margin_s), name="overdue-operations", daemon=True
    ).start()


def _watch(page: Path, limit_s: float) -> None:
    while True:
        time.sleep(min(_LOOK_S, limit_s / 4))
        if found := overdue(read_status_page(page), limit_s, time.monotonic_ns()):
            print(f"this process ends: {found}", file=sys.stderr, flush=True)
            os.abort()

"""Diagnostic: whether the kernel holds the clock synchronised, and within which error."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from megascale_executor.diagnostics.diagnostic import Diagnostic, NodeView
from megascale_executor.diagnostics.finding import Finding

NAME = "clock"
# Events of nodes are put into one order; half a second is a step of a large job.
DEGRADED_ABOVE_S = 0.5
_STA_UNSYNC = 0x40  # linux/timex.h
_LONGS = 26  # longs of struct timex, with room


class Clock(Diagnostic):
    """Reads the kernel's clock discipline (adjtimex(2)) without a change of it."""

    name = NAME
    before_attempts = False
    quick = False
    stage = 0

    async def run(self, node: NodeView) -> Sequence[Finding]:
        """One finding for the node: the greatest error that the kernel assumes, in seconds."""
        return [evaluate(*read())]


def read() -> tuple[int, int]:
    """Status bits and the maximum error in microseconds; status -1: not permitted here."""
    # struct timex begins: unsigned modes; long offset, freq, maxerror, esterror; int status.
    buffer = (ctypes.c_long * _LONGS)()
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "adjtimex") or library.adjtimex(ctypes.byref(buffer)) < 0:
        return -1, 0
    return ctypes.c_int(buffer[5] & 0xFFFFFFFF).value, int(buffer[3])


def evaluate(status: int, max_error_us: int) -> Finding:
    """PASS while the kernel is told that its clock is right; DEGRADED otherwise."""
    if status < 0:
        return Finding(NAME, "node", "SKIPPED", "adjtimex(2) is not permitted here")
    error_s = max_error_us / 1e6
    if status & _STA_UNSYNC:
        detail = "nothing synchronises the clock; the driver corrects by heartbeats: start chrony"
        return Finding(NAME, "node", "DEGRADED", detail, value=error_s, unit="s")
    if error_s > DEGRADED_ABOVE_S:
        detail = f"may be wrong by more than {DEGRADED_ABOVE_S} s: check the time server"
        return Finding(NAME, "node", "DEGRADED", detail, value=error_s, unit="s")
    return Finding(NAME, "node", "PASS", "synchronised", value=error_s, unit="s")

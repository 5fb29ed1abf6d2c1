"""What tests ask of the process table."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from tests.harness.waiting import until

from megascale_common.node.process import stat_fields


def ended(pid: int) -> bool:
    """Whether the process runs no more; one that only waits to be reaped does not run."""
    fields = stat_fields(pid)
    return not fields or fields[0] in "ZX"


def until_gone(pids: Iterable[int], what: str) -> float:
    """Wait until none of the processes runs; seconds that it took."""
    watched, started_s = list(pids), time.monotonic()

    def left() -> list[int]:
        return [pid for pid in watched if not ended(pid)]

    until(lambda: not left(), what, left)
    return time.monotonic() - started_s


def living_processes_of_group(group: int) -> list[int]:
    """Processes of a process group that run."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    found = {number: stat_fields(number) for number in numbers}
    return [
        number
        for number, fields in found.items()
        if fields and int(fields[2]) == group and fields[0] not in "ZX"
    ]


def cpu_ticks(pids: Iterable[int]) -> int:
    """CPU time that the processes and their reaped children have used, in ticks of the system's
    clock (10 ms).
    """
    return sum(sum(map(int, stat_fields(pid)[11:15])) for pid in pids)

"""Queries of the process table, for tests."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from tests.harness.waiting import until

from megascale_common.node.process import stat_fields


def ended(pid: int) -> bool:
    """Whether the process has ended; a zombie, which only waits to be reaped, has."""
    fields = stat_fields(pid)
    return not fields or fields[0] in "ZX"


def until_gone(pids: Iterable[int], what: str) -> float:
    """Wait until all the processes have ended; returns how many seconds it took."""
    watched, started_s = list(pids), time.monotonic()

    def left() -> list[int]:
        return [pid for pid in watched if not ended(pid)]

    until(lambda: not left(), what, left)
    return time.monotonic() - started_s


def living_processes_of_group(group: int) -> list[int]:
    """Running processes of a process group."""
    numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    found = {number: stat_fields(number) for number in numbers}
    return [
        number
        for number, fields in found.items()
        if fields and int(fields[2]) == group and fields[0] not in "ZX"
    ]


def cpu_ticks(pids: Iterable[int]) -> int:
    """CPU time of the processes and their reaped children, in clock ticks of 10 ms."""
    return sum(sum(map(int, stat_fields(pid)[11:15])) for pid in pids)

"""Queries of the process table, and ports that nothing listens on, for tests."""

from __future__ import annotations

import random
import socket
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from tests.harness.waiting import until

from megascale_common.node.process import stat_fields

_LOWEST_PORT, _PORTS_TRIED = 15_000, 100
_given: deque[int] = deque(maxlen=1000)
_PORTS_OF_CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")


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


def free_port(host: str) -> int:
    """A port that nothing listens on now, outside of those that the system gives to connections.

    Else a connection may get the port of a server that is down, which then cannot start again.
    Nor is it one that this process was given a while ago: its server may not have begun to listen.
    """
    candidates = range(_LOWEST_PORT, max(_LOWEST_PORT, _first_of_connections()))
    for port in random.sample(candidates, min(_PORTS_TRIED, len(candidates))):
        if port not in _given and (found := _bound(host, port)) is not None:
            _given.append(found)
            return found
    found = _bound(host, 0)
    assert found is not None, "the system has no port left"
    return found


def _first_of_connections() -> int:
    """The lowest port that the system gives to connections; 0 where it does not say."""
    try:
        return int(_PORTS_OF_CONNECTIONS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _bound(host: str, port: int) -> int | None:
    """``port`` (0: any), if it could be bound just now."""
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return None
        found: int = probe.getsockname()[1]
    return found

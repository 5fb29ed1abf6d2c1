"""Counters of the host: processors, memory, pressure, disks and the agent's own process."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from megascale_executor.counters.reading import NotShown, Reading, Source, lines

_TICKS_S = os.sysconf("SC_CLK_TCK")
_SECTOR_BYTES = 512  # unit of /proc/diskstats, whatever the disk's own sector size
# Only whole disks, because partitions and loop devices would count the same bytes again.
_DISK = re.compile(r"(sd[a-z]+|vd[a-z]+|xvd[a-z]+|nvme\d+n\d+)")
_MEMORY = {
    "MemTotal": "host_memory_bytes",
    "MemAvailable": "host_memory_available_bytes",
    "Dirty": "host_memory_dirty_bytes",
    "SwapFree": "host_swap_free_bytes",
}


class Processors(Source):
    """Seconds of all processors by kind of use."""

    name = "cpu"

    def __init__(self, root: Path) -> None:
        self._path = root / "proc/stat"

    def read(self) -> Sequence[Reading]:
        """user and nice together, system, idle, iowait, steal."""
        first = lines(self._path)[:1]
        values = [int(word) for word in first[0].split()[1:]] if first else []
        if len(values) < 8:
            raise NotShown(f"{self._path} has no line of all processors")
        user, nice, system, idle, iowait, _, _, steal = values[:8]
        kinds = {"user": user + nice, "system": system, "idle": idle}
        kinds |= {"iowait": iowait, "steal": steal}
        return [
            Reading("host_cpu_seconds_total", kind, ticks / _TICKS_S)
            for kind, ticks in kinds.items()
        ]


class Memory(Source):
    """Bytes of memory."""

    name = "memory"

    def __init__(self, root: Path) -> None:
        self._path = root / "proc/meminfo"

    def read(self) -> Sequence[Reading]:
        """Total, available, dirty, and free swap."""
        found = []
        for line in lines(self._path):
            key, _, rest = line.partition(":")
            if name := _MEMORY.get(key):
                found.append(Reading(name, "", float(rest.split()[0]) * 1024))
        return found


class Pressure(Source):
    """Seconds that processes waited for a processor, for memory or for disks (PSI)."""

    name = "pressure"

    def __init__(self, root: Path) -> None:
        self._folder = root / "proc/pressure"

    def read(self) -> Sequence[Reading]:
        """`some`: at least one task waited; `full`: all did."""
        found = []
        for resource in ("cpu", "memory", "io"):
            for line in lines(self._folder / resource):
                kind, *fields = line.split()
                values = dict(field.split("=", 1) for field in fields)
                seconds = float(values.get("total", 0)) / 1e6
                found.append(Reading("host_pressure_seconds_total", f"{resource}-{kind}", seconds))
        return found


class Disks(Source):
    """Bytes and busy time of whole disks."""

    name = "disk"

    def __init__(self, root: Path) -> None:
        self._path = root / "proc/diskstats"

    def read(self) -> Sequence[Reading]:
        """Fields of the kernel's iostats: sectors read, sectors written, milliseconds of I/O."""
        found = []
        for line in lines(self._path):
            words = line.split()
            if len(words) < 14 or not _DISK.fullmatch(words[2]):
                continue
            disk = words[2]
            found += [
                Reading("disk_read_bytes_total", disk, int(words[5]) * _SECTOR_BYTES),
                Reading("disk_written_bytes_total", disk, int(words[9]) * _SECTOR_BYTES),
                Reading("disk_busy_seconds_total", disk, int(words[12]) / 1e3),
            ]
        if not found:
            raise NotShown(f"{self._path} has no disk")
        return found


class Agent(Source):
    """Memory and processor time of the agent itself, from its stat file."""

    name = "process"

    def __init__(self, root: Path) -> None:
        self._path = root / "proc/self/stat"

    def read(self) -> Sequence[Reading]:
        """Fields 14, 15 and 24 of proc(5), counted after the name, which can contain blanks."""
        fields = " ".join(lines(self._path)).rpartition(")")[2].split()
        if len(fields) < 22:
            raise NotShown(f"{self._path} is too short")
        seconds = (int(fields[11]) + int(fields[12])) / _TICKS_S
        pages = int(fields[21])
        return [
            Reading("process_cpu_seconds_total", "agent", seconds),
            Reading("process_resident_bytes", "agent", pages * os.sysconf("SC_PAGE_SIZE")),
        ]

"""The processor time of this process and of all that it has started: a measure that a busy machine
does not stretch as it does the clock.
"""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def of_family_s() -> float:
    """Seconds that this process, its living descendants and those it has waited for have used."""
    used: dict[int, int] = {}
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        pid = int(folder.name)
        parents[pid], used[pid] = int(fields[1]), sum(map(int, fields[11:15]))
    family, found = {os.getpid()}, 0
    while found != len(family):
        found = len(family)
        family |= {pid for pid, parent in parents.items() if parent in family}
    return sum(used[pid] for pid in family if pid in used) / _TICKS_PER_S

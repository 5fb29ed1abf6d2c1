"""Memory and descriptors of the services over a soak, and how fast they grow."""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak.clusters import SERVICES, SoakCluster

from megascale_common.node.process import start_ticks

INTERVAL_S = 5.0
WINDOW_S = 600.0  # slopes are those of the last ten minutes
SHORTEST_S = 120.0  # a process that lived for less says nothing about its growth
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / (1 << 20)

Sample = tuple[float, float, int]  # seconds, resident MiB, descriptors


@dataclass(slots=True)
class Measurements:
    """Samples of each service process, by its name and start."""

    cluster: SoakCluster
    _samples: dict[tuple[str, int, int], list[Sample]] = field(
        default_factory=lambda: defaultdict(list)
    )

    async def run(self) -> None:
        """Take a sample now and then, until cancelled."""
        while True:
            self.take(time.monotonic())
            await asyncio.sleep(INTERVAL_S)

    def take(self, now_s: float) -> None:
        """Take one sample of each service process."""
        for process in self.cluster.processes():
            started = start_ticks(process.pid)
            if process.kind not in SERVICES or started is None:
                continue
            try:
                pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
                descriptors = len(os.listdir(f"/proc/{process.pid}/fd"))
            except OSError:  # it has just ended
                continue
            key = process.name, process.pid, started
            self._samples[key].append((now_s, pages * _PAGE_MIB, descriptors))

    def slopes(self, end_s: float) -> dict[str, dict[str, float]]:
        """The growth of each service in the last ten minutes, by its process that lived longest.

        A service has no entry if none of its processes lived for SHORTEST_S within them.
        """
        found: dict[str, dict[str, float]] = {}
        for (name, _, _), samples in self._samples.items():
            late = [sample for sample in samples if sample[0] >= end_s - WINDOW_S]
            if len(late) < 3 or late[-1][0] - late[0][0] < SHORTEST_S:
                continue
            minutes = [sample[0] / 60 for sample in late]
            row = {
                "rss_mib_per_min": slope(minutes, [sample[1] for sample in late]),
                "descriptors_per_min": slope(minutes, [float(sample[2]) for sample in late]),
                "minutes": minutes[-1] - minutes[0],
                "rss_mib": late[-1][1],
                "descriptors": late[-1][2],
            }
            known = found.get(name)
            if known is None or row["minutes"] > known["minutes"]:
                found[name] = row
        return {
            name: {key: round(value, 2) for key, value in row.items()}
            for name, row in sorted(found.items())
        }


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the line through these points by least squares."""
    middle, mean = sum(times) / len(times), sum(values) / len(values)
    spread = sum((at - middle) ** 2 for at in times)
    if not spread:
        return 0.0
    shared = sum((at - middle) * (v - mean) for at, v in zip(times, values, strict=True))
    return shared / spread

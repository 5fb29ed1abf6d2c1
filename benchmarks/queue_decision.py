"""What one decision of the driver's queue costs, beside the driver: JSON on the last line.

python benchmarks/queue_decision.py [--nodes 12500] [--jobs 500] [--repeat 5]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from megascale_driver.placement.gang import Candidate
from megascale_driver.placement.queue import decide
from megascale_driver.placement.queue_values import STARTS, RunningJob, View, WaitingJob

NODES_PER_SWITCH = 32
DEVICES = 8


def cluster(nodes: int) -> dict[str, Candidate]:
    """Nodes of eight GPUs, 32 to a switch."""
    return {
        f"n{i:05d}": Candidate(
            f"n{i:05d}", "cuda", tuple(range(DEVICES)), f"s{i // NODES_PER_SWITCH}"
        )
        for i in range(nodes)
    }


def gangs(count: int, largest: int) -> tuple[WaitingJob, ...]:
    """Waiting jobs of one to ``largest`` nodes, of three priorities and ten tenants."""
    return tuple(
        WaitingJob(
            name=f"w{i:04d}", world_size=DEVICES * (1 + (i * 37) % largest), tp=DEVICES,
            priority=i % 3, tenant=f"t{i % 10}", created_s=float(i), waiting_since_s=float(i),
        )
        for i in range(count)
    )  # fmt: skip


def full(nodes: int, jobs: int) -> View:
    """All nodes run jobs of 50 nodes, which end at known times; none is idle."""
    known = cluster(nodes)
    names = list(known)
    running = tuple(
        RunningJob(
            name=f"r{i}", world_size=DEVICES * len(mine), nodes=tuple(mine), priority=1,
            started_s=float(i), ends_s=1e6 + i, preemptible=i % 100 == 0,
        )
        for i in range(0, nodes, 50)
        for mine in [names[i : i + 50]]
    )  # fmt: skip
    return View(now_s=1e5, waiting=gangs(jobs, nodes // 4), running=running, idle={}, known=known)


def empty(nodes: int, jobs: int) -> View:
    """All nodes are idle: as many jobs start as one decision starts."""
    known = cluster(nodes)
    return View(now_s=1e5, waiting=gangs(jobs, 20), idle=known, known=known)


def measured(view: View, repeat: int) -> tuple[float, int]:
    """Median time of a decision in milliseconds, and how many jobs it starts."""
    taken = []
    for _ in range(repeat):
        begin_s = time.perf_counter()
        plan = decide(view)
        taken.append((time.perf_counter() - begin_s) * 1e3)
    return statistics.median(taken), sum(each.kind in STARTS for each in plan.decisions)


def main() -> int:
    """Measure both ends and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=12_500)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    results: dict[str, float] = {"nodes": options.nodes, "jobs": options.jobs}
    for name, make in (("full", full), ("empty", empty)):
        view = make(options.nodes, options.jobs)
        cost_ms, starts = measured(view, options.repeat)
        print(f"{name}: {cost_ms:.1f} ms, {starts} jobs start", file=sys.stderr)
        results |= {f"{name}_ms": round(cost_ms, 2), f"{name}_starts": starts}
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

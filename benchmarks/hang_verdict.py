"""How long the driver takes to decide that a job hangs, and which rank holds it up.

    python benchmarks/hang_verdict.py --ranks 1536 12288

One decision of the core on the status pages of all ranks, from the event to the new state with the
orders to stop; without reading the pages before and without etcd after it. Processor time of this
process, the median of the rounds. The last line of stdout is one JSON object.
Exit status: 0, 1 if a median is above the limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import replace

from fleet import RANKS, names, node, running

from megascale_driver.analysis.progress import OperationCount, RankStatus
from megascale_driver.core import machine
from megascale_driver.core.values.cluster import AttemptPhase, Cluster, Liveness, Report
from megascale_driver.core.values.events import PagesRead, RankPages
from megascale_driver.core.values.job import JobPhase
from megascale_driver.core.values.policy import Policy

LIMIT_MS = 50.0
NOW_S = 1000.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="processor time of a hang verdict")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1536, 12_288], metavar="N")
    parser.add_argument("--rounds", type=int, default=20, metavar="N")
    options = parser.parse_args()
    if min(*options.ranks, options.rounds) < 1 or any(n % RANKS for n in options.ranks):
        parser.error(f"--ranks are multiples of {RANKS}, --rounds is a whole number from 1 on")
    found = {str(ranks): measure(ranks // RANKS, options.rounds) for ranks in options.ranks}
    print(json.dumps({"verdict_ms": found, "rounds": options.rounds, "limit_ms": LIMIT_MS}))
    sys.exit(0 if max(found.values()) < LIMIT_MS else 1)


def measure(nodes: int, rounds: int) -> float:
    """The median of the rounds, in milliseconds."""
    culprit = RANKS * nodes // 3
    state, event = hung(nodes, culprit)
    gc.collect()
    gc.freeze()  # as a driver does with what lives long
    took_s = []
    for _ in range(rounds):
        began_s = time.process_time()
        after, outcome = machine.step(state, event, Policy())
        took_s.append(time.process_time() - began_s)
    gc.unfreeze()
    (line,) = [line for line in outcome.audit if line.reason == "HANG_SUSPECTED"]
    assert f"rank {culprit} " in line.message and after.jobs["all"].phase is JobPhase.STOPPING
    print(f"{RANKS * nodes} ranks: {1e3 * min(took_s):.1f} to {1e3 * max(took_s):.1f} ms",
          file=sys.stderr)  # fmt: skip
    return round(1e3 * statistics.median(took_s), 2)


def hung(nodes: int, culprit: int) -> tuple[Cluster, PagesRead]:
    """A job on all nodes that stands still because of one rank, and what its pages show."""
    job = replace(running(nodes, 0), timer_s=NOW_S - 200.0, step_times=(1.0,) * 100)
    report = Report(job=job.name, attempt=1, phase=AttemptPhase.RUNNING)
    members = {
        name: replace(node(name), liveness=Liveness.ALIVE, connected=True, report=report)
        for name in names(nodes)
    }
    pages = []
    for slot in job.slots:
        statuses = []
        for rank in slot.ranks:
            inside = OperationCount("tp", 8 if rank == culprit else 9, 8)
            counts = (OperationCount("world", 3, 3), inside, OperationCount("dp", 4, 4))
            statuses.append(RankStatus(rank, 5, "STEP", 190.0, counts))
        pages.append(RankPages(slot.node, slot.incarnation, NOW_S - 1.0, tuple(statuses)))
    event = PagesRead(NOW_S, job.name, 1, tuple(pages))
    return Cluster(nodes=members, jobs={job.name: job}), event


if __name__ == "__main__":
    main()

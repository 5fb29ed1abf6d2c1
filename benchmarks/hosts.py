"""Faults of the network between hosts, which are namespaces of this machine: outcomes and times.

``python benchmarks/hosts.py [--runs N] [--only FAULT ...]`` as root. Each fault has a cluster of
its own: etcd, a driver and three nodes on five hosts, mutual TLS everywhere, heartbeats every
second, and a job of two ranks on two nodes that trains. The last line of stdout is one JSON object;
the exit status is 1 if an outcome is not what it should be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.harness import host_faults
from tests.harness.hosts import HostCluster, host_cluster
from tests.harness.namespaces import missing


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens, and on which cables: a delay in ms to the bridge, addresses of IPv4 or 6."""

    happens: Callable[[HostCluster], Awaitable[dict[str, Any]]]
    delay_ms: float = 0.0
    family: int = 4


FAULTS = {
    "none": Fault(host_faults.calm),
    "none, IPv6": Fault(host_faults.calm, family=6),
    "node cut off": Fault(host_faults.node_cut_off),
    "driver cut off": Fault(host_faults.driver_cut_off),
    "etcd cut off": Fault(host_faults.etcd_cut_off),
    "1 % loss, 50 ms delay": Fault(host_faults.lossy, delay_ms=25.0),
    "nodes send 2 Mbit/s": Fault(host_faults.slow),
}


async def measure(name: str, fault: Fault) -> dict[str, Any]:
    """One run of a fault."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        began_s = time.monotonic()
        async with host_cluster(Path(folder), family=fault.family, delay_ms=fault.delay_ms) as made:
            found = await fault.happens(made)
    rounded = {
        key: round(value, 3) if isinstance(value, float) else value for key, value in found.items()
    }
    return {"fault": name, **rounded, "run_s": round(time.monotonic() - began_s, 1)}


def main() -> int:
    """See the docstring of the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=1, metavar="N", help="of each fault, 1 to 20")
    parser.add_argument("--only", nargs="+", choices=[*FAULTS], default=[*FAULTS])
    options = parser.parse_args()
    if not 1 <= options.runs <= 20:
        parser.error("--runs: give 1 to 20")
    if lacks := missing():
        parser.error(f"this machine cannot have hosts of its own: {lacks}")
    results = []
    for name in options.only * options.runs:
        try:
            found = asyncio.run(measure(name, FAULTS[name]))
        except AssertionError as error:  # no progress: the message has the logs
            print(error, file=sys.stderr)
            found = {"fault": name, "right": False, "problem": str(error).partition("\n")[0]}
        print(json.dumps(found), file=sys.stderr, flush=True)
        results.append(found)
    right = all(found["right"] for found in results)
    print(json.dumps({"right": right, "results": results}))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())

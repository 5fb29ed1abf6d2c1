"""Looks for a seed that breaks a rule, and stops at the first: what each mutant is run with.

Exit status: 1 when a seed broke one, 0 when none did.
"""

from __future__ import annotations

import argparse
import sys

NODES = 12
DAYS = 0.06
STORMS = 120.0
MOST_STEPS = 3_000_000


def main() -> int:
    """Hunt; returns the exit status."""
    from tests.simulation.shell.fleet import run_all
    from tests.simulation.shell.run import Setup

    parser = argparse.ArgumentParser(prog="python -m tests.simulation.hunt", description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    seeds = range(options.first, options.first + options.seeds)
    setups = [Setup(seed, NODES, DAYS, 1e-9, STORMS, most_steps=MOST_STEPS) for seed in seeds]
    for result in run_all(setups, options.processes, lambda result: bool(result.broken)):
        if result.broken:
            print(f"seed {result.seed}: {result.broken[:300]}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

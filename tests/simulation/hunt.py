"""Looks for a seed that breaks a rule, and stops at the first: what each mutant is run with.

Even numbers are drills, in which every kind of fault happens (tests/simulation/shell/drills.py),
odd ones storms, whose faults are drawn. Exit status: 1 when a seed broke a rule, 0 when none did.
"""

from __future__ import annotations

import argparse
import sys

NODES = 12
DAYS = 0.06
STORMS = 120.0
AFTER_S = 60.0  # of the last drill
MOST_STEPS = 1_500_000  # callbacks of a seed; it takes a third of that


def main() -> int:
    """Hunt; returns the exit status."""
    from tests.simulation.shell.drills import drills
    from tests.simulation.shell.faults import DAY_S
    from tests.simulation.shell.fleet import run_all
    from tests.simulation.shell.run import Setup

    def setup(number: int) -> Setup:
        if number % 2:
            return Setup(number, NODES, DAYS, 1e-9, STORMS, most_steps=MOST_STEPS)
        faults = drills(number)
        days = (faults[-1].at_s + AFTER_S) / DAY_S
        return Setup(number, NODES, days, faults=faults, most_steps=MOST_STEPS)

    parser = argparse.ArgumentParser(prog="python -m tests.simulation.hunt", description=__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    setups = [setup(number) for number in range(options.first, options.first + options.seeds)]
    for result in run_all(setups, options.processes, lambda result: bool(result.broken)):
        print(
            f"{result.seed} {result.cpu_s:.1f} s {result.broken[:300]}", file=sys.stderr, flush=True
        )
        if result.broken:
            print(f"seed {result.seed}: {result.broken[:300]}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Looks for a history that breaks a rule, and stops at the first: what each mutant is run with.

A history is a scenario by its name (tests/simulation/shell/scenarios.py), or a seed: even numbers
are drills, in which every kind of fault happens (tests/simulation/shell/drills.py), odd ones
storms, whose faults are drawn. Exit status: 1 when one broke a rule, 0 when none did.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

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
    from tests.simulation.shell.scenarios import scenario

    def setup(history: str) -> Setup:
        if not history.isdecimal():
            return scenario(history)
        number = int(history)
        if number % 2:
            return Setup(number, NODES, DAYS, 1e-9, STORMS, most_steps=MOST_STEPS)
        faults = drills(number)
        days = (faults[-1].at_s + AFTER_S) / DAY_S
        return Setup(number, NODES, days, faults=faults, most_steps=MOST_STEPS)

    parser = argparse.ArgumentParser(prog="python -m tests.simulation.hunt", description=__doc__)
    parser.add_argument("histories", nargs="+", help="names of scenarios, and seeds")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    setups = [replace(setup(each), point=n) for n, each in enumerate(options.histories)]
    for result in run_all(setups, options.processes, lambda result: bool(result.broken)):
        what = f"{options.histories[result.point]}: {result.broken[:300]}"
        print(f"{what} ({result.cpu_s:.1f} s of CPU)", file=sys.stderr, flush=True)
        if result.broken:
            print(f"history {what}", flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

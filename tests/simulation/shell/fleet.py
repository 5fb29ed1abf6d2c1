"""Many seeds on several processes, and the shortest history of one that breaks a rule."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from tests.simulation.shell.faults import Fault, history
from tests.simulation.shell.run import Result, Setup, run_seed


def run_all(
    setups: Iterable[Setup], processes: int, until: Callable[[Result], bool] = lambda result: False
) -> Iterator[Result]:
    """The results of all seeds as they come, each from a process of its own.

    Ends early when ``until`` holds for a result.
    """
    # A process per seed: what a killed driver leaves behind goes with it.
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, maxtasksperchild=1) as pool:
        for result in pool.imap_unordered(_guarded, setups, chunksize=1):
            yield result
            if until(result):
                return


def _guarded(setup: Setup) -> Result:
    try:
        return run_seed(setup)
    except Exception as error:
        import traceback

        traceback.print_exc(file=sys.stderr)
        return Result(
            setup.seed, setup.point, broken=f"simulation: {type(error).__name__}: {error}"
        )


def shortest(setup: Setup, rule: str, limit_s: float = 120.0) -> tuple[Fault, ...]:
    """The fewest faults of a broken seed that still break the same rule (delta debugging).

    Each trial is a whole history with some faults left out; ends after ``limit_s`` of wall time
    with what it has.
    """
    began_s = time.monotonic()
    faults = list(
        setup.faults
        if setup.faults is not None
        else history(setup.seed, setup.nodes, setup.days, setup.rate, setup.storms)
    )

    def breaks(trial: list[Fault]) -> bool:
        found = next(iter(run_all([replace(setup, faults=tuple(trial))], 1)))
        return found.broken.partition(" ")[0] == rule

    parts = 2
    while len(faults) >= 2 and time.monotonic() - began_s < limit_s:
        size = -(-len(faults) // parts)
        for first in range(0, len(faults), size):
            trial = faults[:first] + faults[first + size :]
            if time.monotonic() - began_s < limit_s and breaks(trial):
                faults, parts = trial, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(faults), 2 * parts)
    return tuple(faults)

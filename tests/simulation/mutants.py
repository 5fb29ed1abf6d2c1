"""``make mutants``: each defect of the list, in a copy of the tree, must break a rule of a seed.

A mutant gets the seeds of tests/simulation/hunt.py one after the other, drills first, until one
catches it. The code as it is must pass the same seeds (``--check``; ``make simulate`` has more).

The last line on stdout is ``{"mutants", "caught"}``. Exit status: 0 if all are caught, 1 if one
survives or no longer applies to the code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.mutant_list import COMMON, DRIVER, MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 12  # a mutant has so many to be caught in
LIMIT_S = 600.0  # of one mutant: one that goes round in circles is not caught


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant; ``what``: the seed and the rule that it broke."""

    mutant: Mutant
    caught: bool
    what: str
    wall_s: float

    def __str__(self) -> str:
        word = "caught  " if self.caught else "SURVIVES"
        return f"{word} {self.mutant.name} ({self.wall_s:.0f} s): {self.what[:240]}"


def main(arguments: list[str] | None = None) -> int:
    """Run the mutants; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--first", type=int, default=0, help="the first seed; default 0")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"for each; default {SEEDS}")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="at a time")
    parser.add_argument("--check", action="store_true", help="the code as it is, which must pass")
    options = parser.parse_args(arguments)
    seeds = range(options.first, options.first + options.seeds)
    if options.check:
        verdict = run(Mutant("none", f"{DRIVER}engine.py", "", ""), seeds)
        print(verdict, file=sys.stderr)
        return int(verdict.caught)
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if stale := [mutant.name for mutant in chosen if not applies(mutant)]:
        print(f"no longer in the code: {', '.join(stale)}: change them too", file=sys.stderr)
        return 1
    caught = 0
    for number, verdict in enumerate(run_all(chosen, seeds, options.jobs), 1):
        caught += verdict.caught
        print(f"{number}/{len(chosen)} {verdict}", file=sys.stderr, flush=True)
    print(json.dumps({"mutants": len(chosen), "caught": caught}))
    return 0 if chosen and caught == len(chosen) else 1


def applies(mutant: Mutant) -> bool:
    """Whether the text that it changes is in the code exactly once."""
    return (ROOT / mutant.file).read_text().count(mutant.old) == 1


def run_all(mutants: Sequence[Mutant], seeds: range, jobs: int) -> Iterator[Verdict]:
    """The verdicts as they come, of so many mutants at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run, mutant, seeds) for mutant in mutants]):
            yield done.result()


def run(mutant: Mutant, seeds: range) -> Verdict:
    """Run the seeds on a copy of the tree with the mutant in it, until one catches it."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for part in (DRIVER, COMMON, "tests/simulation", "tests/harness"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, copy / part, ignore=ignored)
        changed = copy / mutant.file
        changed.write_text(
            changed.read_text().replace(mutant.old, mutant.new)
            if mutant.old
            else changed.read_text()
        )
        roots = [str((copy / package).parent) for package in (DRIVER, COMMON)]
        path = os.pathsep.join([*roots, str(copy), str(ROOT / "proto")])
        command = [sys.executable, "-m", "tests.simulation.hunt"]
        command += ["--first", str(seeds.start), "--seeds", str(len(seeds))]
        try:
            found = subprocess.run(
                command, env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}, cwd=copy,
                capture_output=True, text=True, timeout=LIMIT_S, check=False,
            )  # fmt: skip
            caught = found.returncode == 1 and found.stdout.startswith("seed")
            what = found.stdout.strip() or ("" if not found.returncode else found.stderr[-300:])
        except subprocess.TimeoutExpired:
            caught, what = False, f"not caught within {LIMIT_S:g} s"
    return Verdict(mutant, caught, what, time.monotonic() - began_s)


if __name__ == "__main__":
    sys.exit(main())

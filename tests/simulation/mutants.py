"""``make mutants``: each defect of the list, in a copy of the tree, must break a rule of a history.

A mutant first gets the history that caught it when it was written (tests/simulation/hints.py). If
that no longer does, it gets all scenarios and then seeds, drills and storms in turn, until one
catches it, and the hint is to be renewed. The code as it is must pass all of them (``--check``;
``make simulate`` has more).

The last line on stdout is ``{"mutants", "caught"}``. Exit status: 0 if all are caught, 1 if one
survives or no longer applies to the code.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.simulation.hints import HINTS
from tests.simulation.mutant_list import COMMON, DRIVER, JOB, MUTANTS, Mutant
from tests.simulation.shell.scenarios import REPEATED, SCENARIOS

ROOT = Path(__file__).resolve().parents[2]
# All that the driver imports: a copy without one would run that of the tree, without the mutant.
PACKAGES = (DRIVER, COMMON, JOB, "services/planner/megascale_planner/")
SEEDS = 12  # a mutant has so many to be caught in
LIMIT_S = 600.0  # of CPU for one mutant: one that goes round in circles is not caught
WAIT_S = 3600.0  # for one mutant, on a machine that does other work
BAR = 30  # characters


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant; ``what``: the history and the rule that it broke."""

    mutant: Mutant
    caught: bool
    what: str
    wall_s: float
    hint: str = ""  # that did not catch it

    def __str__(self) -> str:
        word = "caught  " if self.caught else "SURVIVES"
        stale = f" [not by its hint {self.hint}: renew it]" if self.hint else ""
        return f"{word} {self.mutant.name} ({self.wall_s:.0f} s): {self.what[:240]}{stale}"


def main(arguments: list[str] | None = None) -> int:
    """Run the mutants; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--first", type=int, default=0, help="the first seed; default 0")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"for each; default {SEEDS}")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="at a time")
    parser.add_argument("--no-hints", action="store_true", help="search for each from the start")
    parser.add_argument("--check", action="store_true", help="the code as it is, which must pass")
    options = parser.parse_args(arguments)
    histories = searched(range(options.first, options.first + options.seeds))
    if options.check:
        verdict = run(Mutant("none", f"{DRIVER}shell/engine.py", "", ""), histories)
        print(verdict, file=sys.stderr)
        return int(verdict.caught)
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if stale := [mutant.name for mutant in chosen if not applies(mutant)]:
        print(f"no longer in the code: {', '.join(stale)}: change them too", file=sys.stderr)
        return 1
    hints = {} if options.no_hints else HINTS
    began_s, caught = time.monotonic(), 0
    for number, verdict in enumerate(run_all(chosen, histories, options.jobs, hints), 1):
        caught += verdict.caught
        done = number * BAR // len(chosen)
        bar = f"[{'#' * done}{'.' * (BAR - done)}] {number}/{len(chosen)}"
        print(f"{bar} {verdict}", file=sys.stderr, flush=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s, wall_s = used.ru_utime + used.ru_stime, time.monotonic() - began_s
    print(f"{cpu_s:.0f} s of CPU in {wall_s:.0f} s", file=sys.stderr)
    print(json.dumps({"mutants": len(chosen), "caught": caught}))
    return 0 if chosen and caught == len(chosen) else 1


def searched(seeds: range) -> list[str]:
    """The histories that a mutant gets in turn: scenarios are short, and drills have all faults."""
    return [*SCENARIOS, *REPEATED, *map(str, seeds)]


def applies(mutant: Mutant) -> bool:
    """Whether the text that it changes is in the code exactly once."""
    return (ROOT / mutant.file).read_text().count(mutant.old) == 1


def run_all(
    mutants: Sequence[Mutant], histories: Sequence[str], jobs: int, hints: dict[str, str]
) -> Iterator[Verdict]:
    """The verdicts as they come, of so many mutants at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        work = [pool.submit(run, each, histories, hints.get(each.name, "")) for each in mutants]
        for done in as_completed(work):
            yield done.result()


def run(mutant: Mutant, histories: Sequence[str], hint: str = "") -> Verdict:
    """Run histories on a copy of the tree with the mutant in it, until one catches it."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for part in (*PACKAGES, "tests/simulation", "tests/harness"):
            # What was compiled comes along: it holds for files that keep their time.
            ignored = shutil.ignore_patterns("*-pytest-*")
            shutil.copytree(ROOT / part, copy / part, ignore=ignored)
        changed = copy / mutant.file
        if mutant.old:
            for compiled in (changed.parent / "__pycache__").glob(f"{changed.stem}.*"):
                compiled.unlink()
            changed.write_text(changed.read_text().replace(mutant.old, mutant.new))
        if hint:
            caught, what = hunt(copy, [hint])
            if caught:
                return Verdict(mutant, True, what, time.monotonic() - began_s)
        rest = [history for history in histories if history != hint]
        caught, what = hunt(copy, rest)
    return Verdict(mutant, caught, what, time.monotonic() - began_s, hint)


def hunt(copy: Path, histories: Sequence[str]) -> tuple[bool, str]:
    """Whether one of the histories breaks a rule in this copy of the tree, and which."""
    roots = [str((copy / package).parent) for package in PACKAGES]
    path = os.pathsep.join([*roots, str(copy), str(ROOT / "proto")])
    try:
        found = subprocess.run(
            [sys.executable, "-m", "tests.simulation.hunt", *histories],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}, cwd=copy,
            capture_output=True, text=True, timeout=WAIT_S, check=False,
            preexec_fn=_limit_cpu,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return False, f"not caught within {WAIT_S:g} s"
    caught = found.returncode == 1 and found.stdout.startswith("history")
    return caught, found.stdout.strip() or ("" if not found.returncode else found.stderr[-300:])


def _limit_cpu() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(LIMIT_S), int(LIMIT_S)))


if __name__ == "__main__":
    sys.exit(main())

"""``make mutants``: each defect of the list, in a copy of the tree, must break a rule of a seed.

The last line on stdout is ``{"mutants", "caught"}``. Exit status: 0 if all are caught, 1 if one
survives, 2 if one no longer applies to the code.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.simulation.mutant_list import COMMON, DRIVER, MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 30  # a mutant has so many to be caught in
LIMIT_S = 600.0


def main(arguments: list[str] | None = None) -> int:
    """Run the mutants; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="for each; default 30")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if stale := [mutant.name for mutant in chosen if not applies(mutant)]:
        print(f"no longer in the code: {', '.join(stale)}: change them too", file=sys.stderr)
        return 2
    with ThreadPoolExecutor(options.processes) as pool:
        caught = list(pool.map(lambda mutant: run(mutant, options.seeds), chosen))
    print(json.dumps({"mutants": len(chosen), "caught": sum(caught)}))
    return 0 if all(caught) else 1


def applies(mutant: Mutant) -> bool:
    """Whether the text that it changes is in the code exactly once."""
    return (ROOT / mutant.file).read_text().count(mutant.old) == 1


def run(mutant: Mutant, seeds: int) -> bool:
    """Whether a seed catches the mutant."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder)
        for package in (DRIVER, COMMON):
            shutil.copytree(ROOT / package, copy / package)
        for folder_of_tests in ("tests/simulation", "tests/harness"):
            shutil.copytree(ROOT / folder_of_tests, copy / folder_of_tests)
        changed = copy / mutant.file
        changed.write_text(changed.read_text().replace(mutant.old, mutant.new))
        roots = [str((copy / package).parent) for package in (DRIVER, COMMON)]
        path = os.pathsep.join([*roots, str(copy), str(ROOT / "proto")])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "tests.simulation.hunt", "--seeds", str(seeds)]
        try:
            found = subprocess.run(
                command, env=environment, cwd=copy, capture_output=True, text=True,
                timeout=LIMIT_S, check=False,
            )  # fmt: skip
            what = found.stdout.strip() or found.stderr.strip()[-300:] or "survives"
            caught = found.returncode == 1 and found.stdout.startswith("seed")
        except subprocess.TimeoutExpired:
            caught, what = False, f"not caught within {LIMIT_S:g} s"
    print(f"{'caught  ' if caught else 'SURVIVES'} {mutant.name}: {what[:240]}", file=sys.stderr)
    sys.stderr.flush()
    return caught


if __name__ == "__main__":
    sys.exit(main())

"""``make crash``: many crash cases; the last line on stdout says what became of them.

Exit status: 0 when no case lost a checkpoint or was silently wrong, 1 when one did (the shortest
history is on stderr), 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from tests.crash.case import KINDS
from tests.crash.replica_case import REPLICA_KINDS
from tests.crash.run import Outcome, outcomes

PROGRESS_S = 5.0


def main(arguments: list[str] | None = None) -> int:
    """Run the cases; returns the exit status."""
    options = _parse(arguments)
    failed: list[Outcome] = []
    hits: set[tuple[str, str, str]] = set()
    found = lost = silent = done = 0
    began_s = shown_s = time.monotonic()
    for case in outcomes(options.seed, options.cases, tuple(options.only), options.jobs):
        done += 1
        found += case.found
        lost += bool(case.lost)
        silent += bool(case.silent)
        hits |= case.hits
        if case.failed:
            failed.append(case)
            if options.first:
                break
        if time.monotonic() - shown_s > PROGRESS_S:
            shown_s = time.monotonic()
            print(f"{done} of {options.cases} cases, {len(failed)} failed", file=sys.stderr)
    took_s = time.monotonic() - began_s
    print(f"{done} cases in {took_s:.1f} s", file=sys.stderr)
    faults = sorted({f"{kind} at {call}" if call else kind for kind, call, _ in hits})
    print(f"hit at {len(hits)} places: {', '.join(faults)}", file=sys.stderr)
    if failed:
        _show(min(failed, key=lambda case: len(case.history)))
    result = {"cases": done, "lost": lost, "silent": silent, "newest_complete_found": found}
    print(json.dumps(result))
    return 1 if failed else 0


def _show(case: Outcome) -> None:
    print("the shortest history that fails:", file=sys.stderr)
    for line in case.history:
        print(f"  {line}", file=sys.stderr)
    print(f"lost: {case.lost or 'nothing'}", file=sys.stderr)
    print(f"silent: {case.silent or 'nothing'}", file=sys.stderr)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make crash", description=__doc__)
    parser.add_argument("--cases", type=_positive, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="any number")
    parser.add_argument(
        "--only",
        choices=[*KINDS, *REPLICA_KINDS],
        default=[],
        action="append",
        help="no other faults but losses of power (those of replicas: in cases of replicas alone); "
        "may be given several times",
    )
    parser.add_argument(
        "--jobs", type=_positive, default=1, help="processes; the cases stay the same"
    )
    parser.add_argument("--first", action="store_true", help="stop at the first that fails")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())

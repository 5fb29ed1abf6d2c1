"""``make crash``: many crash cases; the last line on stdout says what became of them.

Exit status: 0 when no case lost a checkpoint or was silently wrong, 1 when one did (the shortest
history is on stderr), 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from tests.crash.case import KINDS, Case
from tests.crash.replica_case import REPLICA_KINDS, ReplicaCase

from megascale_checkpoint import commit_log, persist, storage

REPLICAS_EVERY = 4  # of so many cases one is of replicas
SNAPSHOT_EVERY = 4  # records, so that short logs have snapshots
PROGRESS_S = 5.0


def main(arguments: list[str] | None = None) -> int:
    """Run the cases; returns the exit status."""
    options = _parse(arguments)
    failed: list[Case | ReplicaCase] = []
    struck: set[tuple[str, str, str]] = set()
    found = lost = silent = done = 0
    began_s = shown_s = time.monotonic()
    with _prepared():
        for number in range(options.cases):
            only = tuple(options.only)
            of_replicas = number % REPLICAS_EVERY == REPLICAS_EVERY - 1
            if only:
                of_replicas = set(only) <= set(REPLICA_KINDS)
            # Each sort counts on its own.
            own = number // REPLICAS_EVERY if of_replicas else number - number // REPLICAS_EVERY
            own = number if only else own
            case = run_case(options.seed * 1_000_003 + own, only, of_replicas=of_replicas)
            done += 1
            found += case.oracle.found and not case.oracle.failed
            lost += bool(case.oracle.lost)
            silent += bool(case.oracle.silent)
            struck |= case.machine.struck
            if case.oracle.failed:
                failed.append(case)
                if options.first:
                    break
            if time.monotonic() - shown_s > PROGRESS_S:
                shown_s = time.monotonic()
                print(f"{done} of {options.cases} cases, {len(failed)} failed", file=sys.stderr)
    took_s = time.monotonic() - began_s
    print(f"{done} cases in {took_s:.1f} s", file=sys.stderr)
    faults = sorted({f"{kind} at {call}" if call else kind for kind, call, _ in struck})
    print(f"struck at {len(struck)} places: {', '.join(faults)}", file=sys.stderr)
    if failed:
        _show(min(failed, key=lambda case: len(case.machine.history)))
    result = {"cases": done, "lost": lost, "silent": silent, "newest_complete_found": found}
    print(json.dumps(result))
    return 1 if failed else 0


def run_case(
    seed: int, only: tuple[str, ...] = (), *, of_replicas: bool = False
) -> Case | ReplicaCase:
    """One case, to its end."""
    case: Case | ReplicaCase
    if of_replicas:
        case = ReplicaCase(seed, only)
    else:
        case = disk_case = Case(seed, only)
        storage.SCHEMES["crash"] = disk_case.open
    try:
        asyncio.run(case.run())
    except Exception as error:  # a defect: whatever it is, the job does not go on
        case.oracle.lost = case.oracle.lost or f"the daemon fails: {error!r}"
    case.machine.note(f"seed of this case: {seed}")
    return case


@contextmanager
def _prepared() -> Iterator[None]:
    """Short logs have snapshots, retries do not wait, and nothing is logged."""
    before = commit_log.SNAPSHOT_EVERY, persist.RETRY_PAUSES_S, structlog.get_config()
    commit_log.SNAPSHOT_EVERY, persist.RETRY_PAUSES_S = SNAPSHOT_EVERY, (0.0, 0.0)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    try:
        yield
    finally:
        commit_log.SNAPSHOT_EVERY, persist.RETRY_PAUSES_S = before[0], before[1]
        structlog.configure(**before[2])
        storage.SCHEMES.pop("crash", None)


def _show(case: Case | ReplicaCase) -> None:
    print("the shortest history that fails:", file=sys.stderr)
    for line in case.machine.history:
        print(f"  {line}", file=sys.stderr)
    print(f"lost: {case.oracle.lost or 'nothing'}", file=sys.stderr)
    print(f"silent: {case.oracle.silent or 'nothing'}", file=sys.stderr)


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
    parser.add_argument("--first", action="store_true", help="stop at the first that fails")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())

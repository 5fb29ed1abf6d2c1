"""Simulate a fleet with the driver's whole shell, seed after seed; ``--help`` shows how.

The last line on stdout is one JSON object. Exit status: 0 if no invariant broke, 1 if one did (the
shortest history is on stderr), 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

_EXAMPLES = """
examples:
  make simulate NODES=64 DAYS=2 SEEDS=100       100 histories of two days each
  make simulate SEED=17 NODES=64 DAYS=2         replay one; cut it if it is broken
  make simulate SEEDS=2000 JOBS=32 CSV=/tmp/seeds.csv    on a machine of 32 cores
  python -m tests.simulation --storms 0 --rate 6.5   only hardware that fails, as published

A seed draws its faults: hardware at the published rates (3.79 to 6.5 per 1,000 node-days, a share
of them switches that take all their nodes along), and storms: minutes in which processes, clocks,
links, etcd and operators fail, far more often than in production, because defects live there.
Figures of a simulation are simulated: they are not measurements of a cluster.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the seeds; returns the exit status."""
    options = _parser().parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of names must not differ from run to run.
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "tests.simulation", *(arguments or sys.argv[1:])]
        os.execve(sys.executable, command, environment)
    from tests.simulation.shell.run import Setup

    setup = Setup(
        0, options.nodes, options.days, options.rate, options.storms, options.spares,
        skip=not options.no_skip,
    )  # fmt: skip
    if options.seed is not None:
        return _replay(setup, options.seed)
    return _many(setup, options)


def _many(setup: object, options: argparse.Namespace) -> int:
    from dataclasses import replace

    from tests.simulation.seed_csv import SeedCsv
    from tests.simulation.shell.fleet import run_all, shortest
    from tests.simulation.shell.run import Result, Setup

    assert isinstance(setup, Setup)
    try:
        lines = SeedCsv(options.csv, setup) if options.csv else None
    except ValueError as error:
        print(f"--csv: {error}", file=sys.stderr)
        return 2
    seeds = range(options.first, options.first + options.seeds)
    known = lines.known if lines is not None else {}
    results: list[Result] = [known[seed] for seed in seeds if seed in known]
    if results:
        print(f"{len(results)} of {len(seeds)} seeds are in {options.csv}", file=sys.stderr)
    shown_s = time.monotonic()
    wanted = [replace(setup, seed=seed) for seed in seeds if seed not in known]
    for result in run_all(wanted, options.jobs):
        results.append(result)
        if lines is not None:
            lines.add(result)
        if result.broken:
            print(f"seed {result.seed}: {result.broken}", file=sys.stderr, flush=True)
        if time.monotonic() - shown_s > 5.0:
            shown_s = time.monotonic()
            broken = sum(bool(item.broken) for item in results)
            print(f"{len(results)} of {len(seeds)} seeds, {broken} broken", file=sys.stderr)
    results.sort(key=lambda item: item.seed)
    failed = [item for item in results if item.broken]
    if failed and not options.no_shortest:
        worst = failed[0]
        rule = worst.broken.partition(" ")[0]
        found = shortest(replace(setup, seed=worst.seed), rule)
        _show(worst.seed, worst.broken, found, setup)
    print(json.dumps(summary(results)))
    return 1 if failed else 0


def summary(results: list[object]) -> dict[str, object]:
    """The figures of many seeds; every one of them is simulated."""
    from tests.simulation.seed_csv import percentile
    from tests.simulation.shell.run import Result

    found = [item for item in results if isinstance(item, Result)]
    detected = sorted(at_s for item in found for at_s in item.detected_s)
    node_days = sum(item.node_days for item in found)
    false = sum(item.false_evictions for item in found)
    return {
        "seeds": len(found),
        "broken": sum(bool(item.broken) for item in found),
        "ettr": round(sum(item.ettr for item in found) / len(found), 4) if found else 0.0,
        "recoveries": sum(item.recoveries for item in found),
        "false_evictions_per_1000_node_days": round(1000 * false / node_days, 3)
        if node_days
        else 0.0,
        "detect_p50_s": round(percentile(detected, 0.50), 2),
        "detect_p99_s": round(percentile(detected, 0.99), 2),
        "cpu_s": round(sum(item.cpu_s for item in found), 1),
    }


def _replay(setup: object, seed: int) -> int:
    from dataclasses import replace

    from tests.simulation.shell.fleet import run_all, shortest
    from tests.simulation.shell.run import Setup

    assert isinstance(setup, Setup)
    wanted = replace(setup, seed=seed)
    first, second = list(run_all([wanted, wanted], 2))
    print("\n".join(first.log), file=sys.stderr)
    same = first.digest == second.digest and first.broken == second.broken
    if not same:
        print(f"seed {seed} gives {first.digest} and {second.digest}", file=sys.stderr)
    if first.broken:
        rule = first.broken.partition(" ")[0]
        _show(seed, first.broken, shortest(wanted, rule), setup)
    print(json.dumps({**summary([first]), "seed": seed, "digest": first.digest, "same": same}))
    return 0 if same and not first.broken else 1


def _show(seed: int, broken: str, faults: tuple[object, ...], setup: object) -> None:
    lines = "\n".join(f"  {fault}" for fault in faults)
    print(
        f"\nseed {seed} broke {broken}\nits shortest history has {len(faults)} faults:\n{lines}\n"
        f"replay: make simulate SEED={seed} NODES={getattr(setup, 'nodes', '')} "
        f"DAYS={getattr(setup, 'days', '')} STORMS={getattr(setup, 'storms', '')}",
        file=sys.stderr,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--nodes", type=int, default=64, help="nodes of the fleet; default 64")
    parser.add_argument("--days", type=float, default=2.0, help="virtual days; default 2")
    parser.add_argument("--first", type=int, default=0, help="the first seed; default 0")
    parser.add_argument("--seeds", type=int, default=100, help="how many; default 100")
    parser.add_argument("--seed", type=int, help="replay this one, twice, and show its decisions")
    parser.add_argument(
        "--rate", type=float, default=0.0,
        help="failures of hardware per 1,000 node-days; default: each seed draws 3.79 to 6.5",
    )  # fmt: skip
    parser.add_argument(
        "--storms", type=float, default=4.0, help="storms of faults per day; default 4"
    )
    parser.add_argument("--spares", type=int, default=0, help="of the main job; default nodes/16")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)),
        help="seeds at a time, each in a process of its own; default: the number of cores",
    )  # fmt: skip
    parser.add_argument(
        "--csv", default="",
        help="append each seed's figures here as it ends; seeds that are there are not run again",
    )  # fmt: skip
    parser.add_argument("--no-skip", action="store_true", help="skip no stretch without changes")
    parser.add_argument("--no-shortest", action="store_true", help="do not cut a broken history")
    return parser


if __name__ == "__main__":
    sys.exit(main())

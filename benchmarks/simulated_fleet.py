"""ETTR, detection and false evictions of a simulated fleet, by spares and failure rate: CSV, PNG.

    python benchmarks/simulated_fleet.py --out curves                       # 48 nodes, small
    python benchmarks/simulated_fleet.py --out curves --nodes 128 --days 21 --seeds 20 --jobs 32

Every figure is SIMULATED: the driver's own shell and core under a virtual clock, with executors,
etcd and storage in memory (tests/simulation). A job of ``--nodes`` nodes has exactly ``--spares``
nodes more; hardware fails at ``--rates`` per 1,000 node-days, one failure in eleven that of a
switch with all its nodes (tests/simulation/shell/faults.py has the shares and their source); there
are no storms. A lost device is out for 10 to 80 minutes. Published rates: 3.79 (Llama 3), 2.34 and
6.50 (Meta's RSC). ETTR is the mean over the seeds, detection over all their faults.
The last line of stdout is one JSON object. Exit status: 0, 1 if an invariant broke.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

COLUMNS = (
    "nodes", "spares", "rate_per_1000_node_days", "days", "seeds", "broken", "faults",
    "recoveries", "ettr", "ettr_lowest", "detect_p50_s", "detect_p99_s",
    "false_evictions_per_1000_node_days", "cpu_s",
)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Sweep; returns the exit status."""
    options = _parser().parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets must not differ between runs
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        command = [sys.executable, __file__, *(arguments or sys.argv[1:])]
        os.execve(sys.executable, command, environment)
    rows = sweep(options)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "simulated-fleet.csv", "w", encoding="utf-8", newline="") as file:
        lines = csv.DictWriter(file, COLUMNS)
        lines.writeheader()
        lines.writerows(rows)
    if not options.no_plot:
        draw(rows, folder / "simulated-fleet.png")
    broken = sum(row["broken"] for row in rows)
    print(json.dumps({"simulated": True, "points": len(rows), "broken": broken, "rows": rows}))
    return 1 if broken else 0


def sweep(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each number of spares and rate; the seeds of all share the processes."""
    from tests.simulation.shell.fleet import run_all
    from tests.simulation.shell.run import Result, Setup

    points = [(spares, rate) for spares in options.spares for rate in options.rates]
    setups = [
        Setup(
            options.first + number, options.nodes + spares, options.days, rate, 0.0, spares,
            main=options.nodes, point=index,
        )
        for index, (spares, rate) in enumerate(points) for number in range(options.seeds)
    ]  # fmt: skip
    found: dict[int, list[Result]] = {index: [] for index in range(len(points))}
    for count, result in enumerate(run_all(setups, options.jobs), 1):
        found[result.point].append(result)
        if result.broken:
            spares, rate = points[result.point]
            print(
                f"seed {result.seed}, {spares} spares, rate {rate:g}: {result.broken}",
                file=sys.stderr,
            )
        print(f"{count} of {len(setups)} histories", file=sys.stderr, flush=True)
    return [
        _row(options, spares, rate, found[index]) for index, (spares, rate) in enumerate(points)
    ]


def _row(
    options: argparse.Namespace, spares: int, rate: float, results: list[Any]
) -> dict[str, Any]:
    from tests.simulation.__main__ import summary

    figures = summary(results)
    return {
        "nodes": options.nodes,
        "spares": spares,
        "rate_per_1000_node_days": rate,
        "days": options.days,
        "faults": sum(result.fault_count for result in results),
        "ettr_lowest": round(min(result.ettr for result in results), 4),
        **figures,
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Three plots over the spares, one line per rate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4))
    for rate in sorted({row["rate_per_1000_node_days"] for row in rows}):
        mine = [row for row in rows if row["rate_per_1000_node_days"] == rate]
        spares = [row["spares"] for row in mine]
        label = f"{rate:g} per 1,000 node-days"
        axes[0].plot(spares, [row["ettr"] for row in mine], "o-", label=label)
        (line,) = axes[1].plot(spares, [row["detect_p50_s"] for row in mine], "o-", label=label)
        axes[1].plot(spares, [row["detect_p99_s"] for row in mine], "^--", color=line.get_color())
        axes[2].plot(
            spares, [row["false_evictions_per_1000_node_days"] for row in mine], "o-", label=label
        )
    titles = ("ETTR", "detection, s (p50 o, p99 ^)", "false evictions per 1,000 node-days")
    for axis, title in zip(axes, titles, strict=True):
        axis.set(xlabel="spare nodes", title=title)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    first = rows[0]
    figure.suptitle(
        f"SIMULATED: a job of {first['nodes']} nodes over {first['days']:g} days, "
        f"{first['seeds']} seeds a point"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="folder of the CSV and the PNG")
    parser.add_argument("--nodes", type=int, default=48, help="of the job; default 48")
    parser.add_argument("--days", type=float, default=4.0, help="virtual days; default 4")
    parser.add_argument("--seeds", type=int, default=3, help="per point; default 3")
    parser.add_argument("--first", type=int, default=0, help="the first seed; default 0")
    parser.add_argument("--spares", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--rates", type=float, nargs="+", default=[2.34, 6.5, 20.0, 60.0])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-plot", action="store_true", help="write the CSV only")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""``python -m megascale_driver.analysis.spans``: analyses of recorded spans, without a driver.

The spans are in a file, or in the folder of an attempt by hand. ``heat FILE`` prints the time of
each rank for each operation, the slow nodes, and the ranks with hot experts. ``why FILE`` prints
the cause of a falling MFU. ``timeline FILE --out trace.json`` writes one trace of all ranks for
Perfetto. The last line of stdout is one JSON object. Exit status 0: an answer (for ``why`` also
that the MFU did not fall); 1: the MFU fell and no cause explains it; 2: no such file, or another
format.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megascale_driver.analysis.hot_experts import REMEDY
from megascale_driver.analysis.spans import recorded
from megascale_driver.analysis.spans.clocks import clocks
from megascale_driver.analysis.spans.decline import compared
from megascale_driver.analysis.spans.outliers import heat_map, slow_nodes
from megascale_driver.analysis.spans.recorded import Recorded
from megascale_driver.analysis.spans.routing import expert_shares, hot_ranks
from megascale_driver.analysis.spans.timeline import PATH_PROCESS, merged

HEAT_STEPS = 50


def main(arguments: list[str] | None = None) -> int:
    """Run a verb; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        path = Path(options.file)
        found = recorded.of_folder(path) if path.is_dir() else recorded.load(path.read_bytes())
        if options.verb == "heat":
            return _heat(found, options.steps)
        if options.verb == "why":
            return _why(found, options.split)
        return _timeline(found, options.out)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}; give a file that can be used", file=sys.stderr)
    except ValueError as error:
        print(f"FILE {options.file}: {error}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megascale_driver.analysis.spans")
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("why", help="why the MFU fell, in one sentence with numbers")
    one.add_argument(
        "--split",
        type=int,
        default=0,
        metavar="STEP",
        help="first step of the slower window; default: where steps begin to take longer",
    )
    trace = verbs.add_parser("timeline", help="one trace of all ranks, for ui.perfetto.dev")
    trace.add_argument("--out", type=Path, required=True, help="trace.json, or trace.json.gz")
    heat = verbs.add_parser("heat", help="time of each rank for each operation")
    heat.add_argument(
        "--steps", type=int, default=HEAT_STEPS, help="newest steps (default %(default)s)"
    )
    for verb in (one, trace, heat):
        verb.add_argument("file", help="recorded spans, or a folder of them (docs/spans.md)")
    return parser


def _why(found: Recorded, split: int) -> int:
    split, answer = compared(found.table, split, lambda _: found.counters)
    print(answer.sentence, file=sys.stderr)
    print(json.dumps({**asdict(answer), "split_step": split}))
    return 1 if answer.cause == "unknown" else 0


def _heat(found: Recorded, steps: int) -> int:
    last = int(found.table.step.max())
    table = found.table.of_steps(max(0, last - steps), last - 1)
    rows = heat_map(table)
    for row in rows:
        times = "  ".join(f"{each:9.3f}" for each in row.median_ns / 1e6)
        print(f"{row.name:24}{times}", file=sys.stderr)
    slow = slow_nodes(table)
    for one in slow:
        print(one.sentence, file=sys.stderr)
    hot = hot_ranks(table)
    for each in hot:
        print(f"{each.sentence}; {REMEDY}", file=sys.stderr)
    shown = {row.name: np.nan_to_num(row.median_ns / 1e6).round(4).tolist() for row in rows}
    answer: dict[str, Any] = {"median_ms": shown, "slow_nodes": [asdict(one) for one in slow]}
    shares = expert_shares(table)
    if len(shares):
        answer["expert_share"] = np.nan_to_num(shares).round(4).tolist()
        answer["hot_ranks"] = [asdict(one) for one in hot]
    print(json.dumps(answer))
    return 0


def _timeline(found: Recorded, out: Path) -> int:
    by_node = clocks(found.table, found.heartbeats)
    trace = merged(found.table, by_node)
    data = json.dumps(trace, separators=(",", ":")).encode()
    out.write_bytes(gzip.compress(data, mtime=0) if out.suffix == ".gz" else data)
    errors = {node: clock.error_ns for node, clock in by_node.items()}
    phases = [event["ph"] for event in trace["traceEvents"] if event["pid"] != PATH_PROCESS]
    for name, sentence in trace["otherData"].items():
        if name.startswith("critical path"):
            print(sentence, file=sys.stderr)
    counts = {"spans": phases.count("X"), "arrows": phases.count("s")}
    print(json.dumps({**counts, "clock_error_ns": errors, "bytes": out.stat().st_size}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

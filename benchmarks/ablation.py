"""Table 3 of MegaScale on this machine: the gain of each step from a plain trainer to the full one.

    python benchmarks/ablation.py --preset 7b --tp 2 --pp 2 --vpp 2 --steps 5 \\
        --budget-s 540 --results ablation.jsonl
    python benchmarks/ablation.py --preset tiny --tp 2 --pp 2 --device cpu --rounds 2

Rows are measured in turn, so that each has a partner in time in every other. Gains are in tokens
per second, because two of the rows change the mathematics (the block) or the batch. Rows that have
no effect in the layout are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A script finds only the modules in its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import command, options, report
from benchmarks.options import Entry
from benchmarks.presets import PRESETS, ConfigurationRefused, Run

_PLAIN = ("--block", "serial", "--kernels", "torch", "--overlap", "none")
_OVERLAP_ROWS = {"tp": "TP", "pp": "PP", "dp": "DP"}
_LARGER_BATCH = "+ larger batch"
# MFU points that the paper's Table 3 gives a row (175B, 256 GPUs; its larger batch is three times
# as large, with LAMB).
_PAPER_POINTS = {
    "+ parallel block": "+4.6",
    "+ kernels": "+1.7",
    "+ TP overlap": "+2.2",
    "+ PP overlap": "+2.5",
    "+ DP overlap": "+1.5",
    _LARGER_BATCH: "+3.0",
}


def ladder(run: Run, ranks: int, batch_factor: int) -> list[dict[str, Any]]:
    """The rows after the baseline, each as what it changes."""
    sizes = {"tp": run.tp, "pp": run.pp, "dp": run.dp or ranks // (run.tp * run.pp)}
    rows: list[dict[str, Any]] = [
        {"row": "+ parallel block", "block": "parallel"},
        {"row": "+ kernels", "kernels": "triton"},
    ]
    hidden: list[str] = []
    for axis, label in _OVERLAP_ROWS.items():
        if sizes[axis] > 1:
            hidden.append(axis)
            rows.append({"row": f"+ {label} overlap", "overlap": ",".join(hidden)})
    if batch_factor > 1:
        batch = (run.global_batch or PRESETS[run.preset].batch) * batch_factor
        rows.append({"row": _LARGER_BATCH, "global_batch": batch})
    return rows


def _own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-factor", type=int, default=3, help="of the last row's batch; 1: no such row"
    )


def _entries(machine: argparse.Namespace, rest: Sequence[str]) -> list[Entry]:
    asked = options.entry_of(rest)
    if len(asked.variants) > 1:
        raise ConfigurationRefused("an ablation has rows of its own: omit --against")
    ranks = command.ranks(machine, [asked])
    return [options.entry_of([*rest, *_PLAIN], ladder(asked.run, ranks, machine.batch_factor))]


def _text(line: dict[str, Any]) -> str:
    if "variants" not in line:
        return report.text(line)
    rows = line["variants"]
    paper = [_PAPER_POINTS.get(row["label"], "-") for row in rows]
    return f"{report.text(line)}\n\n{report.table(rows, {'MFU points in the paper': paper})}"


if __name__ == "__main__":
    raise SystemExit(command.main(sys.argv[1:], __doc__ or "", _own_options, _entries, _text))

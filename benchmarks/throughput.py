"""Tokens per second, step times, both MFUs, memory and exposed communication of the trainer.

    python benchmarks/throughput.py --preset tiny --tp 2 --pp 2 --dp 2 --device cpu
    python benchmarks/throughput.py --preset 7b --tp 2 --pp 2 --vpp 2 --overlap tp,pp,dp \\
        --exposed all
    python benchmarks/throughput.py --preset 7b --tp 8 --overlap tp --against overlap=none
    python benchmarks/throughput.py --sweep benchmarks/sweeps/table-8.json \\
        --results table.jsonl --budget-s 540
    torchrun --nproc-per-node 8 --max-restarts 3 benchmarks/throughput.py --preset 7b --tp 2

It starts its own ranks, or is one under torchrun. benchmarks/README.md explains the figures. The
last line of stdout is one JSON object; exit status: 0, 1 if a measurement failed, 2 for a command
line that cannot run here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

# A script finds only the modules in its own folder.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import command, options, report
from benchmarks.options import Entry
from benchmarks.presets import ConfigurationRefused


def _own_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--sweep", type=Path, help="a JSON file of measurements; other options hold for all of them"
    )
    parser.add_argument(
        "--only", default="", help="of a sweep the measurements whose names contain this"
    )


def _entries(machine: argparse.Namespace, rest: Sequence[str]) -> list[Entry]:
    if machine.sweep is None:
        return [options.entry_of(rest)]
    entries = [
        entry for entry in options.read_sweep(machine.sweep, rest) if machine.only in entry.name
    ]
    if not entries:
        raise ConfigurationRefused(
            f"--only {machine.only!r}: no measurement of {machine.sweep} has that in its name"
        )
    return entries


if __name__ == "__main__":
    raise SystemExit(command.main(sys.argv[1:], __doc__ or "", _own_options, _entries, report.text))

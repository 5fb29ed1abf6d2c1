"""The fastest settings of each row's bar: each is started once, the winner kept in the rows file.

    python benchmarks/peers/best.py --rows benchmarks/peers/rows-2.json --only FP8 --write
    python benchmarks/peers/best.py --rows benchmarks/peers/rows-2.json --only FP8 --dry-run

A row's ``bar_settings`` are the options of its bar to try (``{"fp8": "delayed", "micro_batch": 8}``
stand in for the row's shape); ``--write`` puts those of the most tokens a second into its
``bar_options``, with which `pair.py` measures from then on. A setting that fails (no memory, a
layout that the peer refuses) is named and loses.

Lines and the table go to stderr; the last line of stdout is one JSON object. Exit status: 0, 1 if
no setting of a row ran, 2 without readable rows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# A script finds its own folder first, whose modules have the names of the peers' packages.
if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.peers import pair

Row = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    """Try the settings; returns the exit status."""
    words = pair.parser(__doc__, steps=6, limit_s=120.0)
    words.add_argument("--write", action="store_true", help="keep the winners in the rows file")
    options = words.parse_args(arguments)
    try:
        rows: list[Row] = json.loads(options.rows.read_text())
        chosen = [row for row in rows if options.only in row["name"] and row.get("bar_settings")]
    except (OSError, ValueError, KeyError, TypeError) as problem:
        print(f"best.py: {options.rows}: {problem}", file=sys.stderr)
        return 2
    if not chosen:
        print(f"best.py: {options.rows}: no row with bar_settings is selected", file=sys.stderr)
        return 2
    if options.dry_run:
        for row in chosen:
            for settings in row["bar_settings"]:
                tried = with_settings(row, settings)
                print(" ".join(pair.command(tried, pair.BAR, options.steps, Path("RESULTS"))))
        return 0
    end = time.monotonic() + options.budget_s if options.budget_s else float("inf")
    lines = [line for row in chosen for line in _try(row, options, end)]
    print(table(lines), file=sys.stderr)
    winners = {name: line["settings"] for name, line in fastest(lines).items()}
    if options.write:
        kept = [
            {**row, "bar_options": winners.get(row["name"], row["bar_options"])} for row in rows
        ]
        text = ",\n".join("  " + json.dumps(row) for row in kept)
        options.rows.write_text(f"[\n{text}\n]\n")
    print(json.dumps({"winners": winners, "starts": lines}), flush=True)
    return int(any(row["name"] not in winners for row in chosen))


def with_settings(row: Row, settings: Mapping[str, Any]) -> Row:
    """The row with other options of its bar."""
    return {**row, "bar_options": dict(settings)}


def fastest(lines: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The line of most tokens per second of each row that has one, by the row's name."""
    best: dict[str, Mapping[str, Any]] = {}
    for line in lines:
        name, speed = line["row"], line.get("tokens_per_s_per_device", 0.0)
        if speed > (best[name]["tokens_per_s_per_device"] if name in best else 0.0):
            best[name] = line
    return best


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A markdown table of all starts; a row's fastest is marked."""
    best = fastest(lines)
    text = ["| row | settings of the bar | tokens/s/GPU | GiB |", "|---" * 4 + "|"]
    for line in lines:
        settings = " ".join(f"{key}={value}" for key, value in line["settings"].items()) or "-"
        if "tokens_per_s_per_device" in line:
            mark = "**" if best[line["row"]] is line else ""
            speed = f"{mark}{line['tokens_per_s_per_device']:,.0f}{mark}"
            text.append(f"| {line['row']} | {settings} | {speed} | {line['memory_gib']:.1f} |")
        else:
            text.append(f"| {line['row']} | {settings} | failed | |")
    return "\n".join(text)


def _try(row: Row, options: argparse.Namespace, end: float) -> list[dict[str, Any]]:
    """A line for each setting of the row that began in time."""
    lines = []
    for settings in row["bar_settings"]:
        deadline = min(time.monotonic() + options.limit_s, end)
        if time.monotonic() >= end:
            break
        found = pair.turn(with_settings(row, settings), pair.BAR, options, deadline)[pair.BAR]
        line = {"row": row["name"], "settings": settings, "devices": row["devices"], **found}
        print(json.dumps(line), file=sys.stderr, flush=True)
        if options.results:
            with options.results.open("a") as file:
                file.write(json.dumps(line) + "\n")
        lines.append(line)
    return lines


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""What the planner says of rows that throughput.py has measured, beside what was measured.

    python benchmarks/throughput.py --sweep benchmarks/sweeps/planner-1.json --results rows.jsonl
    megascale plan calibrate --output calibration.json
    python benchmarks/predicted.py rows.jsonl --gpu h100 --calibration calibration.json

Step times and memory from the table of devices, and, with a file, from the rates measured there.
The last line of stdout is one JSON object, the errors in per cent; exit status 2 if a row cannot be
predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.presets import PRESETS

from megascale_planner.prediction import predict_lines


def main(arguments: Sequence[str]) -> int:
    """Print a table and the object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="of throughput.py --results")
    parser.add_argument("--gpu", required=True, help="a100-80g, h100 or h200")
    parser.add_argument("--calibration", type=Path, help="of megascale plan calibrate")
    options = parser.parse_args(arguments)
    measured = [json.loads(line) for line in options.rows.read_text().splitlines() if line]
    measured = [row for row in measured if "step_time_s" in row]
    lines = [json.dumps(question(row, options.gpu)) for row in measured]
    answers = {"table": list(predict_lines(lines))}
    if options.calibration is not None:
        answers["calibration"] = list(predict_lines(lines, options.calibration.read_text()))
    refused = [answer for answer in answers["table"] if "refused" in answer]
    if refused:
        print(f"{refused[0]['id']}: {refused[0]['refused']}", file=sys.stderr)
        return 2
    rows = [
        compare(row, {name: found[index] for name, found in answers.items()})
        for index, row in enumerate(measured)
    ]
    for row in rows:
        print(json.dumps(row), file=sys.stderr)
    print(json.dumps({"rows": rows, "summary": summary(rows, list(answers))}))
    return 0


def question(row: dict[str, Any], gpu: str) -> dict[str, Any]:
    """A row of the planner, of the layout and sizes that were measured."""
    preset = PRESETS[row["preset"]]
    return {
        "id": row["name"],
        "gpu": gpu,
        "layers": row["layers"],
        "hidden": preset.hidden,
        "heads": preset.heads,
        "vocab": preset.vocabulary,
        "sequence": row["sequence_length"],
        "micro_batch": row["micro_batch_size"],
        "global_batch": row["global_batch_size"],
        "recompute": row["recompute"],
        "schedule": row.get("schedule", "1f1b"),  # older results have none
        "stage_layers": row.get("stage_layers", []),
        **{key: row[key] for key in ("tp", "pp", "vpp", "dp", "block", "window", "precision")},
    }


def compare(row: dict[str, Any], answers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One row: measured and predicted, errors in per cent of what was measured."""
    step_s, memory_gib = row["step_time_s"]["p50"], row["memory_gib"]
    found: dict[str, Any] = {
        "name": row["name"],
        "step_s": step_s,
        "spread": row["step_time_s"]["spread"],
        "memory_gib": memory_gib,
        "memory_error_percent": _error(answers["table"]["memory_gib"], memory_gib),
        "memory": answers["table"]["memory"],
        "terms": answers["table"]["terms"],
    }
    for name, answer in answers.items():
        found[f"{name}_error_percent"] = _error(answer["step_time_s"], step_s)
    return found


def summary(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """Mean and largest size of the errors."""
    found = {}
    for name in (*names, "memory"):
        sizes = [
            abs(row[f"{name}_error_percent"])
            for row in rows
            if row[f"{name}_error_percent"] is not None
        ]
        if sizes:
            found[f"{name}_mean"], found[f"{name}_worst"] = statistics.mean(sizes), max(sizes)
    return found


def _error(predicted: float, measured: float) -> float | None:
    return None if not measured else round(100 * (predicted / measured - 1), 2)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

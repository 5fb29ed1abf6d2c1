"""What the planner says of rows before they are measured: the rows of pair.py, ours alone.

    torchrun --nproc-per-node 2 -m megascale_trainer.commands.calibrate --output pair.json
    python benchmarks/predict_rows.py --gpu h200 --calibration pair.json --output predicted.jsonl

A line for each configuration of ours in each row: what the row's configuration is, the step time
with its interval, the terms and the memory, and which calibration it comes from. Rows that differ
only by their bar are predicted once; those of SwiGLU, of which no constant is fitted, are left out.
The last line of stdout is one JSON object, step times by name. Exit status: 0; 2 if a row cannot be
predicted or a file not be read.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.options import entry_of, to_arguments
from benchmarks.peers.pair import sweep
from benchmarks.predicted import question
from benchmarks.presets import job, sizes

from megascale_planner.prediction import predict_lines

ROWS = Path(__file__).with_name("peers") / "rows-4.json"
_STEPS = 10  # of a measurement, of which no figure here depends


def questions(rows: Sequence[Mapping[str, Any]], gpu: str) -> Iterator[dict[str, Any]]:
    """The planner's row of each configuration of ours, each once, by a name."""
    seen = set()
    for row in rows:
        shape = row["name"].partition(",")[0].partition(" with ")[0]
        for values in sweep(row, _STEPS):
            entry = entry_of(to_arguments(values))
            run = entry.run
            if run.mlp != "gelu":
                continue
            config = job(run, row["devices"], cuda=True)
            measured = {
                **sizes(config), "preset": run.preset, "recompute": run.recompute,
                "block": run.block, "window": run.window,
                "precision": config.training.precision,
                "name": f"{shape}, {config.training.precision}, {entry.name}",
            }  # fmt: skip
            if measured["name"] not in seen:
                seen.add(measured["name"])
                yield question(measured, gpu)


def main(arguments: Sequence[str]) -> int:
    """Predict and write; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=ROWS, help="of pair.py")
    parser.add_argument("--gpu", required=True, help="a100-80g, h100 or h200")
    parser.add_argument("--calibration", type=Path, help="of megascale plan calibrate")
    parser.add_argument("--output", type=Path, required=True, help="a JSON object a line")
    options = parser.parse_args(arguments)
    try:
        asked = list(questions(json.loads(options.rows.read_text()), options.gpu))
        text = options.calibration.read_text() if options.calibration else None
    except (OSError, ValueError, KeyError) as problem:
        print(f"predict_rows.py: {problem}", file=sys.stderr)
        return 2
    lines = [json.dumps(row) for row in asked]
    answers = list(predict_lines(lines, text) if text else predict_lines(lines))
    if refused := [answer for answer in answers if "refused" in answer]:
        print(f"{refused[0]['id']}: {refused[0]['refused']}", file=sys.stderr)
        return 2
    source = hashlib.sha256(text.encode()).hexdigest()[:16] if text else "table"
    with options.output.open("w") as file:
        for row, answer in zip(asked, answers, strict=True):
            found = {**answer, "row": row, "calibration": source}
            file.write(json.dumps(found) + "\n")
    times = {answer["id"]: round(answer["step_time_s"], 4) for answer in answers}
    print(json.dumps({"gpu": options.gpu, "calibration": source, "step_time_s": times}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""``python -m megascale_planner predict ROWS.jsonl``: one JSON line per row.

Exit status 0, even if rows are refused; 2 if the file cannot be read or the usage is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megascale_planner.prediction import predict_lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m megascale_planner")
    commands = parser.add_subparsers(dest="command", required=True)
    rows = commands.add_parser("predict", help="predict step time and memory of each row")
    rows.add_argument("rows", type=Path, metavar="ROWS.jsonl", help="one JSON object per line")
    rows.add_argument("--calibration", type=Path, help="a file of `megascale plan calibrate`")
    options = parser.parse_args(arguments)
    calibration: Path | None = options.calibration
    try:
        text = options.rows.read_text(encoding="utf-8")
        measured = None if calibration is None else calibration.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        print(f"{error}; give a readable file", file=sys.stderr)
        return 2
    for result in predict_lines(text.splitlines(), measured):
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Rows of configurations as JSON lines, and the predictions that stand beside them; pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from megascale_planner.calibration_file import BadCalibration
from megascale_planner.prediction import predict_one
from megascale_planner.workload import Refused, from_row


def predict_lines(lines: Iterable[str], calibration: str | None = None) -> Iterator[dict[str, Any]]:
    """One result for each line that is not blank, in order.

    A result has ``id`` (the row's, or its line number) and the prediction with the defaults that
    were taken in ``assumed``; or ``id`` and ``refused``, the reason. ``calibration`` is the text of
    a calibration file, whose rates replace the datasheet's.
    """
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield predict_line(line, number, calibration)


def predict_line(line: str, number: int, calibration: str | None) -> dict[str, Any]:
    """The result of one line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return {"id": number, "refused": f"line {number} is no JSON: {error}"}
    if not isinstance(row, dict):
        return {"id": number, "refused": f"line {number} is no JSON object"}
    name = row.get("id", number)
    try:
        workload, assumed = from_row(row)
        prediction = predict_one(workload, calibration)
    except (Refused, BadCalibration) as error:
        return {"id": name, "refused": str(error)}
    return {"id": name, **prediction, "assumed": assumed}

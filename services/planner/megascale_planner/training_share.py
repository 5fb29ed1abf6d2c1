"""The share of a device's rates that training reaches, from the step that a calibration measured.

The rates of a calibration are those of single operations. Its ``training`` is a row with the time
of a step of this project's trainer on that device, and the share is the one that predicts it.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from megascale_planner.calibration_file import BadCalibration
from megascale_planner.gpus import GPUS, Gpu
from megascale_planner.points import Points
from megascale_planner.step_time import step_time
from megascale_planner.systems import System
from megascale_planner.workload import Refused, from_row, point_of

MEASURED_SYSTEM = "ours"  # whose step `megascale plan calibrate` measures
_LEAST, _MOST = 0.05, 5.0
_HALVINGS = 40


def with_measured_share(system: System, gpu: Gpu, text: str) -> System:
    """``system`` with the share that predicts the step of the calibration ``text`` on ``gpu``.

    It is ``system`` itself if that is another's software, or if no step was measured.

    Raises:
        BadCalibration: the step cannot be read, or no share explains it.
    """
    found: Any = json.loads(text).get("training")
    if system.name != MEASURED_SYSTEM or found is None:
        return system
    if not isinstance(found, dict):
        raise BadCalibration("training: it is no object; measure again")
    seconds: Any = found.get("step_time_s")
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not number or not math.isfinite(seconds) or seconds <= 0:
        raise BadCalibration(f"training.step_time_s: {seconds!r} is no positive number")
    row = {key: value for key, value in found.items() if key != "step_time_s"}
    # Of a device that no table has, the row names another: only ``gpu`` itself is reckoned with.
    known = gpu.name if gpu.name in GPUS else next(iter(GPUS))
    try:
        workload, _ = from_row({**row, "gpu": known, "system": system.name})
    except Refused as error:
        raise BadCalibration(f"training.{error}") from None
    share = _share(point_of(workload), gpu, system, float(seconds))
    measured = f"the calibration's step of {seconds:.4g} s"
    sources = tuple(
        (name, measured if name == "kernel_share" else source) for name, source in system.sources
    )
    return replace(system, kernel_share=share, sources=sources)


def _share(points: Points, gpu: Gpu, system: System, seconds: float) -> float:
    """By halving: the larger the share, the shorter the step."""

    def predicted(share: float) -> float:
        return float(step_time(points, gpu, replace(system, kernel_share=share)).total)

    low, high = _LEAST, _MOST
    if not predicted(high) < seconds < predicted(low):
        raise BadCalibration(
            f"training.step_time_s: {seconds:g} s is out of reach of this calibration's rates; "
            "measure again on an idle machine"
        )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(middle) > seconds else (low, middle)
    return (low + high) / 2

"""Predictions of step time, both counts of MFU and memory, with an interval and the terms.

**Calibrations** have the rates of single operations, and in ``training`` a row with the step time
of this project's trainer on that device. :func:`with_measured_share` finds the share of the rates
with which the model predicts that step time.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from megascale_planner.devices import GPUS, BadCalibration, Gpu, calibrated, is_positive
from megascale_planner.memory import device_memory
from megascale_planner.step_time import EXPERT_TERMS, mean_keys, step_time
from megascale_planner.systems import SYSTEMS, System
from megascale_planner.workload import (
    Array,
    Points,
    Refused,
    Workload,
    from_row,
    point_of,
    where,
)

MEASURED_SYSTEM = "ours"  # the system whose step `megascale plan calibrate` measures
_LEAST, _MOST = 0.05, 5.0
_HALVINGS = 40


def with_measured_share(system: System, gpu: Gpu, text: str) -> System:
    """``system`` with the share that predicts the step of the calibration ``text`` on ``gpu``.

    Other systems are returned unchanged, and so is ``system`` if no step was measured.

    Raises:
        BadCalibration: the step is invalid, or no share predicts it.
    """
    found: Any = json.loads(text).get("training")
    if system.name != MEASURED_SYSTEM or found is None:
        return system
    if not isinstance(found, dict):
        raise BadCalibration("training: it is no object; measure again")
    seconds: Any = found.get("step_time_s")
    if not is_positive(seconds):
        raise BadCalibration(f"training.step_time_s: {seconds!r} is no positive number")
    row = {key: value for key, value in found.items() if key != "step_time_s"}
    # The table has no such device, so name any known one; only ``gpu`` is used.
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
    """Find the share by bisection: the larger the share, the shorter the step."""

    def predicted(share: float) -> float:
        return float(step_time(points, gpu, replace(system, kernel_share=share)).total)

    # Outside of this range the rates or the step were measured wrongly, as on a busy machine.
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


# Devices of the rows to which a system's constants were fitted. On other devices the interval is
# wider by this relative error, because the share of their rates is not known.
MEASURED_ON = {
    "megatron-lm-2021": ("a100-80g",),
    "megatron-lm-2023": ("a100-80g",),
    "megascale": ("a100-80g",),
    "megatron-core-2024": ("h100",),
    "megatron-moe-2026": ("h100", "h200"),
    "megascale-moe": ("h800",),
    "ours": ("h200",),
}
_ELSEWHERE_ERROR = 0.05
_UNKNOWN_ERROR = 0.44  # of a device known only by calibration; one half with a system's 0.06
_PIPELINE_ERROR = 0.5  # of the bubble: systems differ in how much interleaving saves


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions of n configurations (arrays [n]) or of one; ``terms`` in s, MFU of bf16 peak."""

    step_time_s: Array
    low_s: Array
    high_s: Array
    mfu_causal: Array
    mfu_full: Array
    memory_bytes: Array
    terms: dict[str, Array]
    memory: dict[str, Array]


def predict(points: Points, gpu: Gpu, system: System) -> Predictions:
    """Predict step time, MFU and memory of ``points`` on ``gpu`` under ``system``."""
    step, memory = step_time(points, gpu, system), device_memory(points, system)
    total = step.total
    elsewhere = _ELSEWHERE_ERROR if gpu.name in GPUS else _UNKNOWN_ERROR
    if gpu.name in MEASURED_ON[system.name]:
        elsewhere = 0.0
    width = (system.error + elsewhere) * total + _PIPELINE_ERROR * step.bubble
    if points.has_experts:
        width = width + where(points.experts > 0, system.experts_error, 0.0) * total
    tokens = points.global_batch * points.sequence
    causal, full = _flops_per_token(points)
    rate = tokens / total / (points.devices * gpu.peak_flops)
    return Predictions(
        step_time_s=total,
        low_s=total - width,
        high_s=total + width,
        mfu_causal=causal * rate,
        mfu_full=full * rate,
        memory_bytes=memory.total,
        terms={
            name: getattr(step, name)
            for name in step.__dataclass_fields__
            if points.has_experts or name not in EXPERT_TERMS
        },
        memory={name: getattr(memory, name) for name in memory.__dataclass_fields__},
    )


def _flops_per_token(points: Points) -> tuple[Array, Array]:
    """Causal and full count, like :mod:`megascale_job.sizes.flops` for one model."""
    gemm = 6 * points.active_weights
    per_key = 12 * points.layers * points.query_width
    return gemm + per_key * mean_keys(points), gemm + per_key * points.sequence


def predict_one(workload: Workload, calibration: str | None = None) -> dict[str, Any]:
    """The prediction of one configuration as plain values, with the keys of ``predict``'s lines.

    Raises:
        BadCalibration: ``calibration``, the text of a calibration file, is invalid.
    """
    gpu, system = GPUS[workload.gpu], SYSTEMS[workload.system]
    if calibration is not None:
        gpu, system = _measured(gpu, system, calibration)
    return plain(predict(point_of(workload), gpu, system))


@functools.lru_cache(maxsize=16)  # the rows of a file share a few devices and systems
def _measured(gpu: Gpu, system: System, calibration: str) -> tuple[Gpu, System]:
    measured = calibrated(gpu, calibration)
    return measured, with_measured_share(system, measured, calibration)


def plain(found: Predictions, index: int | None = None) -> dict[str, Any]:
    """The prediction at ``index``, or the only one, as plain values; times in seconds."""

    def at(values: Array) -> float:
        return float(values if index is None else values[index])

    return {
        "step_time_s": at(found.step_time_s),
        "mfu_causal": at(found.mfu_causal),
        "mfu_full": at(found.mfu_full),
        "memory_gib": at(found.memory_bytes) / 2**30,
        "low": at(found.low_s),
        "high": at(found.high_s),
        "terms": {name: at(term) for name, term in found.terms.items()},
        "memory": {name: at(part) / 2**30 for name, part in found.memory.items()},
    }


def predict_lines(lines: Iterable[str], calibration: str | None = None) -> Iterator[dict[str, Any]]:
    """One result per line that is not blank, in order.

    A result has ``id`` (the row's, or its line number), the prediction, and in ``assumed`` the
    defaults that were used; or only ``id`` and ``refused``, the reason. ``calibration``: the text
    of a calibration file, whose rates replace the datasheet's.
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

"""Predictions: step time, both counts of MFU, memory, an interval and the terms."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from megascale_planner.calibration_file import calibrated
from megascale_planner.device_memory import device_memory
from megascale_planner.gpus import GPUS, Gpu
from megascale_planner.points import Array, Points
from megascale_planner.step_time import mean_keys, step_time
from megascale_planner.systems import SYSTEMS, System
from megascale_planner.training_share import with_measured_share
from megascale_planner.workload import Workload, point_of

# The rows that a system's constants were fitted on ran on these devices; elsewhere the interval is
# this much wider, as its share of another device's rates is not known.
MEASURED_ON = {
    "megatron-lm-2021": ("a100-80g",),
    "megatron-lm-2023": ("a100-80g",),
    "megascale": ("a100-80g",),
    "megatron-core-2024": ("h100",),
    "ours": ("h200",),
}
_ELSEWHERE_ERROR = 0.05
_UNKNOWN_ERROR = 0.44  # with a system's 0.06 half: of a device that only a calibration describes
_PIPELINE_ERROR = 0.5  # of the bubble: how much interleaving spares differs between systems


@dataclass(frozen=True, slots=True)
class Predictions:
    """Of many configurations, arrays [n], or of one; ``terms`` in s, MFU over the bf16 peak."""

    step_time_s: Array
    low_s: Array
    high_s: Array
    mfu_causal: Array
    mfu_full: Array
    memory_bytes: Array
    terms: dict[str, Array]
    memory: dict[str, Array]


def predict(points: Points, gpu: Gpu, system: System) -> Predictions:
    """Everything about ``points`` on ``gpu`` under ``system``."""
    step, memory = step_time(points, gpu, system), device_memory(points, system)
    total = step.total
    elsewhere = _ELSEWHERE_ERROR if gpu.name in GPUS else _UNKNOWN_ERROR
    if gpu.name in MEASURED_ON[system.name]:
        elsewhere = 0.0
    width = (system.error + elsewhere) * total + _PIPELINE_ERROR * step.bubble
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
        terms={name: getattr(step, name) for name in step.__dataclass_fields__},
        memory={name: getattr(memory, name) for name in memory.__dataclass_fields__},
    )


def _flops_per_token(points: Points) -> tuple[Array, Array]:
    """Causal and full count, as :mod:`megascale_job.sizes.flops` has them for one model."""
    gemm = 6 * (points.layers * points.layer_weights + points.vocabulary * points.hidden)
    per_key = 12 * points.layers * points.hidden
    return gemm + per_key * mean_keys(points), gemm + per_key * points.sequence


def predict_one(workload: Workload, calibration: str | None = None) -> dict[str, Any]:
    """The prediction of one configuration as plain values: the keys of a line of ``predict``.

    Raises:
        BadCalibration: ``calibration``, the text of a calibration file, cannot be used.
    """
    gpu, system = GPUS[workload.gpu], SYSTEMS[workload.system]
    if calibration is not None:
        gpu, system = _measured(gpu, system, calibration)
    return plain(predict(point_of(workload), gpu, system))


@functools.lru_cache(maxsize=16)  # of one file: a device and a system, for all its rows
def _measured(gpu: Gpu, system: System, calibration: str) -> tuple[Gpu, System]:
    measured = calibrated(gpu, calibration)
    return measured, with_measured_share(system, measured, calibration)


def plain(found: Predictions, index: int | None = None) -> dict[str, Any]:
    """One of many predictions as plain values, or that of one configuration; times in seconds."""

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

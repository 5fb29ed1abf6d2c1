"""Predictions of step time, both counts of MFU and memory, with an interval and the terms.

**Memory** is that of the fullest rank: the first pipeline stage, which keeps the most
micro-batches. If stages have different numbers of layers, each part is that of the stage with the
most of it. Weights and states: 18 bytes per parameter, or 6 + 12 / dp with a sharded optimizer
(bf16 weights, float32 gradients, three float32 states). Activations: Korthikanti et al., arXiv
2205.05198, Table 2, equations 4 to 6; for this project's trainer what its operators keep
(:mod:`megascale_job.blocks`). A test compares the result with
:mod:`megascale_job.sizes.memory`, which counts one job exactly.

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

import numpy as np

from megascale_planner.devices import GPUS, BadCalibration, Gpu, calibrated, is_positive
from megascale_planner.step_time import EXPERT_TERMS, mean_keys, step_time
from megascale_planner.systems import SYSTEMS, System
from megascale_planner.workload import (
    FULL,
    NONE,
    Array,
    Points,
    Refused,
    Workload,
    from_row,
    point_of,
    where,
)

_WEIGHT_BYTES, _GRADIENT_BYTES, _STATE_BYTES = 2.0, 4.0, 12.0
_FP8_COPIES = 2.0  # per dense matrix, of one byte per value: as stored, and transposed
_PEER_SLOTS = 2.0  # buffers of hidden states, for overlapped tensor parallelism


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of the fullest rank, arrays [n]."""

    weights: Array
    optimizer: Array
    activations: Array
    buffers: Array

    @property
    def total(self) -> Array:
        """The sum, without the device context and the allocator's fragments."""
        return self.weights + self.optimizer + self.activations + self.buffers


def device_memory(points: Points, system: System) -> DeviceMemory:
    """Memory of each configuration under ``system``."""
    second = where((points.pp == 1) & (not system.tied), 1.0, 0.0)  # the head on the same rank
    parameters = points.stage_parameters + second * points.vocabulary * points.hidden / points.tp
    matrices = points.stage_weights() / points.tp
    shard = points.dp if system.sharded_optimizer else 1.0
    states = _STATE_BYTES * parameters / shard
    if points.has_experts:
        own = points.stage_expert_parameters
        parameters = parameters + own
        replicas = points.expert_replicas if system.sharded_optimizer else 1.0
        states = states + _STATE_BYTES * own / replicas
    kept, working = _kept_in_flight(points, system)
    tokens = points.micro_batch * points.sequence
    logits = where(points.pp == 1, tokens * points.vocabulary / points.tp, 0.0)
    head = logits * system.logit_bytes
    peer = where(points.tp > 1, _PEER_SLOTS * 2 * tokens * points.hidden, 0.0)
    return DeviceMemory(
        weights=(_WEIGHT_BYTES + _GRADIENT_BYTES) * parameters
        + points.fp8 * _FP8_COPIES * matrices,
        optimizer=states,
        activations=kept + working + head,
        buffers=peer if system.counted_kept else 0 * peer,
    )


def _kept_in_flight(points: Points, system: System) -> tuple[Array, Array]:
    """Bytes that the fullest stage keeps, and those of the layer that is being recomputed."""
    dense = _layer_bytes(points, system, points.recompute, experts=False)
    working = 0 * dense
    if np.any(full := points.recompute == FULL):
        working = where(full, _layer_bytes(points, system, working, experts=False), 0.0)
    alive = zip(points.stages, _in_flight(points), strict=True)
    if not points.has_experts:
        return _largest([layers * times * dense for (layers, _), times in alive]), working
    expert = _layer_bytes(points, system, points.recompute, experts=True)
    kept = [
        count * times * dense + (layers - count) * times * expert
        for (layers, count), times in alive
    ]
    if np.any(full):
        largest = _layer_bytes(points, system, 0 * dense, experts=True)
        working = np.maximum(working, where(full, largest, 0.0))
    return _largest(kept), working


def _largest(sizes: list[Array]) -> Array:
    first, middle, last = sizes
    most: Array = np.maximum(np.maximum(first, last), middle)
    return most


def _in_flight(points: Points) -> tuple[Array, Array, Array]:
    """Micro-batches that the first, the middle and the last stage keep at the same time.

    1F1B: p - stage micro-batches. Interleaved: the first stage keeps 1 + (p - 1) / (p v) times p
    (arXiv 2205.05198, 4.2.3), each later stage 2 / v fewer. The fullest middle stage counts as the
    second stage.
    """
    p, v = points.pp, points.vpp

    def in_flight(stage: Array) -> Array:
        times = where(v > 1, (p * v + p - 1 - 2 * stage) / v, p - stage)
        found: Array = np.minimum(times, points.micro_batches)
        return found

    return in_flight(0 * p), in_flight(1 + 0 * p), in_flight(p - 1)


def _layer_bytes(points: Points, system: System, recompute: Array, *, experts: bool) -> Array:
    """Bytes that one layer keeps per micro-batch, with even loads of experts."""
    tokens, hidden, tp = points.micro_batch * points.sequence, points.hidden, points.tp
    ffn = points.shared_ffn if experts else points.ffn
    if system.counted_kept:
        kept = _counted_kept(points, recompute, ffn)
    else:
        kept = _published_kept(points, system, recompute, ffn)
    if experts:
        kept = kept + _experts_kept(points, system, recompute)
    split = points.norm_split(system.sequence_parallel, system.selective_splits)
    full = 2 * hidden / split if not system.counted_kept else 2 * hidden / tp
    bytes_of_layer: Array = tokens * where(recompute == FULL, full, kept)
    return bytes_of_layer


def _experts_kept(points: Points, system: System, recompute: Array) -> Array:
    """Bytes per token of router and experts: normed tokens, logits in float32, rows.

    Of a token's rows their inputs and the results of the first product are kept; this project's
    trainer keeps nothing of the second one, and spreads the inputs again under selective recompute.
    """
    rows, results = points.top_k * points.hidden, points.top_k * 2 * points.expert_ffn
    if not system.counted_kept:
        return 2 * (rows + results + points.top_k * points.expert_ffn) / points.tp
    inputs = where(recompute == NONE, (2 - points.fp8) * rows, 0.0)
    # The dense formula has one gathered sequence per FFN, which experts do not have.
    ungathered = where(points.shared_ffn > 0, 0.0, (2 - points.fp8) * points.hidden)
    router = 2 * points.hidden + 4 * points.experts
    kept: Array = (router + inputs + 2 * results) / points.tp - ungathered
    return kept


def _published_kept(points: Points, system: System, recompute: Array, ffn: Array) -> Array:
    """Bytes per token: 18 h + 4 f, of which sequence parallelism splits 10 h; plus the scores."""
    hidden, tp = points.hidden, points.tp
    masks = 2.0 if system.dropout else 0.0  # one byte after attention, one after the FFN
    norm = where(points.parallel_block > 0, 2.0, 0.0)  # a parallel block has one norm less
    whole = (8 + masks - norm) * hidden
    keys_and_values = 4 * points.kv_width + 4 * points.query_width
    parallel = keys_and_values + (4 + 2 * points.swiglu) * ffn
    split = points.norm_split(system.sequence_parallel, system.selective_splits)
    kept = whole / split + parallel / tp
    width = where(points.window > 0, np.minimum(points.window, points.sequence), points.sequence)
    score = 5.0 if system.dropout else 2.0
    scores = 0.0 if system.flash else score * points.heads * width / tp
    total: Array = kept + where(recompute == NONE, scores, 0.0)
    return total


def _counted_kept(points: Points, recompute: Array, ffn: Array) -> Array:
    """Bytes per token of this project's fused operators (``layer_unit``): GEMM inputs and results.

    Norms and everything after the column-parallel GEMM are split over tp; gathered rows are not.
    """
    hidden, query, qkv = points.hidden, points.query_width, points.query_width + 2 * points.kv_width
    parallel = points.parallel_block > 0
    gathered = where(parallel, 1.0, 2.0) * hidden
    activation = (2 + points.swiglu) * ffn
    behind = qkv + activation + query  # results of the input GEMM, inputs of the output GEMM
    norms = where(parallel, 1.0, 2.0) * hidden
    heads = points.qk_norm * (query + points.kv_width)
    dropped = where(recompute == NONE, query + heads + where(parallel, qkv, 0.0), 0.0)
    saved = points.fp8 * (gathered + (query + ffn) / points.tp)  # one byte, not two
    kept: Array = 2 * (gathered + (norms + behind + dropped) / points.tp) - saved
    return kept


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

"""Memory of the fullest rank.

In a dense model it is a rank of the first pipeline stage, which keeps the most micro-batches; if
stages have different numbers of layers, each part is that of the stage with the most of it. With
experts it is a rank of the first, the fullest middle or the last stage, whichever needs most, since
first layers without experts are smaller. Even loads of experts are assumed.

Weights and states: 18 bytes per parameter, or 6 + 12 / dp with a sharded optimizer (bf16 weights,
float32 gradients, three float32 states). Experts are split over ep, and their states over the ranks
of a stage with the same experts. Activations: Korthikanti et al., arXiv 2205.05198, Table 2,
equations 4 to 6; for this project's trainer what its operators keep (:mod:`megascale_job.blocks`).
A test compares the result with :mod:`megascale_job.sizes.memory`, which counts one job exactly.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from megascale_planner.systems import System
from megascale_planner.workload import FULL, NONE, Array, Points, where

_WEIGHT_BYTES, _GRADIENT_BYTES, _STATE_BYTES = 2.0, 4.0, 12.0
_FP8_COPIES = 2.0  # per matrix, of one byte per value: as stored, and transposed
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
    dense = _dense(points, system)
    if not points.has_experts:
        return dense
    expert = _with_experts(points, system)
    parts = {
        part.name: where(points.experts > 0, getattr(expert, part.name), getattr(dense, part.name))
        for part in fields(DeviceMemory)
    }
    return DeviceMemory(**parts)


def _dense(points: Points, system: System) -> DeviceMemory:
    second = where((points.pp == 1) & (not system.tied), 1.0, 0.0)  # the head on the same rank
    parameters = points.stage_parameters + second * points.vocabulary * points.hidden / points.tp
    matrices = points.most_layers * points.layer_weights / points.tp
    shard = points.dp if system.sharded_optimizer else 1.0
    per_layer = _layer_bytes(points, system, points.recompute, experts=False)
    alive = [
        layers * times for (layers, _), times in zip(points.stages, _in_flight(points), strict=True)
    ]
    working = 0 * per_layer
    if np.any(full := points.recompute == FULL):
        working = where(full, _layer_bytes(points, system, working, experts=False), 0.0)
    return DeviceMemory(
        weights=(_WEIGHT_BYTES + _GRADIENT_BYTES) * parameters
        + points.fp8 * _FP8_COPIES * matrices,
        optimizer=_STATE_BYTES * parameters / shard,
        activations=_most(alive) * per_layer
        + working
        + where(points.pp == 1, _logit_bytes(points, system), 0.0),
        buffers=_peer_bytes(points, system),
    )


def _with_experts(points: Points, system: System) -> DeviceMemory:
    """Memory of the stage that needs most, of three."""
    alone, tied = points.pp == 1, system.tied
    embedding = points.vocabulary * points.hidden / points.tp
    tables = (
        where(alone & (not tied), 2.0, 1.0) * embedding,
        0 * embedding,
        where(alone, 0.0, 1.0) * embedding,  # a single stage is the first one
    )
    heads = (alone, False & alone, points.pp > 1)
    stages = [
        _stage(points, system, layers, dense, times, table, head)
        for (layers, dense), times, table, head in zip(
            points.stages, _in_flight(points), tables, heads, strict=True
        )
    ]
    fullest = np.argmax([stage.total for stage in stages], axis=0)
    parts = {
        part.name: np.choose(fullest, [getattr(stage, part.name) for stage in stages])
        for part in fields(DeviceMemory)
    }
    return DeviceMemory(**parts)


def _stage(
    points: Points,
    system: System,
    layers: Array,
    dense: Array,
    in_flight: Array,
    table: Array,
    head: Array,
) -> DeviceMemory:
    """Memory of a stage of ``layers``, of which ``dense`` have no experts."""
    expert = layers - dense
    matrices = dense * points.layer_weights + expert * points.shared_layer_weights
    parameters = (matrices + 13 * points.hidden * layers) / points.tp + table
    in_fp8 = dense * points.layer_weights + expert * points.projection_weights
    experts = expert * points.experts * points.expert_weights / points.ep
    shards = (points.dp, points.expert_replicas) if system.sharded_optimizer else (1.0, 1.0)
    each = {
        experts: _layer_bytes(points, system, points.recompute, experts=experts)
        for experts in (False, True)
    }
    working: Array = 0 * layers
    if np.any(full := points.recompute == FULL):
        whole = [
            where(count > 0, _layer_bytes(points, system, 0 * layers, experts=experts), 0.0)
            for experts, count in ((False, dense), (True, expert))
        ]
        working = where(full, np.maximum(*whole), 0.0)
    kept = in_flight * (dense * each[False] + expert * each[True])
    return DeviceMemory(
        weights=(_WEIGHT_BYTES + _GRADIENT_BYTES) * (parameters + experts)
        + points.fp8 * _FP8_COPIES * (in_fp8 / points.tp + experts),
        optimizer=_STATE_BYTES * (parameters / shards[0] + experts / shards[1]),
        activations=kept + working + where(head, _logit_bytes(points, system), 0.0),
        buffers=_peer_bytes(points, system),
    )


def _logit_bytes(points: Points, system: System) -> Array:
    tokens = points.micro_batch * points.sequence
    logits: Array = tokens * points.vocabulary / points.tp * system.logit_bytes
    return logits


def _peer_bytes(points: Points, system: System) -> Array:
    tokens = points.micro_batch * points.sequence
    peer = where(points.tp > 1, _PEER_SLOTS * 2 * tokens * points.hidden, 0.0)
    return peer if system.counted_kept else 0 * peer


def _most(sizes: list[Array]) -> Array:
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
        kept = _counted_kept(points, recompute, ffn, experts=experts)
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

    A token's rows keep their inputs and the results of the first product; this project's
    trainer keeps nothing of the second one, and spreads the inputs again under selective recompute.
    """
    rows, results = points.top_k * points.hidden, points.top_k * 2 * points.expert_ffn
    if not system.counted_kept:
        return 2 * (rows + results + points.top_k * points.expert_ffn) / points.tp
    inputs = where(recompute == NONE, (2 - points.fp8) * rows, 0.0)
    # The dense formula has one gathered sequence per FFN, which experts do not have.
    ungathered = where(points.shared_ffn > 0, 0.0, 2 * points.hidden)
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


def _counted_kept(points: Points, recompute: Array, ffn: Array, *, experts: bool) -> Array:
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
    # One byte instead of two; shared experts are not in FP8.
    in_fp8 = hidden + query / points.tp if experts else gathered + (query + ffn) / points.tp
    saved = points.fp8 * in_fp8
    kept: Array = 2 * (gathered + (norms + behind + dropped) / points.tp) - saved
    return kept

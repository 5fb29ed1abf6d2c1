"""What the fullest rank needs: the first pipeline stage, which keeps the most micro-batches.

Of stages with unlike numbers of layers each part is that of the stage with most of it.

Weights and states: 18 bytes a parameter, or 6 + 12 / dp where the optimizer is sharded (bf16
weights, float32 gradients, three float32 states). Activations: Korthikanti et al., arXiv
2205.05198, Table 2, equations 4 to 6; for this project's trainer what its operators keep
(:mod:`megascale_job.sizes.block`), and a test compares with
:mod:`megascale_job.sizes.memory`, which has the exact count of one job.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megascale_planner.points import FULL, NONE, Array, Points, where
from megascale_planner.systems import System

_WEIGHT_BYTES, _GRADIENT_BYTES, _STATE_BYTES = 2.0, 4.0, 12.0
_FP8_COPIES = 2.0  # of each matrix, one byte a value: as stored, and transposed
_PEER_SLOTS = 2.0  # of hidden states, for overlapped tensor parallelism


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of the fullest rank, arrays [n]."""

    weights: Array
    optimizer: Array
    activations: Array
    buffers: Array

    @property
    def total(self) -> Array:
        """All of them; the device context and the allocator's fragments are not counted."""
        return self.weights + self.optimizer + self.activations + self.buffers


def device_memory(points: Points, system: System) -> DeviceMemory:
    """Memory of every configuration under ``system``."""
    second = where((points.pp == 1) & (not system.tied), 1.0, 0.0)  # the head on the same rank
    parameters = points.stage_parameters + second * points.vocabulary * points.hidden / points.tp
    matrices = points.most_layers * points.layer_weights / points.tp
    shard = points.dp if system.sharded_optimizer else 1.0
    per_layer = _layer_bytes(points, system, points.recompute)
    alive = _alive_layers(points)
    working = 0 * alive
    if np.any(full := points.recompute == FULL):
        working = where(full, _layer_bytes(points, system, working), 0.0)
    tokens = points.micro_batch * points.sequence
    logits = where(points.pp == 1, tokens * points.vocabulary / points.tp, 0.0)
    head = logits * system.logit_bytes
    peer = where(points.tp > 1, _PEER_SLOTS * 2 * tokens * points.hidden, 0.0)
    return DeviceMemory(
        weights=(_WEIGHT_BYTES + _GRADIENT_BYTES) * parameters
        + points.fp8 * _FP8_COPIES * matrices,
        optimizer=_STATE_BYTES * parameters / shard,
        activations=alive * per_layer + working + head,
        buffers=peer if system.counted_kept else 0 * peer,
    )


def _alive_layers(points: Points) -> Array:
    """Layers times micro-batches that the fullest stage keeps at once.

    1F1B: p - stage micro-batches. Interleaved: the first stage 1 + (p - 1) / (p v) times p
    (arXiv 2205.05198, 4.2.3), each after it 2 / v fewer. The fullest of the middle counts as the
    second.
    """
    p, v = points.pp, points.vpp

    def alive(layers: Array, stage: Array) -> Array:
        in_flight = where(v > 1, (p * v + p - 1 - 2 * stage) / v, p - stage)
        kept: Array = layers * np.minimum(in_flight, points.micro_batches)
        return kept

    ends = np.maximum(alive(points.first_layers, 0 * p), alive(points.last_layers, p - 1))
    most: Array = np.maximum(ends, alive(points.middle_layers, 1 + 0 * p))
    return most


def _layer_bytes(points: Points, system: System, recompute: Array) -> Array:
    """What one layer keeps of one micro-batch."""
    tokens, hidden, tp = points.micro_batch * points.sequence, points.hidden, points.tp
    if system.counted_kept:
        kept = _counted_kept(points, recompute)
    else:
        kept = _published_kept(points, system, recompute)
    split = points.norm_split(system.sequence_parallel, system.selective_splits)
    full = 2 * hidden / split if not system.counted_kept else 2 * hidden / tp
    bytes_of_layer: Array = tokens * where(recompute == FULL, full, kept)
    return bytes_of_layer


def _published_kept(points: Points, system: System, recompute: Array) -> Array:
    """Bytes a token: 18 h + 4 f, of which 10 h are split by sequence parallelism; the scores."""
    hidden, tp = points.hidden, points.tp
    masks = 2.0 if system.dropout else 0.0  # one byte each, after attention and after the FFN
    norm = where(points.parallel_block > 0, 2.0, 0.0)  # one norm's input fewer
    whole = (8 + masks - norm) * hidden
    keys_and_values = 4 * points.kv_width + 4 * hidden
    parallel = keys_and_values + (4 + 2 * points.swiglu) * points.ffn
    split = points.norm_split(system.sequence_parallel, system.selective_splits)
    kept = whole / split + parallel / tp
    width = where(points.window > 0, np.minimum(points.window, points.sequence), points.sequence)
    score = 5.0 if system.dropout else 2.0
    scores = 0.0 if system.flash else score * points.heads * width / tp
    total: Array = kept + where(recompute == NONE, scores, 0.0)
    return total


def _counted_kept(points: Points, recompute: Array) -> Array:
    """Bytes a token of this project's fused operators (``layer_unit``): GEMMs' inputs and results.

    Norms and everything behind the column-parallel GEMM are split over tp, the gathered rows not.
    """
    hidden, qkv = points.hidden, points.hidden + 2 * points.kv_width
    parallel = points.parallel_block > 0
    gathered = where(parallel, 1.0, 2.0) * hidden
    activation = (2 + points.swiglu) * points.ffn
    behind = qkv + activation + hidden  # results of the inputs' GEMM, inputs of the outputs' GEMM
    norms = where(parallel, 1.0, 2.0) * hidden
    dropped = where(recompute == NONE, hidden + where(parallel, qkv, 0.0), 0.0)
    saved = points.fp8 * (gathered + (hidden + points.ffn) / points.tp)  # one byte, not two
    kept: Array = 2 * (gathered + (norms + behind + dropped) / points.tp) - saved
    return kept

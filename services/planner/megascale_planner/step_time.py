"""The time of a step by terms: t = (m + bubble slots) * t_micro_batch + terms per step.

Terms per micro-batch: GEMMs by shape, attention, elementwise kernels by their bytes, exposed
transfers of tensor and pipeline parallelism. Terms per step: exposed data-parallel transfers, the
optimizer, host work, and the slowest of N nodes. Formulas: Narayanan et al., arXiv 2104.04473
(FLOPs, schedule, bubble), Korthikanti et al., arXiv 2205.05198 (sequence parallelism,
recomputation).

A micro-batch takes as long as the slowest pipeline stage. A stage has its layers in all its chunks;
the first stage also has the embedding, and the last the head, which is always in bf16.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import numpy as np

from megascale_planner.devices import ATTENTION_HALF_LENGTH, Gpu
from megascale_planner.systems import System
from megascale_planner.workload import FULL, SELECTIVE, Array, Points, where

# A GEMM is cut into tiles of this width. The last tile of a dimension is half empty on average, and
# the pipeline of loads fills and drains once.
TILE = 128.0
FORWARD_SHARE = 1 / 3  # of forward and backward
FLASH_BACKWARD, PLAIN_BACKWARD = 2.5, 2.0
COLLECTIVE_LATENCY_S = 15e-6
OPTIMIZER_BYTES = 42.0  # AdamW: four states read, three written, gradient read thrice, weight
# Bytes per token and hidden value, on every rank of a tensor-parallel group: its row is read and
# written (4), its gradient is read and added to the row's in float32 (10).
EMBEDDING_BYTES = 14.0
CAST_BYTES = 4.0  # FP8: operands read in bf16, written twice; 27 of 1,123 ms at 175B (results)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step by term, arrays [n]; their sum is the step time."""

    gemm: Array
    attention: Array
    elementwise: Array
    recompute: Array
    tensor_parallel: Array
    pipeline_transfers: Array
    bubble: Array
    data_parallel: Array
    optimizer: Array
    host: Array
    straggler: Array

    @property
    def total(self) -> Array:
        """The step time."""
        terms = (getattr(self, name) for name in self.__dataclass_fields__)
        return functools.reduce(operator.add, terms)


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Seconds per micro-batch, both directions: one layer by term, the head, the embedding."""

    gemm: Array
    attention: Array
    elementwise: Array
    recompute: Array
    tensor_parallel: Array
    head: Array
    embedding: Array

    @property
    def layer(self) -> Array:
        """One layer."""
        computed = self.gemm + self.attention + self.elementwise + self.recompute
        return computed + self.tensor_parallel


@dataclass(frozen=True, slots=True)
class _Stage:
    """Layers of one or several pipeline stages; ``embedding`` and ``head`` are 1 if included."""

    layers: Array
    embedding: Array
    head: Array

    def seconds(self, units: UnitTimes) -> Array:
        """Seconds per micro-batch, over all its chunks."""
        ends = self.embedding * units.embedding + self.head * units.head
        return self.layers * units.layer + ends


def unit_times(points: Points, gpu: Gpu, system: System) -> UnitTimes:
    """The times of a layer and of both ends of the model, for each configuration."""
    gemm = _layer_gemm_s(points, gpu, system)
    attention, attention_back = _attention_s(points, gpu, system)
    elementwise = _elementwise_s(points, gpu, system)
    # Full recompute runs the whole forward again, selective recompute only the attention.
    again = where(
        points.recompute == FULL,
        gemm + attention + elementwise,
        where(points.recompute == SELECTIVE, attention, 0.0),
    )
    passes = where(points.recompute == FULL, 3.0, 2.0)
    looked_up = EMBEDDING_BYTES * points.micro_batch * points.sequence * points.hidden
    return UnitTimes(
        gemm=3 * gemm,
        attention=attention + attention_back,
        elementwise=3 * elementwise,
        recompute=again,
        tensor_parallel=passes * _tensor_parallel_s(points, gpu, system),
        head=3 * _gemm_s(points, gpu, system, points.vocabulary / points.tp, points.hidden),
        embedding=looked_up / (gpu.hbm_bytes_s * system.kernel_share),
    )


def step_time(points: Points, gpu: Gpu, system: System) -> StepTime:
    """The terms of a step, for each configuration on ``gpu`` under ``system``."""
    slots, units = points.micro_batches, unit_times(points, gpu, system)
    slow = _slowest_stage(points, units)
    others = _Stage(points.layers - slow.layers, 1 - slow.embedding, 1 - slow.head)
    between = _pipeline_s(points, gpu, system)
    # If interleaved, the first stage waits only for the other stages' forwards: it begins first and
    # ends last, and has enough backwards to do meanwhile.
    short = slow.embedding * (points.vpp > 1)
    interleaved = (1 - short * (1 - FORWARD_SHARE)) / points.vpp
    lost = system.lost_interleaving
    # Interleaving shortens the bubble by 1 / vpp, except for the share that the system loses.
    empty = (1 - lost) * interleaved + lost
    parameters = points.stage_parameters
    reduction = _data_parallel_s(points, parameters, gpu, system)
    optimizer = _optimizer_s(points, parameters, gpu, system)
    fixed = reduction + optimizer
    busy = slots * (slow.seconds(units) + between)
    # With split backwards an empty slot shrinks to forward + input gradient - weight gradient
    # (arXiv 2401.10241, section 2.3); the weight gradient is one of the three products.
    filled = points.zero_bubble * 2 / 3 * others.layers * units.gemm
    bubble = empty * (others.seconds(units) - filled)
    nodes = np.maximum(1.0, points.devices / gpu.devices_per_node)
    # The probability that at least one of the nodes is slow, times its cost.
    slowest = system.slowdown * (1 - (1 - system.slow_nodes) ** nodes)
    return StepTime(
        gemm=slots * (slow.layers * units.gemm + slow.head * units.head),
        attention=slots * slow.layers * units.attention,
        elementwise=slots * (slow.layers * units.elementwise + slow.embedding * units.embedding),
        recompute=slots * slow.layers * units.recompute,
        tensor_parallel=slots * slow.layers * units.tensor_parallel,
        pipeline_transfers=slots * between,
        bubble=bubble,
        data_parallel=reduction,
        optimizer=optimizer,
        host=system.fixed_s + 0 * slots,
        straggler=slowest * (busy + bubble + fixed),
    )


def _slowest_stage(points: Points, units: UnitTimes) -> _Stage:
    """The pipeline stage for which the others wait; a single stage has both ends."""
    first = points.first_layers * units.layer + units.embedding
    middle = points.middle_layers * units.layer
    last = points.last_layers * units.layer + units.head
    is_last = (points.pp == 1) | ((last >= first) & (last >= middle))
    is_first = (points.pp == 1) | ((first > last) & (first >= middle))
    at_start = where(is_first, points.first_layers, points.middle_layers)
    layers = where(is_last, points.last_layers, at_start)
    return _Stage(layers, where(is_first, 1.0, 0.0), where(is_last, 1.0, 0.0))


def _gemm_s(points: Points, gpu: Gpu, system: System, columns: Array, inner: Array) -> Array:
    """Seconds of the forward GEMM of a micro-batch's tokens with [inner, columns], in bf16."""
    tokens = points.micro_batch * points.sequence
    shape = tokens / (tokens + TILE) * columns / (columns + TILE) * inner / (inner + TILE)
    rate = gpu.peak_flops * gpu.gemm_share * system.kernel_share * shape
    seconds: Array = 2 * tokens * columns * inner / rate
    return seconds


def _layer_gemm_s(points: Points, gpu: Gpu, system: System) -> Array:
    hidden, tp = points.hidden, points.tp
    heads_in = (hidden + 2 * points.kv_width) / tp
    ffn_in, ffn_out = points.ffn * (1 + points.swiglu) / tp, points.ffn / tp
    apart = _gemm_s(points, gpu, system, heads_in, hidden)
    apart = apart + _gemm_s(points, gpu, system, hidden, hidden / tp)
    apart = apart + _gemm_s(points, gpu, system, ffn_in, hidden)
    apart = apart + _gemm_s(points, gpu, system, hidden, ffn_out)
    merged = _gemm_s(points, gpu, system, heads_in + ffn_in, hidden)
    merged = merged + _gemm_s(points, gpu, system, hidden, hidden / tp + ffn_out)
    seconds = where((points.parallel_block > 0) & system.merged, merged, apart)
    if not gpu.peak_fp8_flops:
        return seconds
    faster = gpu.peak_flops * gpu.gemm_share / (gpu.peak_fp8_flops * gpu.gemm_fp8_share)
    mean: Array = seconds * (1 + points.fp8 * (faster * system.fp8_sums - 1))
    return mean


def mean_keys(points: Points) -> Array:
    """Average number of keys that a query sees under the causal mask and window."""
    width = where(points.window > 0, np.minimum(points.window, points.sequence), points.sequence)
    keys: Array = width * (2 * points.sequence - width + 1) / (2 * points.sequence)
    return keys


def _attention_s(points: Points, gpu: Gpu, system: System) -> tuple[Array, Array]:
    """Seconds of one layer's attention: forward, backward.

    Without flash attention the scores go through memory.
    """
    tokens = points.micro_batch * points.sequence
    if system.flash:
        flops = 4 * tokens * mean_keys(points) * points.hidden / points.tp
        share = points.sequence / (points.sequence + ATTENTION_HALF_LENGTH)
        rate = gpu.peak_flops * gpu.attention_share * system.kernel_share * share
        return flops / rate, FLASH_BACKWARD * flops / rate
    flops = 4 * tokens * points.sequence * points.hidden / points.tp
    dense = gpu.peak_flops * gpu.gemm_share * system.kernel_share
    passes = 9.0 if system.dropout else 4.0  # bytes: softmax, then dropout
    scores = passes * points.heads * tokens * points.sequence / points.tp
    forward = flops / dense + scores / (gpu.hbm_bytes_s * system.kernel_share)
    return forward, PLAIN_BACKWARD * forward


def _elementwise_s(points: Points, gpu: Gpu, system: System) -> Array:
    """Seconds of the forward of a layer's norms, residuals, activation and copies of heads."""
    tokens, hidden, tp = points.micro_batch * points.sequence, points.hidden, points.tp
    addition = 7.0 if system.dropout else 6.0  # two read, one written, and the mask
    norms = where(points.parallel_block > 0, 4.0 + addition + 2, 2 * (4.0 + addition))
    split = points.norm_split(system.sequence_parallel, system.selective_splits)
    activation = (4 + 2 * points.swiglu) * points.ffn + 4 * (hidden + 2 * points.kv_width)
    moved = tokens * (norms * hidden / split + activation / tp)
    casts = points.fp8 * CAST_BYTES * tokens * (hidden + points.ffn / tp)
    seconds: Array = (moved + casts) / (gpu.hbm_bytes_s * system.kernel_share)
    return seconds


def _tensor_parallel_s(points: Points, gpu: Gpu, system: System) -> Array:
    """Exposed seconds of a layer's collectives in one direction.

    There are four passes, or two with a parallel block.
    """
    passes = where(points.parallel_block > 0, 2.0, 4.0)
    size = 2 * points.micro_batch * points.sequence * points.hidden * (points.tp - 1) / points.tp
    link = where(points.tp <= gpu.devices_per_node, gpu.node_bytes_s, gpu.network_bytes_s)
    whole = passes * (size / link + COLLECTIVE_LATENCY_S)
    return where(points.tp > 1, (1 - system.hidden_tp) * whole, 0.0)


def _pipeline_s(points: Points, gpu: Gpu, system: System) -> Array:
    """Exposed seconds of transfers between stages, per micro-batch: both directions, all chunks."""
    size = 2 * points.micro_batch * points.sequence * points.hidden / points.tp
    link = where(points.devices <= gpu.devices_per_node, gpu.node_bytes_s, gpu.network_bytes_s)
    whole = 2 * points.vpp * (size / link + COLLECTIVE_LATENCY_S)
    return where(points.pp > 1, (1 - system.hidden_pp) * whole, 0.0)


def _data_parallel_s(points: Points, parameters: Array, gpu: Gpu, system: System) -> Array:
    """Exposed seconds of the reduction of gradients and the all-gather of parameters."""
    moved = parameters * (system.gradient_bytes + system.gather_bytes)
    link = where(points.devices <= gpu.devices_per_node, gpu.node_bytes_s, gpu.network_bytes_s)
    exposed = 1 / (2 * points.vpp) if system.chunked_dp else 1 - system.hidden_dp
    seconds: Array = exposed * moved * (points.dp - 1) / points.dp / link
    return seconds


def _optimizer_s(points: Points, parameters: Array, gpu: Gpu, system: System) -> Array:
    shard = points.dp if system.sharded_optimizer else 1.0
    seconds: Array = OPTIMIZER_BYTES * parameters / shard / gpu.hbm_bytes_s
    return seconds

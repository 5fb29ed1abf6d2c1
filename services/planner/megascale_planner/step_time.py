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
from megascale_planner.experts import expert_times
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
    experts: Array
    router: Array
    permutation: Array
    dispatch: Array
    imbalance: Array

    @property
    def total(self) -> Array:
        """The step time."""
        terms = (getattr(self, name) for name in self.__dataclass_fields__)
        return functools.reduce(operator.add, terms)


# Terms that only layers with experts have.
EXPERT_TERMS = ("experts", "router", "permutation", "dispatch", "imbalance")


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Seconds of one layer per micro-batch, both directions, by term."""

    gemm: Array
    attention: Array
    elementwise: Array
    recompute: Array
    tensor_parallel: Array
    experts: Array | float = 0.0
    router: Array | float = 0.0
    permutation: Array | float = 0.0
    dispatch: Array | float = 0.0
    imbalance: Array | float = 0.0
    launches: Array | float = 0.0

    @property
    def total(self) -> Array:
        """All terms."""
        computed = self.gemm + self.attention + self.elementwise + self.recompute
        dense = computed + self.tensor_parallel
        moved = self.router + self.permutation + self.dispatch
        return dense + self.experts + moved + self.imbalance + self.launches


@dataclass(frozen=True, slots=True)
class UnitTimes:
    """Seconds per micro-batch, both directions: both kinds of layers, the head, the embedding.

    ``expert``: a layer with experts; in dense models the same as ``dense``.
    """

    dense: LayerTimes
    expert: LayerTimes
    head: Array
    embedding: Array

    @property
    def layer(self) -> Array:
        """One layer; in a model with experts one of those that have them."""
        return self.expert.total


@dataclass(frozen=True, slots=True)
class _Stage:
    """Layers of one or several pipeline stages, without experts and with (None: dense models).

    ``embedding`` and ``head`` are 1 if included.
    """

    dense: Array
    expert: Array | None
    embedding: Array
    head: Array

    def sum(self, units: UnitTimes, term: str) -> Array:
        """Seconds of a term of its layers per micro-batch, over all its chunks."""
        dense: Array = self.dense * getattr(units.dense, term)
        return dense if self.expert is None else dense + self.expert * getattr(units.expert, term)

    def seconds(self, units: UnitTimes) -> Array:
        """Seconds per micro-batch, over all its chunks."""
        ends = self.embedding * units.embedding + self.head * units.head
        return self.sum(units, "total") + ends


def unit_times(points: Points, gpu: Gpu, system: System) -> UnitTimes:
    """The times of a layer and of both ends of the model, for each configuration."""
    attention = _attention_s(points, gpu, system)
    dense = _dense_layer(points, gpu, system, attention)
    looked_up = EMBEDDING_BYTES * points.micro_batch * points.sequence * points.hidden
    return UnitTimes(
        dense=dense,
        expert=_expert_layer(points, gpu, system, attention) if points.has_experts else dense,
        head=3 * _gemm_s(points, gpu, system, points.vocabulary / points.tp, points.hidden),
        embedding=looked_up / (gpu.hbm_bytes_s * system.kernel_share),
    )


def _dense_layer(
    points: Points, gpu: Gpu, system: System, attention_s: tuple[Array, Array]
) -> LayerTimes:
    gemm = _layer_gemm_s(points, gpu, system, points.ffn)
    attention, attention_back = attention_s
    elementwise = _elementwise_s(points, gpu, system, points.ffn)
    # Full recompute runs the whole forward again, selective recompute only the attention.
    again = where(
        points.recompute == FULL,
        gemm + attention + elementwise,
        where(points.recompute == SELECTIVE, attention, 0.0),
    )
    passes = where(points.recompute == FULL, 3.0, 2.0)
    return LayerTimes(
        gemm=3 * gemm,
        attention=attention + attention_back,
        elementwise=3 * elementwise,
        recompute=again,
        tensor_parallel=passes * _tensor_parallel_s(points, gpu, system, ffn=True),
    )


def _expert_layer(
    points: Points, gpu: Gpu, system: System, attention_s: tuple[Array, Array]
) -> LayerTimes:
    """A layer with experts: attention, shared experts, router, experts.

    The rank with the most rows computes ``imbalance`` times as long as the mean, and the others of
    its group wait. Selective recompute also spreads the rows again and sends them there.
    """
    gemm = _layer_gemm_s(points, gpu, system, points.shared_ffn)
    attention, attention_back = attention_s
    elementwise = _elementwise_s(points, gpu, system, points.shared_ffn)
    own = expert_times(points, gpu, system)
    mean = 3 * (own.products + own.activation) + own.gradients
    forward = own.products + own.activation + own.router + own.permutation + own.dispatch
    there = (own.permutation + own.dispatch) / 2
    again = where(
        points.recompute == FULL,
        gemm + attention + elementwise + forward,
        where(points.recompute == SELECTIVE, attention + there, 0.0),
    )
    passes = where(points.recompute == FULL, 3.0, 2.0)
    return LayerTimes(
        gemm=3 * gemm,
        attention=attention + attention_back,
        elementwise=3 * (elementwise + own.activation),
        recompute=again,
        tensor_parallel=passes * _tensor_parallel_s(points, gpu, system, ffn=False),
        experts=3 * own.products + own.gradients,
        router=2 * own.router,
        permutation=2 * own.permutation,
        dispatch=2 * own.dispatch,
        imbalance=(points.imbalance - 1) * mean,
        launches=system.launch_s + 0 * gemm,
    )


def step_time(points: Points, gpu: Gpu, system: System) -> StepTime:
    """The terms of a step, for each configuration on ``gpu`` under ``system``."""
    slots, units = points.micro_batches, unit_times(points, gpu, system)
    slow = _slowest_stage(points, units)
    expert = None if slow.expert is None else points.expert_layers - slow.expert
    others = _Stage(points.dense_layers - slow.dense, expert, 1 - slow.embedding, 1 - slow.head)
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
    if slow.expert is not None:
        reduction = reduction + _expert_gradients_s(points, gpu, system)
        optimizer = optimizer + _expert_optimizer_s(points, gpu, system)
    fixed = reduction + optimizer
    busy = slots * (slow.seconds(units) + between)
    # With split backwards an empty slot shrinks to forward + input gradient - weight gradient
    # (arXiv 2401.10241, section 2.3); the weight gradient is one of the three products.
    filled = points.zero_bubble * 2 / 3 * others.dense * units.dense.gemm
    if others.expert is not None:
        products = units.expert.gemm + units.expert.experts
        filled = filled + points.zero_bubble * 2 / 3 * others.expert * products
    bubble = empty * (others.seconds(units) - filled)
    nodes = np.maximum(1.0, points.devices / gpu.devices_per_node)
    # The probability that at least one of the nodes is slow, times its cost.
    slowest = system.slowdown * (1 - (1 - system.slow_nodes) ** nodes)
    return StepTime(
        gemm=slots * (slow.sum(units, "gemm") + slow.head * units.head),
        attention=slots * slow.sum(units, "attention"),
        elementwise=slots * (slow.sum(units, "elementwise") + slow.embedding * units.embedding),
        recompute=slots * slow.sum(units, "recompute"),
        tensor_parallel=slots * slow.sum(units, "tensor_parallel"),
        pipeline_transfers=slots * between,
        bubble=bubble,
        data_parallel=reduction,
        optimizer=optimizer,
        host=system.fixed_s + slots * slow.sum(units, "launches"),
        straggler=slowest * (busy + bubble + fixed),
        **{name: slots * slow.sum(units, name) for name in EXPERT_TERMS},
    )


def _slowest_stage(points: Points, units: UnitTimes) -> _Stage:
    """The pipeline stage for which the others wait; a single stage has both ends."""
    has_experts = points.has_experts

    def seconds(layers: Array, dense: Array) -> Array:
        if not has_experts:
            return layers * units.layer
        return dense * units.dense.total + (layers - dense) * units.expert.total

    in_first, in_middle, in_last = (seconds(*stage) for stage in points.stages)
    first, middle, last = in_first + units.embedding, in_middle, in_last + units.head
    is_last = (points.pp == 1) | ((last >= first) & (last >= middle))
    is_first = (points.pp == 1) | ((first > last) & (first >= middle))

    def chosen(first: Array, middle: Array, last: Array) -> Array:
        return where(is_last, last, where(is_first, first, middle))

    layers = chosen(points.first_layers, points.middle_layers, points.last_layers)
    dense, expert = layers, None
    if has_experts:
        dense = chosen(points.first_dense, points.middle_dense, points.last_dense)
        expert = layers - dense
    return _Stage(dense, expert, where(is_first, 1.0, 0.0), where(is_last, 1.0, 0.0))


def _gemm_s(points: Points, gpu: Gpu, system: System, columns: Array, inner: Array) -> Array:
    """Seconds of the forward GEMM of a micro-batch's tokens with [inner, columns], in bf16."""
    tokens = points.micro_batch * points.sequence
    shape = tokens / (tokens + TILE) * columns / (columns + TILE) * inner / (inner + TILE)
    rate = gpu.peak_flops * gpu.gemm_share * system.kernel_share * shape
    seconds: Array = 2 * tokens * columns * inner / rate
    return seconds


def _layer_gemm_s(points: Points, gpu: Gpu, system: System, ffn: Array) -> Array:
    """Seconds of the forward of a layer's dense products; ``ffn``: the width of its FFN.

    Of projections with other weights than those of grouped-query attention the columns into
    attention change.
    """
    hidden, tp, query = points.hidden, points.tp, points.query_width
    heads_in = (points.projection_weights / hidden - query) / tp
    some = np.maximum(ffn, 1.0)  # without shared experts there is none
    ffn_in, ffn_out = some * (1 + points.swiglu) / tp, some / tp
    apart = _gemm_s(points, gpu, system, heads_in, hidden)
    apart = apart + _gemm_s(points, gpu, system, hidden, query / tp)
    apart = apart + where(ffn > 0, _gemm_s(points, gpu, system, ffn_in, hidden), 0.0)
    apart = apart + where(ffn > 0, _gemm_s(points, gpu, system, hidden, ffn_out), 0.0)
    merged = _gemm_s(points, gpu, system, heads_in + ffn_in, hidden)
    merged = merged + _gemm_s(points, gpu, system, hidden, query / tp + ffn_out)
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
        flops = 4 * tokens * mean_keys(points) * points.query_width / points.tp
        share = points.sequence / (points.sequence + ATTENTION_HALF_LENGTH)
        rate = gpu.peak_flops * gpu.attention_share * system.kernel_share * share
        return flops / rate, FLASH_BACKWARD * flops / rate
    flops = 4 * tokens * points.sequence * points.query_width / points.tp
    dense = gpu.peak_flops * gpu.gemm_share * system.kernel_share
    passes = 9.0 if system.dropout else 4.0  # bytes: softmax, then dropout
    scores = passes * points.heads * tokens * points.sequence / points.tp
    forward = flops / dense + scores / (gpu.hbm_bytes_s * system.kernel_share)
    return forward, PLAIN_BACKWARD * forward


def _elementwise_s(points: Points, gpu: Gpu, system: System, ffn: Array) -> Array:
    """Seconds of the forward of a layer's norms, residuals, activation and copies of heads.

    ``ffn``: the width of its FFN.
    """
    tokens, hidden, tp = points.micro_batch * points.sequence, points.hidden, points.tp
    addition = 7.0 if system.dropout else 6.0  # two read, one written, and the mask
    norms = where(points.parallel_block > 0, 4.0 + addition + 2, 2 * (4.0 + addition))
    split = points.norm_split(system.sequence_parallel, system.selective_splits)
    activation = (4 + 2 * points.swiglu) * ffn + 4 * (points.query_width + 2 * points.kv_width)
    moved = tokens * (norms * hidden / split + activation / tp)
    casts = points.fp8 * CAST_BYTES * tokens * (hidden + ffn / tp)
    seconds: Array = (moved + casts) / (gpu.hbm_bytes_s * system.kernel_share)
    return seconds


def _tensor_parallel_s(points: Points, gpu: Gpu, system: System, *, ffn: bool) -> Array:
    """Exposed seconds of a layer's collectives in one direction.

    There are four passes, or two with a parallel block. Experts (not ``ffn``) need none, and shared
    experts two.
    """
    if ffn:
        passes = where(points.parallel_block > 0, 2.0, 4.0)
    else:
        passes = where(points.shared_ffn > 0, 4.0, 2.0)
    if system.sequence_attention:
        moved = (2 + 2 * points.kv_heads / points.heads) / points.tp
        passes = passes - 2 + 2 * moved
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


def _expert_gradients_s(points: Points, gpu: Gpu, system: System) -> Array:
    """The same of experts, over the ranks of a stage that hold the same ones."""
    moved = points.stage_expert_parameters * (system.gradient_bytes + system.gather_bytes)
    link = where(points.devices <= gpu.devices_per_node, gpu.node_bytes_s, gpu.network_bytes_s)
    exposed = 1 / (2 * points.vpp) if system.chunked_dp else 1 - system.hidden_dp
    replicas = points.expert_replicas
    seconds: Array = exposed * moved * (replicas - 1) / replicas / link
    return seconds


def _expert_optimizer_s(points: Points, gpu: Gpu, system: System) -> Array:
    shard = points.expert_replicas if system.sharded_optimizer else 1.0
    seconds: Array = OPTIMIZER_BYTES * points.stage_expert_parameters / shard / gpu.hbm_bytes_s
    return seconds


def _optimizer_s(points: Points, parameters: Array, gpu: Gpu, system: System) -> Array:
    shard = points.dp if system.sharded_optimizer else 1.0
    seconds: Array = OPTIMIZER_BYTES * parameters / shard / gpu.hbm_bytes_s
    return seconds

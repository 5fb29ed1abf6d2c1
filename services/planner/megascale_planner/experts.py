"""The time of a layer's experts, for a rank with as many rows as the mean, by terms.

A token is multiplied by ``top_k`` experts: it becomes so many rows, which travel to the ranks of
``ep`` that hold the experts (dispatch), are spread there in the order of the experts, multiplied,
summed per token and sent back (combine). Rates: benchmarks/results, 2026-11-29, grouped GEMMs and
router on one H200. Every rank of tp routes its own part of the sequence, and experts are never cut
by tp.

Note [Copies of a token]. A token that chooses k of n equally likely ranks meets n (1 - (1 - 1/n)^k)
of them on average. There are two ways to send it: ``rows`` sends one copy per choice (all-to-all of
rows). ``tokens`` sends one per rank, and one per node over the network, from where NVLink takes
it on (DeepEP, HybridEP). Both links work at the same time, so the slower one counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megascale_planner.devices import Gpu
from megascale_planner.systems import System
from megascale_planner.workload import Array, Points, where

# In the place of TILE for grouped GEMMs: persistent kernels overlap the ends of tiles, so less is
# lost at them.
GROUPED_TILE = 32.0
# A layer's gradients are read and written in float32 per micro-batch, 8 bytes a weight, of which a
# part hides under the products.
EXPERT_GRADIENT_BYTES = 7.0
# The router per token and hidden value: three of its products read or write the token. Per token
# and expert: logits and their gradient in float32, written and read thrice.
ROUTER_BYTES, LOGIT_BYTES = 6.0, 24.0
ROUTER_LATENCY_S = 60e-6  # the plan of the rows: a sort, in a CUDA graph
ROW_BYTES = 2.0  # of a value, in bf16
EXPERT_ACTIVATION_BYTES = 6.0  # per value of an expert's width, forward: two read, one written
_PASSES = 2  # of a forward: there and back; a backward has as many


@dataclass(frozen=True, slots=True)
class ExpertTimes:
    """Seconds of the forward of a layer's experts per micro-batch, and the gradients' additions.

    ``dispatch`` is what is exposed of both ways, there and back; ``activation`` is elementwise.
    """

    products: Array
    gradients: Array
    activation: Array
    router: Array
    permutation: Array
    dispatch: Array


def expert_times(points: Points, gpu: Gpu, system: System) -> ExpertTimes:
    """The times of the experts of one layer; those of dense configurations are meaningless."""
    tokens = points.micro_batch * points.sequence / points.tp
    rows, hidden, width = tokens * points.top_k, points.hidden, points.expert_ffn
    copies_s = gpu.hbm_bytes_s * system.kernel_share
    products = _grouped_s(points, gpu, system, rows, 2 * width, hidden)
    products = products + _grouped_s(points, gpu, system, rows, hidden, width)
    local = points.experts / points.ep
    # Quantized on the way and in the activation, which costs nothing; for the weight gradients all
    # four operands are transposed: a byte read and one written.
    casts = points.fp8 * 2 * (2 * hidden + 3 * width) / 3
    moved = ROW_BYTES * hidden * (points.top_k + 1)  # a token read, its rows written; or back
    routed = ROUTER_BYTES * hidden + LOGIT_BYTES * points.experts
    return ExpertTimes(
        products=products,
        gradients=EXPERT_GRADIENT_BYTES * local * points.expert_weights / copies_s,
        activation=rows * (EXPERT_ACTIVATION_BYTES * width + casts) / copies_s,
        router=system.row_moves * (tokens * routed / copies_s + ROUTER_LATENCY_S) / 2,
        permutation=system.row_moves * _PASSES * tokens * moved / copies_s,
        dispatch=_PASSES * (1 - system.hidden_ep) * _exchange_s(points, gpu, system, tokens),
    )


def _grouped_s(
    points: Points, gpu: Gpu, system: System, rows: Array, columns: Array, inner: Array
) -> Array:
    """Seconds of a grouped forward GEMM of ``rows`` with [inner, columns] of their experts."""
    each = rows * points.ep / points.experts
    shape = each / (each + GROUPED_TILE) * columns / (columns + GROUPED_TILE)
    shape = shape * inner / (inner + GROUPED_TILE)
    rate = gpu.peak_flops * gpu.gemm_share * system.kernel_share * shape
    seconds: Array = 2 * rows * columns * inner / rate
    if not gpu.peak_fp8_flops:
        return seconds
    faster = gpu.peak_flops * gpu.gemm_share / (gpu.peak_fp8_flops * gpu.gemm_fp8_share)
    mean: Array = seconds * (1 + points.fp8 * (faster * system.expert_sums - 1))
    return mean


def _exchange_s(points: Points, gpu: Gpu, system: System, tokens: Array) -> Array:
    """Seconds of one way of a micro-batch's tokens between the ranks of ep."""
    inside, between = copies(points, gpu, system)
    size = ROW_BYTES * tokens * points.hidden
    seconds: Array = np.maximum(
        inside * size / gpu.node_bytes_s, between * size / gpu.network_bytes_s
    )
    return where(points.ep > 1, seconds + system.exchange_latency_s, 0.0)


def copies(points: Points, gpu: Gpu, system: System) -> tuple[Array, Array]:
    """Copies of a token that a rank sends over NVLink, and over the network, on average."""
    ep, k = points.ep, points.top_k
    nodes = np.maximum(1.0, ep / gpu.devices_per_node)
    there, beyond = (ep - 1) / ep, (nodes - 1) / nodes
    if system.dispatch == "tokens":
        return _met(ep * points.reach, k) * there, _met(nodes * points.reach, k) * beyond
    return k * (there - beyond), k * beyond


def _met(places: Array, choices: Array) -> Array:
    """Places that so many choices meet on average; see Note [Copies of a token]."""
    places = np.maximum(1.0, places)
    met: Array = places * (1 - (1 - 1 / places) ** choices)
    return met

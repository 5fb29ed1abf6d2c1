"""The router in Triton: :mod:`megascale_kernels.router`, one launch forward and one backward.

A program has a few tokens of one sequence with all their experts in registers. Choosing is a loop
of ``top_k`` maxima: for eight of 128 experts that is cheaper than a sort, and ties go to the lower
index by construction. Sums per sequence are written per program and added up in order afterwards:
no atomics, so they repeat bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megascale_kernels import router as plain
from megascale_kernels.router import (
    LOWEST,
    SMALLEST_SUM,
    Route,
    RouterSettings,
    Routing,
    RoutingGradients,
)
from megascale_kernels.torch_calls import apply

_VALUES = 2048  # of a program's tile; a warp holds 512


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, sequences: int, settings: RouterSettings
) -> Routing:
    """Fused :func:`megascale_kernels.router.route`."""
    return Routing(*apply(Route, logits, bias, sequences, settings, choose, gradient))


def choose(
    logits: torch.Tensor, bias: torch.Tensor | None, sequences: int, settings: RouterSettings
) -> Routing:
    """Fused :func:`megascale_kernels.router.choose`.

    Groups of experts that are not powers of two are chosen by the plain function.
    """
    tokens, experts = logits.shape
    block = triton.next_power_of_2(experts)
    if settings.groups > 1 and (block != experts or settings.groups & (settings.groups - 1)):
        return plain.choose(logits, bias, sequences, settings)
    length = tokens // sequences
    rows = _rows(block, length)
    programs = triton.cdiv(length, rows)
    chosen = torch.empty((tokens, settings.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty(chosen.shape, dtype=torch.float32, device=logits.device)
    score_sums = logits.new_empty((programs, sequences, experts))
    z_sums = logits.new_empty((programs, sequences))
    _router_kernel[(programs, sequences)](
        logits=logits,
        bias=bias,
        chosen=chosen,
        weights=weights,
        score_sums=score_sums,
        z_sums=z_sums,
        length=length,
        sequences=sequences,
        experts=experts,
        scale=settings.scale,
        LOWEST=LOWEST,
        SMALLEST_SUM=SMALLEST_SUM,
        SIGMOID=settings.score == "sigmoid",
        NORMALISE=settings.normalise,
        TOP_K=settings.top_k,
        GROUPS=settings.groups,
        GROUPS_KEPT=settings.groups_kept,
        ROWS=rows,
        BLOCK=block,
        num_warps=_warps(rows * block),
    )
    return Routing(chosen, weights, score_sums.sum(0), z_sums.sum(0))


def gradient(
    gradients: RoutingGradients,
    logits: torch.Tensor,
    chosen: torch.Tensor,
    settings: RouterSettings,
) -> torch.Tensor:
    """Fused :func:`megascale_kernels.router.gradient`."""
    tokens, experts = logits.shape
    sequences = gradients.z_sums.numel()
    block = triton.next_power_of_2(experts)
    length = tokens // sequences
    rows = _rows(block, length)
    d_logits = torch.empty_like(logits)
    _router_gradient_kernel[(triton.cdiv(length, rows), sequences)](
        logits=logits,
        chosen=chosen,
        d_weights=gradients.weights.contiguous(),
        d_score_sums=gradients.score_sums.contiguous(),
        d_z_sums=gradients.z_sums.contiguous(),
        d_logits=d_logits,
        length=length,
        sequences=sequences,
        experts=experts,
        scale=settings.scale,
        SMALLEST_SUM=SMALLEST_SUM,
        SIGMOID=settings.score == "sigmoid",
        NORMALISE=settings.normalise,
        TOP_K=settings.top_k,
        ROWS=rows,
        BLOCK=block,
        num_warps=_warps(rows * block),
    )
    return d_logits


def _rows(block: int, length: int) -> int:
    most: int = triton.next_power_of_2(length)
    return max(1, min(_VALUES // block, most))


def _warps(values: int) -> int:
    return min(8, max(1, values // 512))


@triton.jit
def _score_of(
    logits: tl.tensor, lse: tl.tensor, inside: tl.tensor, SIGMOID: tl.constexpr
) -> tl.tensor:
    """Scores [ROWS, BLOCK] of logits; 0 outside of the experts."""
    value = 1.0 / (1.0 + tl.exp(-logits)) if SIGMOID else tl.exp(logits - lse[:, None])
    return tl.where(inside[None, :], value, 0.0)


@triton.jit
def _log_sum(logits: tl.tensor) -> tl.tensor:
    """logsumexp of each row; padding holds minus infinity."""
    largest = tl.max(logits, axis=1)
    return largest + tl.log(tl.sum(tl.exp(logits - largest[:, None]), axis=1))


@triton.jit
def _router_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    score_sums: tl.tensor,
    z_sums: tl.tensor,
    length: tl.tensor,
    sequences: tl.tensor,
    experts: tl.tensor,
    scale: tl.tensor,
    LOWEST: tl.constexpr,
    SMALLEST_SUM: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """ROWS tokens of one sequence: their experts, weights, and sums of scores and of z."""
    sequence = tl.program_id(1)
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = place < length
    token = place.to(tl.int64) * sequences + sequence
    expert = tl.arange(0, BLOCK)
    inside = expert < experts
    value = tl.load(
        logits + token[:, None] * experts + expert[None, :],
        mask=real[:, None] & inside[None, :],
        other=0.0,
    )
    value = tl.where(inside[None, :], value, float("-inf"))
    lse = _log_sum(value)
    scores = _score_of(value, lse, inside, SIGMOID)

    key = scores
    if bias is not None:
        key += tl.load(bias + expert, mask=inside, other=0.0)[None, :]
    key = tl.where(key >= LOWEST, key, LOWEST)  # a comparison with NaN is false
    key = tl.where(inside[None, :], key, float("-inf"))
    if GROUPS > 1:
        WIDTH: tl.constexpr = BLOCK // GROUPS
        grouped = tl.reshape(key, [ROWS, GROUPS, WIDTH])
        best = tl.max(grouped, axis=2)
        if WIDTH > 1:
            first = tl.argmax(grouped, axis=2)
            within = tl.arange(0, WIDTH)[None, None, :]
            others = tl.where(within == first[:, :, None], float("-inf"), grouped)
            best += tl.max(others, axis=2)
        group = tl.arange(0, GROUPS)[None, :]
        kept = tl.zeros([ROWS, GROUPS], dtype=tl.int32)
        for _ in tl.static_range(GROUPS_KEPT):
            winner = tl.argmax(best, axis=1)[:, None] == group
            kept = tl.where(winner, 1, kept)
            best = tl.where(winner, float("-inf"), best)
        grouped = tl.where(kept[:, :, None] == 1, grouped, float("-inf"))
        key = tl.reshape(grouped, [ROWS, BLOCK])

    # The number of the choice that took each expert; TOP_K: not chosen.
    taken = tl.full([ROWS, BLOCK], TOP_K, dtype=tl.int32)
    for choice in tl.static_range(TOP_K):
        own = tl.argmax(key, axis=1)[:, None] == expert[None, :]
        taken = tl.where(own, choice, taken)
        key = tl.where(own, float("-inf"), key)
    factor = tl.zeros([ROWS], dtype=tl.float32) + scale
    if NORMALISE:
        factor /= tl.sum(tl.where(taken < TOP_K, scores, 0.0), axis=1) + SMALLEST_SUM
    for choice in tl.static_range(TOP_K):
        own = taken == choice
        winner = tl.sum(tl.where(own, expert[None, :], 0), axis=1)
        weight = tl.sum(tl.where(own, scores, 0.0), axis=1) * factor
        tl.store(chosen + token * TOP_K + choice, winner, mask=real)
        tl.store(weights + token * TOP_K + choice, weight, mask=real)

    if SIGMOID:
        scores /= tl.sum(scores, axis=1)[:, None]
    scores = tl.where(real[:, None], scores, 0.0)
    row = tl.program_id(0) * sequences + sequence
    tl.store(score_sums + row * experts + expert, tl.sum(scores, axis=0), mask=inside)
    tl.store(z_sums + row, tl.sum(tl.where(real, lse * lse, 0.0), axis=0))


@triton.jit
def _router_gradient_kernel(
    logits: tl.tensor,
    chosen: tl.tensor,
    d_weights: tl.tensor,
    d_score_sums: tl.tensor,
    d_z_sums: tl.tensor,
    d_logits: tl.tensor,
    length: tl.tensor,
    sequences: tl.tensor,
    experts: tl.tensor,
    scale: tl.tensor,
    SMALLEST_SUM: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """ROWS tokens of one sequence: the gradient of their logits; scores are computed again."""
    sequence = tl.program_id(1)
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = place < length
    token = place.to(tl.int64) * sequences + sequence
    expert = tl.arange(0, BLOCK)
    inside = expert < experts
    at = token[:, None] * experts + expert[None, :]
    mask = real[:, None] & inside[None, :]
    value = tl.where(inside[None, :], tl.load(logits + at, mask=mask, other=0.0), float("-inf"))
    lse = _log_sum(value)
    scores = _score_of(value, lse, inside, SIGMOID)

    # The chosen scores, scattered; and the gradient of their weights.
    picked = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    incoming = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        index = tl.load(chosen + token * TOP_K + choice, mask=real, other=0)
        own = index[:, None] == expert[None, :]
        gradient = tl.load(d_weights + token * TOP_K + choice, mask=real, other=0.0) * scale
        incoming = tl.where(own, gradient[:, None], incoming)
        picked = tl.where(own, 1.0, picked)
    if NORMALISE:
        total = tl.sum(scores * picked, axis=1) + SMALLEST_SUM
        mean = tl.sum(incoming * scores, axis=1) / total
        incoming = picked * (incoming - mean[:, None]) / total[:, None]

    balance = tl.load(d_score_sums + sequence * experts + expert, mask=inside, other=0.0)[None, :]
    if SIGMOID:
        whole = tl.sum(scores, axis=1)[:, None]
        mean = tl.sum(balance * scores, axis=1)[:, None] / whole
        incoming += (balance - mean) / whole
        result = incoming * scores * (1.0 - scores)
        share = tl.exp(value - lse[:, None])
    else:
        incoming += balance
        result = scores * (incoming - tl.sum(incoming * scores, axis=1)[:, None])
        share = scores
    result += tl.load(d_z_sums + sequence) * 2.0 * lse[:, None] * share
    tl.store(d_logits + at, result, mask=mask)

"""The router of a mixture of experts: the experts of each token, and their weights.

    scores = softmax(logits) or sigmoid(logits)
    chosen = the top_k experts by scores + bias, the lower index first where they are equal
    weight = scale * scores[chosen], divided by their sum if ``normalise``

``bias`` balances the load without a loss (DeepSeek-V3, arXiv 2412.19437, section 2.1.2): it decides
which experts are chosen, but not their weights. With ``groups``, a token first chooses the
``groups_kept`` groups of experts whose two best experts have the largest sum (same section).

Two sums per sequence feed the auxiliary losses, which are one line each in their caller:

    balance  score_sums: the scores of each expert, normalised to sum to 1 for each token
             (Switch Transformer, arXiv 2101.03961, equation 4)
    z-loss   z_sums: logsumexp(logits)^2 (ST-MoE, arXiv 2202.08906, equation 5)

Everything is float32, whatever the dtype of the hidden states is. :func:`route` is the operator
with its gradient; :func:`choose` and :func:`gradient` are its two halves. A logit that is not a
number counts as the lowest score, so that chosen experts always exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from megascale_kernels.torch_calls import apply

Score = Literal["softmax", "sigmoid"]

LOWEST = -3.0e38  # the key of a score that is not a number: above that of experts already chosen
SMALLEST_SUM = 1e-20  # keeps weights finite where all chosen scores underflow


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The choice of experts and their weights.

    Args:
        top_k: experts per token.
        score: how logits become scores.
        normalise: weights of a token sum to ``scale``.
        scale: factor of all weights.
        groups: equal groups of consecutive experts; 1: no groups.
        groups_kept: groups that a token may choose from.
    """

    top_k: int
    score: Score = "softmax"
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1


@dataclass(frozen=True, slots=True)
class Routing:
    """The decision for each token.

    Args:
        chosen: int32 [tokens, top_k], different experts, best first.
        weights: float32 [tokens, top_k].
        score_sums: float32 [sequences, experts], of normalised scores.
        z_sums: float32 [sequences], of logsumexp(logits)^2.
    """

    chosen: torch.Tensor
    weights: torch.Tensor
    score_sums: torch.Tensor
    z_sums: torch.Tensor


@dataclass(frozen=True, slots=True)
class RoutingGradients:
    """Gradients of the differentiable fields of a :class:`Routing`."""

    weights: torch.Tensor
    score_sums: torch.Tensor
    z_sums: torch.Tensor


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, sequences: int, settings: RouterSettings
) -> Routing:
    """The routing of ``logits``, with gradients to them.

    Args:
        logits: float32 [tokens, experts]; token t belongs to sequence t % ``sequences``, as in
            hidden states [S, B, H].
        bias: float32 [experts], added to the scores for the choice alone; None: 0.
        sequences: B.
        settings: how to choose.
    """
    found = apply(Route, logits, bias, sequences, settings, choose, gradient)
    return Routing(*found)


def by_turn(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """Logits for which token t chooses the ``top_k`` experts from t * top_k on, for benchmarks.

    The gradient passes through as it is.
    """
    forced: torch.Tensor = apply(_ByTurn, logits, top_k)
    return forced


def choices_per_sequence(chosen: torch.Tensor, sequences: int, experts: int) -> torch.Tensor:
    """int32 [sequences, experts]: how many tokens of each sequence chose each expert.

    Args:
        chosen: int32 [tokens, top_k]; token t belongs to sequence t % ``sequences``.
    """
    # Sorted and not counted by atomics, which deterministic mode refuses on a GPU.
    sequence = torch.arange(chosen.shape[0], dtype=torch.int32, device=chosen.device) % sequences
    key = (chosen + sequence.unsqueeze(1) * experts).flatten().sort().values
    bounds = torch.arange(sequences * experts + 1, dtype=torch.int32, device=chosen.device)
    return torch.searchsorted(key, bounds, out_int32=True).diff().view(sequences, experts)


def choose(
    logits: torch.Tensor, bias: torch.Tensor | None, sequences: int, settings: RouterSettings
) -> Routing:
    """:func:`route` without gradients."""
    scores = _scores(logits, settings.score)
    key = scores if bias is None else scores + bias
    key = torch.where(key.isnan(), LOWEST, key)
    if settings.groups > 1:
        key = _within_groups(key, settings)
    chosen = key.sort(dim=-1, descending=True, stable=True).indices[:, : settings.top_k]
    z = logits.logsumexp(-1).square()
    return Routing(
        chosen.to(torch.int32),
        _weights(scores, chosen, settings),
        _per_sequence(_normalised(scores, settings.score), sequences),
        _per_sequence(z, sequences),
    )


def gradient(
    gradients: RoutingGradients,
    logits: torch.Tensor,
    chosen: torch.Tensor,
    settings: RouterSettings,
) -> torch.Tensor:
    """The gradient of the logits, [tokens, experts], for the choice that was made."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        scores = _scores(leaf, settings.score)
        weights = _weights(scores, chosen.long(), settings)
        sequences = gradients.z_sums.numel()
        score_sums = _per_sequence(_normalised(scores, settings.score), sequences)
        z_sums = _per_sequence(leaf.logsumexp(-1).square(), sequences)
    (found,) = torch.autograd.grad(
        (weights, score_sums, z_sums),
        leaf,
        (gradients.weights, gradients.score_sums, gradients.z_sums),
    )
    return found


class _ByTurn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, top_k: int) -> torch.Tensor:
        tokens, experts = logits.shape
        first = torch.arange(tokens, device=logits.device).unsqueeze(1) * top_k
        turn = (torch.arange(experts, device=logits.device) - first) % experts
        return (turn < top_k).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Route(torch.autograd.Function):
    """Logits to the fields of a :class:`Routing`; keeps the logits and the choice."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        sequences: int,
        settings: RouterSettings,
        choose: Any,
        gradient: Any,
    ) -> tuple[torch.Tensor, ...]:
        found: Routing = choose(logits, bias, sequences, settings)
        ctx.save_for_backward(logits, found.chosen)
        ctx.settings = settings
        ctx.gradient = gradient
        ctx.mark_non_differentiable(found.chosen)
        return found.chosen, found.weights, found.score_sums, found.z_sums

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, chosen = ctx.saved_tensors
        found = ctx.gradient(RoutingGradients(*gradients[1:]), logits, chosen, ctx.settings)
        return found, None, None, None, None, None


def _scores(logits: torch.Tensor, score: Score) -> torch.Tensor:
    return logits.softmax(-1) if score == "softmax" else logits.sigmoid()


def _weights(scores: torch.Tensor, chosen: torch.Tensor, settings: RouterSettings) -> torch.Tensor:
    own = scores.gather(1, chosen)
    if settings.normalise:
        own = own / (own.sum(-1, keepdim=True) + SMALLEST_SUM)
    return own * settings.scale


def _normalised(scores: torch.Tensor, score: Score) -> torch.Tensor:
    """Scores that sum to 1 for each token."""
    return scores if score == "softmax" else scores / scores.sum(-1, keepdim=True)


def _per_sequence(values: torch.Tensor, sequences: int) -> torch.Tensor:
    """Sums [sequences, ...] of ``values`` [tokens, ...]."""
    return values.view(-1, sequences, *values.shape[1:]).sum(0)


def _within_groups(key: torch.Tensor, settings: RouterSettings) -> torch.Tensor:
    """``key``, with minus infinity outside of each token's groups."""
    grouped = key.view(key.shape[0], settings.groups, -1)
    best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : settings.groups_kept]
    inside = torch.zeros_like(best, dtype=torch.bool).scatter_(1, kept, True)
    return grouped.masked_fill(~inside.unsqueeze(-1), -torch.inf).flatten(1)

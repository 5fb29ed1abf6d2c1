"""A mixture of experts as a sub-block: y = x + Experts(norm(x)) + Shared(norm(x)).

A router gives each token ``top_k`` experts and their weights (:mod:`megascale_kernels.router`);
shared experts are an ordinary SwiGLU that every token passes.

Note [Losses of the router]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
The objective of a step is a sum over tokens, divided by the weight of the global batch at its end.
So the auxiliary losses, which are means over a sequence, are weighted by the sequence's loss weight
w: the division then makes them means over the batch, exact for any layout. For E experts, top-k K
and a sequence of S tokens with scores p that sum to 1 for each token:

    balance   coefficient * w * sum_i f_i P_i      P_i = mean of p_i over the sequence
              f_i = E / (K S) * choices of expert i: 1 where the load is even
    z-loss    coefficient * w * mean of log(Z)^2

``sequence_balance`` counts the choices of the same sequence (DeepSeek-V3, arXiv 2412.19437,
equations 17 to 20). ``global_balance`` takes f of the global batch *of the step before*, from
``router.load``: a sum over all replicas and micro-batches is known only after the step, and this
way it costs no communication and has the same value for any layout.

A term's gradient enters where its layer ends, whatever stage the layer is on: the node
:class:`_Auxiliary` gives the term the gradient 1.

Note [Load as a gradient]
~~~~~~~~~~~~~~~~~~~~~~~~~
The number of choices of each expert is a sum over micro-batches and ranks, like a gradient. So the
counts are added to the ``main_grad`` of ``router.load`` and ``router.bias``, and are summed with
the gradients; :mod:`megascale_trainer.optimizer.router_state` turns the sums into the new values.
float32 counts exactly up to 2^24 choices of one expert in a step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from megascale_job.config import ModelConfig
from megascale_kernels.expert_rows import row_plan
from megascale_kernels.router import RouterSettings, Routing, choices_per_sequence
from megascale_kernels.torch_calls import apply
from megascale_trainer.model.blocks.parts import (
    Context,
    Input,
    MoeContext,
    Stream,
    inner,
    normalise,
)
from megascale_trainer.model.sharding import LayerSharding
from megascale_trainer.weights import Weights


def moe_block(
    stream: Stream,
    context: Context[Input],
    weights: Weights,
    model: ModelConfig,
    sharding: LayerSharding[Input],
) -> Stream:
    """Every rank routes the tokens of its own part of the sequence."""
    moe = context.moe
    assert moe is not None, "the stage of a model with experts makes this context"
    x, normed = normalise(stream, weights, "ffn_norm", model, moe.operators)
    tokens = normed.flatten(0, 1)
    routing = _route(tokens, normed.shape[1], weights, model, moe)
    plan = row_plan(routing.chosen, model.experts.count)
    update = moe.experts.experts(
        tokens,
        routing,
        plan,
        weights["experts_in.weight"],
        weights["experts_out.weight"],
        keep_rows=not context.recompute_inner,
    ).view_as(normed)
    terms = stream.terms
    if torch.is_grad_enabled():
        losses = _losses(routing, weights, model, moe)
        states = [weights[name] for name in ("router.load", "router.bias") if name in weights]
        update = apply(
            _Auxiliary,
            update,
            losses.sum(),
            plan.groups.offsets.diff(),
            [w.main_grad for w in states],
        )
        found = losses.detach().double()
        terms = found if terms is None else terms + found
    if model.experts.shared_ffn_size:
        update = update + _shared(normed, context, weights, model, moe)
    return Stream(x, update, (), terms)


def router_settings(model: ModelConfig) -> RouterSettings:
    """The router of a model, as the kernels take it."""
    experts = model.experts
    return RouterSettings(
        experts.top_k,
        experts.score,
        experts.normalise,
        experts.scale,
        experts.groups,
        experts.groups_kept,
    )


def _route(
    tokens: torch.Tensor, sequences: int, weights: Weights, model: ModelConfig, moe: MoeContext
) -> Routing:
    return moe.experts.route(
        tokens,
        weights["router.weight"],
        weights["router.bias"].value.detach() if "router.bias" in weights else None,
        sequences,
        router_settings(model),
        by_turn=moe.forced_balance,
    )


def _losses(
    routing: Routing, weights: Weights, model: ModelConfig, moe: MoeContext
) -> torch.Tensor:
    """float32 [2], differentiable: this rank's sums of AUXILIARY_TERMS.

    See Note [Losses of the router].
    """
    loss, experts, length = moe.loss, model.experts, model.sequence_length
    mean = moe.sequence_weights / length  # of a sum over the sequence, times its weight
    slopes = torch.zeros_like(routing.score_sums)
    if loss.sequence_balance:
        counts = choices_per_sequence(routing.chosen, len(mean), experts.count)
        counts = moe.experts.sum_over_sequence(counts).float()
        slopes = slopes + counts * (loss.sequence_balance * experts.count / experts.top_k / length)
    if loss.global_balance:
        load = weights["router.load"].value.detach()
        total = load.sum()
        shares = torch.where(total > 0, load * (experts.count / total), 1.0)
        slopes = slopes + shares * loss.global_balance
    balance = (mean.unsqueeze(1) * slopes * routing.score_sums).sum()
    return torch.stack((balance, loss.router_z_loss * (mean * routing.z_sums).sum()))


def _shared(
    normed: torch.Tensor,
    context: Context[Input],
    weights: Weights,
    model: ModelConfig,
    moe: MoeContext,
) -> torch.Tensor:
    inputs = moe.sharding.column_parallel(normed, weights["shared_in.weight"])
    activate = partial(moe.operators.activate, bias=None, activation=model.mlp)
    expanded = inner(activate, inputs, context)
    return moe.sharding.row_parallel(expanded, weights["shared_out.weight"])


class _Auxiliary(torch.autograd.Function):
    """The identity; its backward gives ``objective`` the gradient 1 and counts the choices."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        objective: torch.Tensor,
        counts: torch.Tensor,
        gradients: list[torch.Tensor],
    ) -> torch.Tensor:
        ctx.counts = counts
        ctx.gradients = gradients
        ctx.one = torch.ones_like(objective)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, d_hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        for gradient in ctx.gradients:
            gradient.add_(ctx.counts)
        return d_hidden, ctx.one, None, None

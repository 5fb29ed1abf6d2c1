"""Attention as a sub-block: y = x + Attention(norm(x))."""

from __future__ import annotations

from functools import partial

from megascale_job.config import ModelConfig
from megascale_kernels.block_inner import AttentionContext
from megascale_kernels.rotary import HeadNorms, Heads
from megascale_trainer.model.blocks.parts import (
    Context,
    Input,
    Stream,
    biases,
    projections,
)
from megascale_trainer.model.sharding import LayerSharding
from megascale_trainer.weights import Weights


def attention_block(
    stream: Stream,
    context: Context[Input],
    weights: Weights,
    model: ModelConfig,
    sharding: LayerSharding[Input],
) -> Stream:
    """Grouped-query attention over the whole sequence, for this rank's heads."""
    core = partial(
        context.operators.block_inner,
        context=attention_context(context, weights, model, sharding),
        activation=None,
    )
    x, y = projections(stream, "attention_", core, context, weights, model, sharding)
    return Stream(x, y, biases(weights, "attention_out"), stream.terms)


def attention_context(
    context: Context[Input], weights: Weights, model: ModelConfig, sharding: LayerSharding[Input]
) -> AttentionContext:
    """The attention of a layer, for this rank's heads."""
    tp = sharding.size
    heads = Heads(model.heads // tp, model.key_value_heads // tp, model.head_size)
    norms = None
    if model.qk_norm:
        query, key = weights["q_norm.weight"], weights["k_norm.weight"]
        norms = HeadNorms(query, key, model.norm_epsilon, model.qk_norm_over)
    return AttentionContext(heads, context.rotary, context.mask, norms, context.attend)

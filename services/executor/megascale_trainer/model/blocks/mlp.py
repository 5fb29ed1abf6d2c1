"""The dense feed-forward sub-block: y = x + MLP(norm(x))."""

from __future__ import annotations

from functools import partial

from megascale_job.config import ModelConfig
from megascale_trainer.model.blocks.parts import (
    Context,
    Input,
    Stream,
    biases,
    projections,
)
from megascale_trainer.model.sharding import LayerSharding
from megascale_trainer.weights import Weights


def mlp_block(
    stream: Stream,
    context: Context[Input],
    weights: Weights,
    model: ModelConfig,
    sharding: LayerSharding[Input],
) -> Stream:
    """Column-parallel in, activation, row-parallel out."""
    core = partial(context.operators.activate, activation=model.mlp)
    x, y = projections(stream, "ffn_", core, context, weights, model, sharding)
    return Stream(x, y, biases(weights, "ffn_out"), stream.terms)

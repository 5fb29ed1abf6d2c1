"""The dense feed-forward sub-block: y = x + MLP(norm(x))."""

from __future__ import annotations

from functools import partial

from megascale_job.config import ModelConfig
from megascale_trainer.model.blocks.parts import (
    Context,
    Input,
    Stream,
    biases,
    inner,
    normalise,
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
    operators = context.operators
    x, normed = normalise(stream, weights, "ffn_norm", model, operators)
    inputs = sharding.column_parallel(normed, weights["ffn_in.weight"])
    activate = partial(operators.activate, bias=weights.get("ffn_in.bias"), activation=model.mlp)
    expanded = sharding.row_parallel(inner(activate, inputs, context), weights["ffn_out.weight"])
    return Stream(x, expanded, biases(weights, "ffn_out"), stream.terms)

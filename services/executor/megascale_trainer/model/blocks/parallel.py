"""The parallel block (MegaScale section 3.1): y = x + Attention(norm(x)) + MLP(norm(x)).

One norm, one merged input GEMM and one merged output GEMM. The operator that reads a GEMM's result
adds the GEMM's bias.
"""

from __future__ import annotations

from functools import partial

from megascale_job.config import ModelConfig
from megascale_trainer.model.blocks.attention import attention_context
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


def parallel_block(
    stream: Stream,
    context: Context[Input],
    weights: Weights,
    model: ModelConfig,
    sharding: LayerSharding[Input],
) -> Stream:
    """Attention and feed-forward as columns of one matrix."""
    operators = context.operators
    x, normed = normalise(stream, weights, "norm", model, operators)
    inputs = sharding.column_parallel(normed, weights["in.weight"])
    core = partial(
        operators.block_inner,
        bias=weights.get("in.bias"),
        context=attention_context(context, weights, model, sharding),
        activation=model.mlp,
    )
    joined = sharding.row_parallel(inner(core, inputs, context), weights["out.weight"])
    return Stream(x, joined, biases(weights, "attention_out", "ffn_out"), stream.terms)

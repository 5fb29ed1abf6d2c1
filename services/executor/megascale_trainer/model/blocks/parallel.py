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
    projections,
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
    core = partial(
        context.operators.block_inner,
        context=attention_context(context, weights, model, sharding),
        activation=model.mlp,
    )
    x, y = projections(stream, "", core, context, weights, model, sharding)
    return Stream(x, y, biases(weights, "attention_out", "ffn_out"), stream.terms)

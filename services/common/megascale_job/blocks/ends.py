"""The model's two ends: the embedding before the layers, the final norm and head after them."""

from __future__ import annotations

from dataclasses import replace

from megascale_job.blocks.parts import (
    Extent,
    Kept,
    LogicalParameter,
    Operator,
    Tensor,
    Unit,
    norm,
)
from megascale_job.config import ModelConfig


def embedding_unit(model: ModelConfig) -> Unit:
    """Token embedding, split over tp by rows, and learned positions, which are not split."""
    std, hidden = model.initializer_std, model.hidden_size
    tokens = LogicalParameter("embedding", Extent(model.vocab_size, "padded"), "normal", std)
    tables = [Tensor("embedding", "weight", (tokens,), (hidden,), tied=model.tie_embeddings)]
    if model.positions == "learned":
        rows = Extent(model.sequence_length, "whole")
        positions = LogicalParameter("positions", rows, "normal", std)
        tables.append(Tensor("positions", "weight", (positions,), (hidden,)))
    return (Operator(tuple(tables)),)


def head_unit(model: ModelConfig) -> Unit:
    """Final norm and vocabulary head.

    The gradient of the logits replaces them; torch's own operators also keep a float32
    intermediate. The input of the final norm is not counted, because it is small compared with the
    logits. With ``loss.chunk_rows`` this is what one chunk keeps, and only until the next one.
    """
    vocabulary = Extent(model.vocab_size, "padded")
    name = "embedding" if model.tie_embeddings else "head"
    weight = LogicalParameter(name, vocabulary, "normal", model.initializer_std)
    head = Operator(
        (Tensor("head", "weight", (weight,), (model.hidden_size,), tied=model.tie_embeddings),),
        keeps=(
            Kept(Extent(model.hidden_size, "whole")),
            Kept(vocabulary),
            Kept(vocabulary, torch_only=True, float32=True),
        ),
        gemm=True,
    )
    return (replace(norm(model, "final_norm"), keeps=()), head)


def chunked_head_keeps(model: ModelConfig) -> tuple[Kept, ...]:
    """Tensors that a head in chunks keeps besides its chunk: the normed tokens, their gradient."""
    tokens = Kept(Extent(model.hidden_size, "even"))
    return tokens, tokens

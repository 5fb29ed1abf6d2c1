"""Grouped-query attention: its projections, the norms of its heads, and what it keeps."""

from __future__ import annotations

from megascale_job.blocks.parts import (
    Extent,
    Kept,
    LogicalParameter,
    Operator,
    Tensor,
    Unit,
    norm,
    normal,
    projections,
)
from megascale_job.config import ModelConfig


def attention_block(model: ModelConfig) -> Unit:
    """Norm, projection to q, k and v, attention, output projection."""
    keeps = (Kept(query(model), recomputed=True), *normed_heads(model))
    inner = Operator(head_norms(model), keeps, attention_width=query(model).size)
    return (
        norm(model, "attention_norm"),
        *projections(model, "attention_", heads(model), inner, (attention_out(model),)),
    )


def query(model: ModelConfig) -> Extent:
    """The columns of all query heads."""
    return Extent(model.heads * model.head_size, "even")


def heads(model: ModelConfig) -> tuple[LogicalParameter, ...]:
    """The projections to q, k and v."""
    key_value = Extent(model.key_value_heads * model.head_size, "even")
    names = (("q", query(model)), ("k", key_value), ("v", key_value))
    return tuple(normal(model, name, rows) for name, rows in names)


def attention_out(model: ModelConfig) -> LogicalParameter:
    """The output projection."""
    return normal(model, "attention_out", query(model), out=True)


def head_norms(model: ModelConfig) -> tuple[Tensor, ...]:
    """Norms of q and of k: over each head, with one weight for all heads, or over all columns."""
    if not model.qk_norm:
        return ()
    return tuple(_norm_of(model, part) for part in heads(model)[:2])


def _norm_of(model: ModelConfig, part: LogicalParameter) -> Tensor:
    over_heads = model.qk_norm_over == "heads"
    size = Extent(model.head_size, "whole") if over_heads else part.rows
    name = f"{part.name}_norm"
    return Tensor(name, "weight", (LogicalParameter(name, size, "ones"),))


def normed_heads(model: ModelConfig) -> tuple[Kept, ...]:
    """Tensors that the norms of q and k keep."""
    if not model.qk_norm:
        return ()
    normed = heads(model)[:2]
    keeps = [Kept(part.rows, recomputed=True) for part in normed]
    if model.qk_norm_over == "projection":  # a norm of rows, as those of hidden states
        keeps += [
            Kept(part.rows, recomputed=True, torch_only=True, float32=True) for part in normed
        ]
    return tuple(keeps)

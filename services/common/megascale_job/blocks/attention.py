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
    """Norms of every head of q and of k, one weight for all heads."""
    if not model.qk_norm:
        return ()
    size = Extent(model.head_size, "whole")
    return tuple(
        Tensor(name, "weight", (LogicalParameter(name, size, "ones"),))
        for name in ("q_norm", "k_norm")
    )


def normed_heads(model: ModelConfig) -> tuple[Kept, ...]:
    """What the norms of heads keep."""
    if not model.qk_norm:
        return ()
    return tuple(Kept(part.rows, recomputed=True) for part in heads(model)[:2])

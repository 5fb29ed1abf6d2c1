"""The first stage's input: token embedding split over tp by rows, and learned positions if any."""

from __future__ import annotations

from typing import Any

import torch

from megascale_job.config import ModelConfig
from megascale_trainer.batch import MicroBatch
from megascale_trainer.model.sharding import EmbeddingSharding
from megascale_trainer.weights import Weight, Weights


def embed(
    batch: MicroBatch, weights: Weights, model: ModelConfig, sharding: EmbeddingSharding
) -> torch.Tensor:
    """Hidden states [S / tp, B, H] of a micro-batch [B, S], in the dtype of the weights."""
    table = weights["embedding.weight"]
    local = batch.tokens.t() - sharding.index * table.value.shape[0]
    hidden = sharding.reduce_scatter_sequence(_lookup(local, table))
    if model.positions == "learned":
        position = sharding.sequence_part(batch.position.t())
        hidden = hidden + _lookup(position, weights["positions.weight"])
    return hidden


def _lookup(index: torch.Tensor, table: Weight) -> torch.Tensor:
    """Rows of ``table``; zeros where ``index`` [S, B] lies outside it (another rank's rows)."""
    rows: torch.Tensor = _Lookup.apply(index, table.value, table.main_grad)  # type: ignore[no-untyped-call]
    return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, index: torch.Tensor, table: torch.Tensor, main_grad: torch.Tensor
    ) -> torch.Tensor:
        rows = table.shape[0]
        outside = (index < 0) | (index >= rows)
        # Not clamped to one row: backward adds what falls into one row one after the other, and
        # that would be all tokens of other ranks.
        inside = index.remainder(rows)
        ctx.save_for_backward(inside, outside)
        ctx.main_grad = main_grad
        return table[inside].masked_fill_(outside[..., None], 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        inside, outside = ctx.saved_tensors
        rows = gradient.masked_fill(outside[..., None], 0.0).to(ctx.main_grad.dtype)
        # On CUDA index_put sorts the indices, so the sum has one order; atomics would sum in
        # another order each run.
        ctx.main_grad.index_put_((inside,), rows, accumulate=True)
        return None, None, None

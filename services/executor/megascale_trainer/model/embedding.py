"""The first stage's input: a token embedding whose rows are cut over tp, and learned positions
where asked for.
"""

from __future__ import annotations

from typing import Any

import torch

from megascale_common.job.config import ModelConfig
from megascale_trainer.batch import MicroBatch
from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.tensor.sequence import reduce_scatter_sequence, sequence_part
from megascale_trainer.weights import Weight, Weights


def embed(batch: MicroBatch, weights: Weights, model: ModelConfig, tp: Group) -> torch.Tensor:
    """Hidden states [S / tp, B, H] of a micro-batch [B, S], in the dtype of the weights."""
    table = weights["embedding.weight"]
    local = batch.tokens.t() - tp.index * table.value.shape[0]
    hidden = reduce_scatter_sequence(_lookup(local, table), tp)
    if model.positions == "learned":
        hidden = hidden + _lookup(
            sequence_part(batch.position.t(), tp), weights["positions.weight"]
        )
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
        # Not clamped: backward adds up what lands in one row one by one, and that would be all
        # tokens of other ranks.
        inside = index.remainder(rows)
        ctx.save_for_backward(inside, outside)
        ctx.main_grad = main_grad
        return table[inside].masked_fill_(outside[..., None], 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        inside, outside = ctx.saved_tensors
        rows = gradient.masked_fill(outside[..., None], 0.0).to(ctx.main_grad.dtype)
        # index_put sorts the indices on CUDA: the sum has one order, where atomics would give a new
        # one each run
        ctx.main_grad.index_put_((inside,), rows, accumulate=True)
        return None, None, None

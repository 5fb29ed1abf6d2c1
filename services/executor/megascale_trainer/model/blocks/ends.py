"""The model's two ends: the first stage's embedding, the last stage's head and loss.

The token embedding is split over tp by rows; learned positions are added if the model has them. The
head comes after the final norm and is vocabulary-parallel; the loss is weighted.
"""

from __future__ import annotations

from typing import Any

import torch

from megascale_job.config import JobConfig, ModelConfig
from megascale_kernels.operators import Operators
from megascale_kernels.torch_calls import apply
from megascale_trainer.batch import MicroBatch
from megascale_trainer.model.blocks.loss import HeadLoss
from megascale_trainer.model.blocks.parts import Stream, normalise
from megascale_trainer.model.sharding import EmbeddingSharding, HeadSharding
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
    """Rows of ``table``; zeros for an ``index`` [S, B] outside of it (another rank's rows)."""
    rows: torch.Tensor = apply(_Lookup, index, table.value, table.main_grad)
    return rows


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, index: torch.Tensor, table: torch.Tensor, main_grad: torch.Tensor
    ) -> torch.Tensor:
        rows = table.shape[0]
        outside = (index < 0) | (index >= rows)
        # Not clamped to one row: backward adds the gradients of one row one after the other, and
        # a clamp would send the tokens of all other ranks to the same row.
        inside = index.remainder(rows)
        ctx.save_for_backward(inside, outside)
        ctx.main_grad = main_grad
        return table[inside].masked_fill_(outside[..., None], 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        inside, outside = ctx.saved_tensors
        rows = gradient.masked_fill(outside[..., None], 0.0).to(ctx.main_grad.dtype)
        # On CUDA index_put sorts the indices, so the sum has one order; atomics would add in
        # another order in every run.
        ctx.main_grad.index_put_((inside,), rows, accumulate=True)
        return None, None, None


def logits_of(
    hidden: torch.Tensor,
    weights: Weights,
    config: JobConfig,
    sharding: HeadSharding,
    operators: Operators,
) -> torch.Tensor:
    """[S, B, V / tp] from hidden states [S / tp, B, H]; V includes the vocabulary's padding."""
    _, normed = normalise(Stream(hidden), weights, "final_norm", config.model, operators)
    return sharding.column_parallel(normed, weights["head.weight"])


def loss_sums(
    hidden: torch.Tensor,
    batch: MicroBatch,
    weights: Weights,
    config: JobConfig,
    sharding: HeadSharding,
    operators: Operators,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The objective of a micro-batch and the figures to report, both as *sums* over tokens.

    The weight of the global batch is known only at the end of the step, so the division by it comes
    there. This makes replicas and micro-batches of unequal weight exact. With
    ``loss.chunk_rows`` the head's weight gradient is added here, not in backward: Note [Loss in
    chunks] of :mod:`megascale_trainer.model.blocks.loss`.

    Args:
        hidden: [S / tp, B, H].

    Returns:
        objective: scalar, differentiable: sum of loss_weight * (cross entropy + z_loss * log(Z)^2).
        sums: float64 [3]: weighted cross entropy, weighted z-loss, weight. Equal on all tp ranks.
    """
    _, normed = normalise(Stream(hidden), weights, "final_norm", config.model, operators)
    loss = HeadLoss(weights["head.weight"], config, sharding, operators)
    return loss(normed, batch.targets.t(), batch.loss_weight.t())

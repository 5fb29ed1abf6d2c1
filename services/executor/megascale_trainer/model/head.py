"""The last stage's output: final norm, vocabulary-parallel head, weighted loss of a micro-batch."""

from __future__ import annotations

import torch

from megascale_job.config import JobConfig
from megascale_kernels.operators import Operators
from megascale_trainer.batch import MicroBatch
from megascale_trainer.model.layer import normalise
from megascale_trainer.model.sharding import HeadSharding
from megascale_trainer.weights import Weights


def logits_of(
    hidden: torch.Tensor,
    weights: Weights,
    config: JobConfig,
    sharding: HeadSharding,
    operators: Operators,
) -> torch.Tensor:
    """[S, B, V / tp] from hidden states [S / tp, B, H]; V with the padding of the vocabulary."""
    _, normed = normalise(hidden, None, weights, "final_norm", config.model, operators)
    return sharding.column_parallel(normed, weights["head.weight"])


def loss_sums(
    hidden: torch.Tensor,
    batch: MicroBatch,
    weights: Weights,
    config: JobConfig,
    sharding: HeadSharding,
    operators: Operators,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The objective of a micro-batch and what is reported of it, both as *sums* over tokens.

    The global batch's weight is known only at the end of the step, and the division by it is left
    to then: so replicas and micro-batches of unequal weight are exact.

    Args:
        hidden: [S / tp, B, H].
        operators: its cross entropy leaves the logits' gradient where the logits were.

    Returns:
        objective: scalar, differentiable: sum of loss_weight * (cross entropy + z_loss * log(Z)^2).
        sums: float64 [3]: weighted cross entropy, weighted z-loss, weight. Equal on all tp ranks.
    """
    vocabulary = config.model.vocab_size
    table = weights["head.weight"]
    width = table.value.shape[0]
    first = sharding.index * width
    logits = logits_of(hidden, weights, config, sharding, operators).flatten(0, 1)
    columns = max(0, min(width, vocabulary - first))
    entropy, log_z = operators.cross_entropy(
        logits,
        batch.targets.t().flatten(),
        first,
        columns,
        sharding.all_reduce_max,
        sharding.all_reduce,
    )
    weight = batch.loss_weight.t().flatten()
    entropy_sum = (weight * entropy).sum()
    z_sum = config.loss.z_loss * (weight * log_z.square()).sum()
    sums = torch.stack((entropy_sum.detach(), z_sum.detach(), weight.sum())).double()
    return entropy_sum + z_sum, sums

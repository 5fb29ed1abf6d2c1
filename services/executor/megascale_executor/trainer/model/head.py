"""The last stage's output: final norm, vocabulary-parallel head and the weighted loss of one micro-batch."""

from __future__ import annotations

import torch

from megascale_common.job_config import JobConfig
from megascale_executor.trainer.batch import MicroBatch
from megascale_executor.trainer.groups import Group
from megascale_executor.trainer.model.layer import normalise
from megascale_executor.trainer.model.linear import linear
from megascale_executor.trainer.model.weights import Weights
from megascale_executor.trainer.parallel.tensor.sequence import gather_sequence
from megascale_kernels.cross_entropy import CrossEntropy, cross_entropy


def loss_sums(
    hidden: torch.Tensor,
    batch: MicroBatch,
    weights: Weights,
    config: JobConfig,
    tp: Group,
    entropy_of: CrossEntropy = cross_entropy,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The objective of a micro-batch and what is reported of it, both as *sums* over tokens.

    The division by the global batch's weight is left to the end of the step, when that weight is known: so replicas
    and micro-batches of unequal weight are exact.

    Args:
        hidden: [S / tp, B, H].
        entropy_of: the cross entropy, which leaves the logits' gradient where the logits were.

    Returns:
        objective: scalar, differentiable: sum of loss_weight * (cross entropy + z_loss * log(Z)^2).
        sums: float64 [3]: weighted cross entropy, weighted z-loss, weight. Equal on all tp ranks.
    """
    vocabulary = config.model.vocab_size
    table = weights["head.weight"]
    width = table.value.shape[0]
    first = tp.index * width
    normed = gather_sequence(normalise(hidden, weights, "final_norm", config.model), tp)
    logits = linear(normed, table, "out_in").flatten(0, 1)
    columns = max(0, min(width, vocabulary - first))
    entropy, log_z = entropy_of(logits, batch.targets.t().flatten(), first, columns, tp.all_reduce_max, tp.all_reduce)
    weight = batch.loss_weight.t().flatten()
    entropy_sum = (weight * entropy).sum()
    z_sum = config.loss.z_loss * (weight * log_z.square()).sum()
    sums = torch.stack((entropy_sum.detach(), z_sum.detach(), weight.sum())).double()
    return entropy_sum + z_sum, sums

"""The loss of a micro-batch from its normed hidden states: all logits at once, or in chunks.

Logits are the largest tensors of a model with a large vocabulary: those of 131,072 tokens and
128,000 columns in bf16 have 34 GB. In chunks only some rows of them exist at a time, as in the
fused linear cross entropy of Liger Kernel (Hsu et al., arXiv 2410.10989).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megascale_job.config import JobConfig
from megascale_kernels.operators import Operators
from megascale_kernels.torch_calls import apply
from megascale_trainer.model.sharding import HeadSharding
from megascale_trainer.weights import Weight

# Note [Loss in chunks]
# ~~~~~~~~~~~~~~~~~~~~~
# The loss ends a forward and begins a backward, and the gradient of the objective, where backward
# begins, is 1. So the gradient of a chunk's logits is known as soon as the logits are: forward
# computes it in their place, and from it the gradients of the chunk's hidden states and of the
# head's weight, before the next chunk takes the same memory. Nothing is computed twice. Backward
# only returns the gradient of the hidden states that forward has made.
#
# The head's weight gradient is therefore added in forward, also where a schedule postpones those of
# other operators. Its sum over micro-batches has the order of forwards, which on the last stage is
# that of backwards. A forward with gradients whose objective is not the root of a backward, or that
# has none, would leave a wrong `main_grad`.
#
# A chunk is the same part of each tp rank's positions, so that a rank has its own rows of every
# chunk: the chunk is gathered for its GEMM, and its gradient scattered, as the whole would be.


@dataclass(frozen=True)
class HeadLoss:
    """The head and the cross entropy after it.

    Args:
        weight: of the head, [V / tp, H].
        operators: its cross entropy writes the logits' gradient over the logits.
    """

    weight: Weight
    config: JobConfig
    sharding: HeadSharding
    operators: Operators

    def __call__(
        self, normed: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`megascale_trainer.model.blocks.ends.loss_sums`.

        Args:
            normed: [S / tp, B, H].
            targets, weight: [S, B].
        """
        if not self.config.loss.chunk_rows:
            logits = self.sharding.column_parallel(normed, self.weight).flatten(0, 1)
            return self._sums(*self._entropy(logits, targets), weight)
        if torch.is_grad_enabled():
            found: tuple[torch.Tensor, torch.Tensor] = apply(
                _InChunks, normed, targets, weight, self
            )
            return found
        return self.in_chunks(normed, targets, weight, None)

    def in_chunks(
        self,
        normed: torch.Tensor,
        targets: torch.Tensor,
        weight: torch.Tensor,
        d_normed: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`__call__` by chunks, without autograd: Note [Loss in chunks].

        ``d_normed``, as ``normed``, receives the gradient of the objective; None: no gradients.
        """
        tp, sequences = self.sharding.size, normed.shape[1]
        steps = self.config.loss.chunk_steps(normed.shape[0], sequences, tp)
        of_ranks = [each.view(tp, -1, sequences) for each in (targets, weight)]
        found = []
        for start in range(0, normed.shape[0], steps):
            at = slice(start, start + steps)
            part, (chunk_targets, chunk_weight) = normed[at], (each[:, at] for each in of_ranks)
            if d_normed is None:
                found.append(self._chunk(part, chunk_targets))
            else:
                both = self._chunk_both_ways(part, chunk_targets, chunk_weight, d_normed[at])
                found.append(both)
        # In the order of the positions, as without chunks.
        entropy, log_z = (
            torch.cat([each.view(tp, -1, sequences) for each in kind], 1).flatten()
            for kind in zip(*found, strict=True)
        )
        return self._sums(entropy, log_z, weight)

    def _chunk(
        self, part: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross entropy and log Z of a chunk's rows."""
        logits = self.sharding.column_parallel(part, self.weight).flatten(0, 1)
        return self._entropy(logits, targets)

    def _chunk_both_ways(
        self,
        part: torch.Tensor,
        targets: torch.Tensor,
        weight: torch.Tensor,
        d_part: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`_chunk`, which also writes the gradient of ``part`` to ``d_part``."""
        found = []

        def gradient(columns: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                logits = columns.flatten(0, 1).requires_grad_()
                entropy, log_z = self._entropy(logits, targets)
                objective, _ = self._sums(entropy, log_z, weight)
                [d_logits] = torch.autograd.grad(objective, logits)
            found.extend([entropy.detach(), log_z.detach()])
            return d_logits.view_as(columns)

        d_part.copy_(self.sharding.column_parallel_both_ways(part, self.weight, gradient))
        entropy, log_z = found
        return entropy, log_z

    def _entropy(
        self, logits: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross entropy and log Z of each row of ``logits``."""
        width = self.weight.value.shape[0]
        first = self.sharding.index * width
        return self.operators.cross_entropy(
            logits,
            targets.flatten(),
            first,
            max(0, min(width, self.config.model.vocab_size - first)),
            self.sharding.all_reduce_max,
            self.sharding.all_reduce,
        )

    def _sums(
        self, entropy: torch.Tensor, log_z: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The objective, and the figures to report."""
        weight = weight.flatten()
        entropy_sum = (weight * entropy).sum()
        z_sum = self.config.loss.z_loss * (weight * log_z.square()).sum()
        sums = torch.stack((entropy_sum.detach(), z_sum.detach(), weight.sum())).double()
        return entropy_sum + z_sum, sums


class _InChunks(torch.autograd.Function):
    """Note [Loss in chunks]."""

    @staticmethod
    def forward(
        ctx: Any,
        normed: torch.Tensor,
        targets: torch.Tensor,
        weight: torch.Tensor,
        loss: HeadLoss,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        d_normed = torch.empty_like(normed)
        objective, sums = loss.in_chunks(normed, targets, weight, d_normed)
        ctx.save_for_backward(d_normed)
        ctx.mark_non_differentiable(sums)
        ctx.set_materialize_grads(False)
        return objective, sums

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_objective: torch.Tensor, d_sums: None
    ) -> tuple[torch.Tensor, None, None, None]:
        (d_normed,) = ctx.saved_tensors
        return d_normed, None, None, None

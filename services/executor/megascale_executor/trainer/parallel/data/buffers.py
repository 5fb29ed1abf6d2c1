"""Data parallelism, plain: flat buffers whose buckets are reduce-scattered and all-gathered once per step.

A stage's parameters lie in flat buffers in the compute dtype, beside full-size float32 gradient buffers into which all
micro-batches accumulate. After the last backward each bucket of gradients is reduce-scattered, so that a dp rank holds
the total of its own shard; after the update each bucket of parameters is all-gathered, in the order of forward (ZeRO-2
as in MegaScale section 3.1). Both happen in place: a rank's shard is a view of the buffer.
"""

from __future__ import annotations

import torch

from megascale_common.parameter_slices import BufferPlan, ParameterTable
from megascale_executor.trainer.groups import Group


class FlatBuffers:
    """Parameters and gradients of one stage, by buffer name.

    ``parameters`` are flat in ``dtype``, ``gradients`` flat float32, both of the buffer's full size.
    """

    def __init__(self, table: ParameterTable, dtype: torch.dtype, device: torch.device, tp: Group, dp: Group) -> None:
        self._table, self._tp, self._dp = table, tp, dp
        self.parameters = {plan.name: torch.zeros(plan.elements, dtype=dtype, device=device) for plan in table.buffers}
        self.gradients = {
            plan.name: torch.zeros(plan.elements, dtype=torch.float32, device=device) for plan in table.buffers
        }

    def zero_gradients(self) -> None:
        """Forget the gradients of the step before."""
        for gradient in self.gradients.values():
            gradient.zero_()

    def reduce_gradients(self) -> None:
        """Sum gradients over tp where ranks hold replicas, then reduce-scatter every bucket over dp.

        Afterwards :meth:`gradient_shards` is this rank's part of the sums; the rest of the buffers is meaningless.
        """
        for plan in self._table.buffers:
            if plan.replicated_over and plan.elements:
                self._tp.all_reduce(self.gradients[plan.name])
            for bucket in plan.buckets:
                start, stop = bucket.shard(self._dp.index, self._dp.size)
                flat = self.gradients[plan.name]
                self._dp.reduce_scatter(flat[start:stop], flat[bucket.start : bucket.stop])

    def gradient_shards(self) -> list[tuple[BufferPlan, torch.Tensor]]:
        """This rank's shard of each bucket with its buffer, in the order of ``table.shard_ranges``; views."""
        plans = {plan.name: plan for plan in self._table.buffers}
        return [
            (plans[owned.buffer], self.gradients[owned.buffer][owned.start : owned.stop])
            for owned in self._table.shard_ranges
        ]

    def parameter_shards(self) -> list[torch.Tensor]:
        """This rank's shard of each bucket of parameters, in the order of ``table.shard_ranges``; views."""
        return [self.parameters[owned.buffer][owned.start : owned.stop] for owned in self._table.shard_ranges]

    def publish(self, master: torch.Tensor) -> None:
        """Round this rank's float32 shard ``master`` [shard_elements] to parameters and all-gather every bucket."""
        for owned, shard in zip(self._table.shard_ranges, self.parameter_shards(), strict=True):
            shard.copy_(master[owned.shard_offset : owned.shard_offset + shard.numel()])
        self.gather_parameters()

    def gather_parameters(self) -> None:
        """All-gather every bucket of parameters from the ranks' shards."""
        for plan in self._table.buffers:
            for bucket in plan.buckets:
                start, stop = bucket.shard(self._dp.index, self._dp.size)
                flat = self.parameters[plan.name]
                self._dp.all_gather(flat[bucket.start : bucket.stop], flat[start:stop])

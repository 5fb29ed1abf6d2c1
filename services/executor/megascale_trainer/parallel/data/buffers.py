"""Data parallelism, plain: buckets of flat buffers, communicated one after the other.

A stage's parameters lie in flat buffers in the compute dtype, beside full-size float32 gradient
buffers into which all micro-batches accumulate. After the last backward each bucket of gradients is
reduce-scattered, so that a dp rank holds the total of its own shard; after the update each bucket
of parameters is all-gathered, in the order of forward (ZeRO-2 as in MegaScale section 3.1). Both
happen in place: a rank's shard is a view of the buffer.
:mod:`megascale_trainer.parallel.data.overlapped_buffers` hides both under computation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megascale_common.sizes.parameter_slices import Bucket, BufferPlan, ParameterTable, ShardRange
from megascale_trainer.parallel.groups import Group


@dataclass(frozen=True, slots=True, eq=False)
class PlacedBucket:
    """A bucket with its buffer and with the range of it that this rank owns."""

    plan: BufferPlan
    bucket: Bucket
    owned: ShardRange

    def whole(self, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        """The bucket's elements in its buffer out of ``buffers``; a view."""
        return buffers[self.plan.name][self.bucket.start : self.bucket.stop]

    def own(self, buffers: dict[str, torch.Tensor]) -> torch.Tensor:
        """The elements that this rank owns; a view."""
        return buffers[self.plan.name][self.owned.start : self.owned.stop]


class FlatBuffers:
    """Parameters and gradients of one stage, by buffer name.

    ``parameters`` are flat in ``dtype``, ``gradients`` flat float32, both of the buffer's full
    size. ``ends`` is the group of the first and the last stage, which hold tied embeddings.
    """

    def __init__(
        self,
        table: ParameterTable,
        dtype: torch.dtype,
        device: torch.device,
        tp: Group,
        dp: Group,
        ends: Group | None = None,
    ) -> None:
        self._tp, self._dp, self._ends = tp, dp, ends
        self.parameters = {
            plan.name: torch.zeros(plan.elements, dtype=dtype, device=device)
            for plan in table.buffers
        }
        self.gradients = {
            plan.name: torch.zeros(plan.elements, dtype=torch.float32, device=device)
            for plan in table.buffers
        }
        self._partial = [
            plan for plan in table.buffers if "tp" in plan.replicated_over and plan.elements
        ]
        places = [(plan, bucket) for plan in table.buffers for bucket in plan.buckets]
        self._sharded = [
            PlacedBucket(plan, bucket, owned)
            for (plan, bucket), owned in zip(places, table.shard_ranges, strict=True)
        ]
        units = [unit for chunk in table.chunks for unit in chunk.units]
        self._in_forward_order = sorted(
            self._sharded, key=lambda placed: units.index(placed.bucket.units[0])
        )

    def await_parameters(self, unit: str | None = None) -> None:
        """Have the current stream (CPU: caller) wait for the parameters of ``unit`` (None: all).

        A stage calls it before it uses a unit (embedding, layers.N, head). In the plain version
        they are there.
        """

    def enter(self, unit: str, hidden: torch.Tensor) -> torch.Tensor:
        """Pass the input ``hidden`` of ``unit`` through, on its way in; its values never change.

        Every stage calls it before it uses the unit, and backward leaves the unit here.
        """
        self.await_parameters(unit)
        return hidden

    def left(self, unit: str) -> None:
        """The backward of ``unit`` is done (CUDA: enqueued), weight gradients too.

        For a caller that runs a unit without :meth:`enter`; then autograd does not pass through it.
        """

    def zero_gradients(self) -> None:
        """Start a step: gradients of the step before are set to zero."""
        for gradient in self.gradients.values():
            gradient.zero_()

    def reduce_gradients(self) -> None:
        """Sum gradients over tp where ranks hold replicas; reduce-scatter every bucket over dp.

        Those of tied embeddings are then summed over the first and the last stage. Afterwards
        :meth:`gradient_shards` is this rank's part of the sums; the rest of the buffers has no
        meaning.
        """
        self._sum_replicas()
        for placed in self._sharded:
            self._dp.reduce_scatter(placed.own(self.gradients), placed.whole(self.gradients))
        self._sum_tied()

    def gradient_shards(self) -> list[tuple[BufferPlan, torch.Tensor]]:
        """This rank's shard of each bucket with its buffer: views, in order of the shard ranges."""
        return [(placed.plan, placed.own(self.gradients)) for placed in self._sharded]

    def parameter_shards(self) -> list[torch.Tensor]:
        """This rank's shard of each bucket of parameters, to be written; views, same order."""
        self.await_parameters()  # a gather in progress still writes the buffers
        return [placed.own(self.parameters) for placed in self._sharded]

    def publish(self, master: torch.Tensor) -> None:
        """Round the float32 ``master`` [shard_elements] to parameters; all-gather every bucket."""
        for placed, shard in zip(self._sharded, self.parameter_shards(), strict=True):
            offset = placed.owned.shard_offset
            shard.copy_(master[offset : offset + shard.numel()])
        self.gather_parameters()

    def gather_parameters(self) -> None:
        """All-gather every bucket of parameters from the ranks' shards, in the order of forward."""
        # In place: the rank's own shard is a view of the bucket that it is gathered into.
        for placed in self._in_forward_order:
            self._dp.all_gather(placed.whole(self.parameters), placed.own(self.parameters))

    def _sum_replicas(self) -> None:
        for plan in self._partial:
            self._tp.all_reduce(self.gradients[plan.name])

    def _sum_tied(self) -> None:
        """After the sums over dp: a table alone in its buffer has the same shards at both ends."""
        for placed in self._sharded:
            if "pp" in placed.plan.replicated_over and self._ends is not None:
                self._ends.all_reduce(placed.own(self.gradients))

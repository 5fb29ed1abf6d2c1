"""Data parallelism, plain: buckets of flat buffers, communicated one after the other.

A stage's parameters lie in flat buffers in the compute dtype, and all micro-batches accumulate into
float32 gradient buffers of full size. Each buffer names the group of ranks that hold the same part
of it (:class:`megascale_job.sizes.parameter_table.BufferPlan`). After the last backward each bucket
of gradients is reduce-scattered over that group, so that a rank holds the total of its own shard;
after the update each bucket of parameters is all-gathered, in the order of forward (ZeRO-2 as in
MegaScale section 3.1). Both happen in place: a rank's shard is a view of the buffer. Buckets of
weights in FP8 can travel as bytes instead
(:mod:`megascale_trainer.parallel.data.bucket_parameters`).
:mod:`megascale_trainer.parallel.data.overlapped_buffers` hides both under computation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megascale_job.sizes.parameter_table import BufferPlan, ParameterTable
from megascale_trainer.parallel.data.bucket_parameters import (
    BucketParameters,
    Fp8Gather,
    PlacedBucket,
    PlainParameters,
    placed_buckets,
)
from megascale_trainer.parallel.groups import Group, Groups

# Note [Gradients in float32]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A gradient is the sum of many small addends: one per micro-batch, and one per data-parallel rank.
# bf16 has 8 significant bits, so an addend below 1/256 of the sum so far is lost entirely, and the
# error grows with the number of micro-batches. Therefore every operator adds into a float32
# `main_grad` (`megascale_trainer/weights.py`), GEMMs included: they sum in float32 and add the
# result to memory in float32, without rounding to bf16 in between. The reduce-scatter sums the same
# float32 values, and the optimizer reads them. autograd's own `.grad` could not do this: it has the
# dtype of the weight. The price is a buffer of 4 bytes per parameter, of full size on every rank.


@dataclass(frozen=True)
class Place:
    """The memory of a stage's buffers, and the groups that share them.

    ``dtype`` is that of parameters, except in buffers of counts, which are float32.
    """

    table: ParameterTable
    dtype: torch.dtype
    device: torch.device
    groups: Groups

    def dtype_of(self, plan: BufferPlan) -> torch.dtype:
        """The dtype of a buffer's parameters."""
        return torch.float32 if plan.counted else self.dtype


class FlatBuffers:
    """Parameters and gradients of one stage.

    By buffer name: ``parameters`` are flat in the dtype of ``place``, without the buckets that
    ``fp8`` holds; ``gradients`` are flat float32 of the buffer's full size (see Note [Gradients in
    float32]). By name of the stored tensor: ``values`` are the tensors that operators compute with,
    and ``scales`` (float32 [1]) the factors that restore those in FP8.
    """

    def __init__(self, place: Place, fp8: Fp8Gather | None = None) -> None:
        table, device = place.table, place.device
        self._groups = place.groups
        self._fp8 = fp8
        self._sharded = placed_buckets(table)
        self.parameters, self._held = _parameters(self._sharded, place, fp8)
        self.scales = {} if fp8 is None else fp8.scales
        self.values = {
            tensor.name: self._held[placed].value(tensor)
            for placed in self._sharded
            for tensor in table.stored_in(placed.plan.name, placed.bucket)
        }
        self.gradients = {
            plan.name: torch.zeros(
                (plan.copies or 1) * plan.elements, dtype=torch.float32, device=device
            )
            for plan in table.buffers
        }
        self._partial = [
            plan for plan in table.buffers if "tp" in plan.replicated_over and plan.elements
        ]
        units = [unit for chunk in table.chunks for unit in chunk.units]
        self._in_forward_order = sorted(
            self._sharded, key=lambda placed: units.index(placed.bucket.units[0])
        )

    def await_parameters(self, unit: str | None = None) -> None:
        """Make the current stream (CPU: caller) wait for the parameters of ``unit`` (None: all).

        A stage calls it before it uses a unit (embedding, layers.N, head). In the plain version
        the parameters have already arrived.
        """

    def enter(self, unit: str, hidden: torch.Tensor) -> torch.Tensor:
        """Pass ``hidden``, the input of ``unit``, through unchanged.

        Every stage calls it before it uses the unit, and backward leaves the unit here.
        """
        self.await_parameters(unit)
        return hidden

    def left(self, unit: str) -> None:
        """Note that the backward of ``unit`` is done (CUDA: enqueued), weight gradients included.

        For a caller that runs a unit without :meth:`enter`: then autograd does not pass through it.
        """

    def zero_gradients(self) -> None:
        """Set the gradients of the step before to zero."""
        for gradient in self.gradients.values():
            gradient.zero_()

    def reduce_gradients(self) -> None:
        """Sum replicated gradients over tp, and reduce-scatter every bucket over its owners.

        The gradients of tied embeddings are then summed over the first and the last stage.
        Afterwards :meth:`gradient_shards` is this rank's part of the sums; the rest of the buffers
        has no meaning.
        """
        self._sum_replicas()
        for placed in self._sharded:
            if not placed.plan.copies:
                group = self._group(placed)
                group.reduce_scatter(placed.own(self.gradients), placed.whole(self.gradients))
        self._sum_in_order()
        self._sum_tied()

    def gradient_shards(self) -> list[tuple[BufferPlan, torch.Tensor]]:
        """Each bucket's buffer and this rank's shard of it: views, in order of the shard ranges."""
        return [(placed.plan, placed.own(self.gradients)) for placed in self._sharded]

    def parameter_shards(self) -> list[torch.Tensor]:
        """This rank's shard of each bucket of parameters, for writing; views in the same order."""
        self.await_parameters()  # a gather in progress still writes the buffers
        return [self._held[placed].shard for placed in self._sharded]

    def publish(self, master: torch.Tensor) -> None:
        """Round the float32 ``master`` [shard_elements] to parameters; all-gather every bucket."""
        for placed, shard in zip(self._sharded, self.parameter_shards(), strict=True):
            offset = placed.owned.shard_offset
            shard.copy_(master[offset : offset + shard.numel()])
        self.gather_parameters()

    def gather_parameters(self) -> None:
        """All-gather every bucket of parameters from the ranks' shards, in the order of forward."""
        # In place: the rank's own part is a view of the bucket that it is gathered into.
        for placed, whole, own in self._packed():
            self._group(placed).all_gather(whole, own)

    def _packed(self) -> Iterator[tuple[PlacedBucket, torch.Tensor, torch.Tensor]]:
        """The buckets with the memory of a gather and this rank's part, in the order of forward.

        A generator, so that a bucket can travel while the next one is cast.
        """
        if self._fp8 is not None:
            self._fp8.agree()
        for placed in self._in_forward_order:
            parameters = self._held[placed]
            parameters.pack()
            yield placed, parameters.whole, parameters.own

    def _sum_replicas(self) -> None:
        for plan in self._partial:
            self._groups.tp.all_reduce(self.gradients[plan.name])

    def _group(self, placed: PlacedBucket) -> Group:
        """The ranks that own the bucket's shards."""
        return self._groups[placed.plan.group]

    def _sum_in_order(self) -> None:
        """See Note [Sums of experts in one order] of the parameter table."""
        for placed in self._sharded:
            if not placed.plan.copies:
                continue
            group, bucket = self._group(placed), placed.bucket
            copies = self.gradients[placed.plan.name].view(placed.plan.copies, -1)
            total = torch.zeros_like(placed.own(self.gradients))
            arrived = [torch.empty_like(copies[0, bucket.start : bucket.stop]) for _ in copies]
            sizes = [total.numel()] * group.size
            for copy, there in zip(copies, arrived, strict=True):
                group.all_to_all(there, copy[bucket.start : bucket.stop], sizes, sizes)
            # By the number of the ep group in the stage, then by the rank in the ep group: that is
            # the order of the ranks of the stage.
            for parts in zip(*(there.chunk(group.size) for there in arrived), strict=True):
                for part in parts:
                    total += part
            placed.own(self.gradients).copy_(total)

    def _sum_tied(self) -> None:
        """Sum over both ends, after the sums over dp.

        The table is alone in its buffer, so both ends have the same shards of it.
        """
        ends = self._groups.ends
        for placed in self._sharded:
            if "pp" in placed.plan.replicated_over and ends is not None:
                ends.all_reduce(placed.own(self.gradients))


def _parameters(
    buckets: list[PlacedBucket], place: Place, fp8: Fp8Gather | None
) -> tuple[dict[str, torch.Tensor], dict[PlacedBucket, BucketParameters]]:
    """Flat buffers of the buckets outside of ``fp8``, and the parameters of every bucket."""
    held: dict[PlacedBucket, BucketParameters] = {}
    sizes: dict[BufferPlan, int] = {placed.plan: 0 for placed in buckets}
    plain = []
    for placed in buckets:
        travelling = None if fp8 is None else fp8.travelling(placed.owned)
        if travelling is not None:
            held[placed] = travelling
            continue
        size, start = placed.bucket.stop - placed.bucket.start, sizes[placed.plan]
        sizes[placed.plan] = start + size
        plain.append((placed, slice(start, start + size)))
    flat = {
        plan.name: torch.zeros(size, dtype=place.dtype_of(plan), device=place.device)
        for plan, size in sizes.items()
    }
    for placed, part in plain:
        held[placed] = PlainParameters(placed, flat[placed.plan.name][part])
    return flat, held

"""The parameters of a bucket on one rank: what is written, what travels, what is read.

Weights of layers in FP8 may travel over the data-parallel ranks as e4m3 bytes. After an update a
rank has its own shard of every weight in bf16. The ranks agree on the largest magnitude of each
weight in one all-reduce, each casts what it owns, and buckets are all-gathered as bytes: half of
their size in bf16, and no rank casts a whole weight or keeps it in bf16. Amax and cast are those of
the values in bf16, so every bit is the same as with a gather first and a cast after. Counterpart:
Megatron-core's ``--fp8-param-gather``.

The other tensors of such buckets (:mod:`megascale_job.sizes.parameter_table`) are summed over the
ranks, each of which adds its own values to zeros.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from megascale_job.config import JobConfig
from megascale_job.sizes.parameter_table import (
    Bucket,
    BufferPlan,
    Fp8Bucket,
    ParameterTable,
    ShardRange,
    StoredTensor,
    aligned,
    fp8_buckets,
)
from megascale_kernels.casts import Casts, casts
from megascale_kernels.quantize import E4M3, scale_of
from megascale_trainer.parallel.groups import Group
from megascale_trainer.weights import view_at


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

    def own_of(self, bucket: torch.Tensor) -> torch.Tensor:
        """The elements that this rank owns, out of those of the ``bucket``; a view."""
        start = self.bucket.start
        return bucket[self.owned.start - start : self.owned.stop - start]


def placed_buckets(table: ParameterTable) -> list[PlacedBucket]:
    """The buckets of a rank, in the order of its shard ranges."""
    places = [(plan, bucket) for plan in table.buffers for bucket in plan.buckets]
    return [
        PlacedBucket(plan, bucket, owned)
        for (plan, bucket), owned in zip(places, table.shard_ranges, strict=True)
    ]


class BucketParameters(Protocol):
    """The parameters of one bucket.

    Args:
        shard: what this rank owns, in the compute dtype; the optimizer writes it.
        whole: what an all-gather brings, 1-D.
        own: this rank's part of ``whole``; a view.
    """

    @property
    def shard(self) -> torch.Tensor: ...

    @property
    def whole(self) -> torch.Tensor: ...

    @property
    def own(self) -> torch.Tensor: ...

    def pack(self) -> None:
        """Make ``own`` from ``shard``."""

    def value(self, tensor: StoredTensor) -> torch.Tensor:
        """What is computed with of a tensor of the bucket, in its shape; a view."""


class PlainParameters:
    """Parameters that travel as they are: the shard lies in place in ``whole``."""

    def __init__(self, placed: PlacedBucket, whole: torch.Tensor) -> None:
        self._start = placed.bucket.start
        self.whole = whole
        self.own = placed.own_of(whole)
        self.shard = self.own

    def pack(self) -> None:
        """It is there."""

    def value(self, tensor: StoredTensor) -> torch.Tensor:
        """A view of ``whole``."""
        return view_at(self.whole, tensor.offset - self._start, tensor.shape)


# float32 values from one amax or scale to the next: each begins at 16 bytes, as kernels like it.
_SPACING = 4
_WIDEST = 4096  # columns of a run as a matrix


def fp8_gather_of(
    config: JobConfig,
    table: ParameterTable,
    device: torch.device,
    dp: Group,
    kernels: Literal["torch", "triton"],
) -> Fp8Gather | None:
    """What the job asks for; None: all parameters travel in the compute dtype."""
    buckets = fp8_buckets(config, table)
    if not buckets:
        return None
    return Fp8Gather(buckets, table, device, dp, casts(kernels))


class Fp8Gather:
    """What the ranks of ``dp`` agree on before FP8 weights travel, and the buckets that do.

    ``scales`` are those of the weights by name, float32 [1]. They and all values keep their memory:
    graphs read them there.
    """

    def __init__(
        self,
        buckets: Sequence[Fp8Bucket],
        table: ParameterTable,
        device: torch.device,
        dp: Group,
        casts: Casts,
    ) -> None:
        self._dp = dp
        weights = [tensor for bucket in buckets for tensor in bucket.weights]
        rest = [tensor for bucket in buckets for tensor in bucket.rest]
        self._amaxes = torch.zeros((len(weights), _SPACING), device=device)
        self._scales = torch.zeros_like(self._amaxes)
        rest_elements = sum(bucket.rest_elements for bucket in buckets)
        self._rest = torch.zeros(rest_elements, dtype=torch.bfloat16, device=device)
        self.scales = {
            tensor.name: scale[:1] for tensor, scale in zip(weights, self._scales, strict=True)
        }
        amaxes = {tensor.name: amax[:1] for tensor, amax in zip(weights, self._amaxes, strict=True)}
        values, offset = dict[str, torch.Tensor](), 0
        for tensor in rest:
            values[tensor.name] = view_at(self._rest, offset, tensor.shape)
            offset += aligned(math.prod(tensor.shape))
        self._travelling = {
            placed.owned: Fp8Parameters(placed, bucket, device, casts, amaxes, values)
            for placed in placed_buckets(table)
            for bucket in buckets
            if (bucket.buffer, bucket.bucket) == (placed.plan.name, placed.bucket)
        }

    def travelling(self, owned: ShardRange) -> Fp8Parameters | None:
        """The bucket that has this range of the rank; None: it travels in bf16."""
        return self._travelling.get(owned)

    def agree(self) -> None:
        """All ranks get the scale of each weight, and the rest of the buckets."""
        self._amaxes.zero_()
        self._rest.zero_()
        for bucket in self._travelling.values():
            bucket.measure()
        # As integers: the bits of magnitudes have their order, those of NaN above all. A
        # communicator's maximum of floats may drop NaN.
        self._dp.all_reduce_max(self._amaxes.view(torch.int32))
        self._scales.copy_(scale_of(self._amaxes, E4M3))
        if self._rest.numel():
            # As integers, two values each: all ranks but one add zeros, and every bit arrives, -0
            # and NaN included.
            self._dp.all_reduce(self._rest.view(torch.int32))


class Fp8Parameters:
    """See :class:`megascale_trainer.parallel.data.bucket_parameters.BucketParameters`.

    ``whole`` is uint8 and has a byte for each element of the bucket; those of the rest are zeros.

    Args:
        amaxes: of each weight by name, float32 [1].
        rest: memory of each tensor of the rest by name, in its shape.
    """

    def __init__(
        self,
        placed: PlacedBucket,
        bucket: Fp8Bucket,
        device: torch.device,
        casts: Casts,
        amaxes: dict[str, torch.Tensor],
        rest: dict[str, torch.Tensor],
    ) -> None:
        self._casts = casts
        self._start = placed.bucket.start
        self._rest = rest
        self.whole = torch.zeros(bucket.elements, dtype=torch.uint8, device=device)
        self.own = placed.own_of(self.whole)
        self.shard = torch.zeros(self.own.numel(), dtype=torch.bfloat16, device=device)
        # Of each weight its amax, and what the shard has of it as matrices: values and bytes.
        self._runs = []
        for tensor, run, _ in _parts(placed.owned, bucket.weights):
            columns = math.gcd(run.stop - run.start, _WIDEST)
            values, data = self.shard[run], self.own[run].view(E4M3)
            self._runs.append(
                (amaxes[tensor.name], values.view(-1, columns), data.view(-1, columns))
            )
        # Of each tensor of the rest what the shard has of it, and where it goes.
        self._others = [
            (self.shard[run], rest[tensor.name].view(-1)[place])
            for tensor, run, place in _parts(placed.owned, bucket.rest)
        ]

    def measure(self) -> None:
        """Hand in the largest magnitudes of the shard, and the shard's values of the rest."""
        for amax, values, _ in self._runs:
            amax.copy_(self._casts.amax(values))
        for values, there in self._others:
            there.copy_(values)

    def pack(self) -> None:
        """Cast the shard under the largest magnitudes on which the ranks agreed."""
        for amax, values, data in self._runs:
            self._casts.tensor(values, E4M3, amax=amax, transposed=False, out=data)

    def value(self, tensor: StoredTensor) -> torch.Tensor:
        """A weight in e4m3, a view of ``whole``; or a tensor of the rest."""
        rest = self._rest.get(tensor.name)
        if rest is not None:
            return rest
        return view_at(self.whole.view(E4M3), tensor.offset - self._start, tensor.shape)


def _parts(
    owned: ShardRange, tensors: Sequence[StoredTensor]
) -> Iterator[tuple[StoredTensor, slice, slice]]:
    """Those of ``tensors`` that reach into ``owned``: where in the shard, and where in the tensor.

    No tensor leaves its bucket, so that a shard has at most one run of it.
    """
    for tensor in tensors:
        start = max(owned.start, tensor.offset)
        stop = min(owned.stop, tensor.offset + math.prod(tensor.shape))
        if start < stop:
            run = slice(start - owned.start, stop - owned.start)
            yield tensor, run, slice(start - tensor.offset, stop - tensor.offset)

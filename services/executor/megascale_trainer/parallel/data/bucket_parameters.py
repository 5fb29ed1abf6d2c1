"""The parameters of a bucket on one rank: what of it is written, what travels, what is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from megascale_job.sizes.parameter_table import (
    Bucket,
    BufferPlan,
    ParameterTable,
    ShardRange,
    StoredTensor,
)
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
        self.whole, self.own = whole, placed.own_of(whole)
        self.shard = self.own

    def pack(self) -> None:
        """It is there."""

    def value(self, tensor: StoredTensor) -> torch.Tensor:
        """A view of ``whole``."""
        return view_at(self.whole, tensor.offset - self._start, tensor.shape)

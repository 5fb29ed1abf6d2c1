"""What the data-parallel ranks get of parameters that travel in FP8, beside a gather in bf16."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from tests.harness import training
from tests.harness.training import CPU

from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_job.sizes.parameter_table import fp8_buckets, fp8_weights, parameter_table
from megascale_kernels.casts import casts
from megascale_kernels.quantize import Operand
from megascale_trainer.parallel.data.bucket_parameters import fp8_gather_of
from megascale_trainer.parallel.data.buffers import FlatBuffers, Place
from megascale_trainer.parallel.data.overlapped_buffers import OverlappedBuffers
from megascale_trainer.parallel.groups import Group, Groups, Pending, single_process_groups
from megascale_trainer.parallel.tensor.fp8 import Fp8Weights
from megascale_trainer.process.bootstrap import destroy_groups
from megascale_trainer.weights import WeightGradients, bind_weights


class CountingGroup(Group):
    """A group that notes the bytes that its all-gathers bring, and those that it reduces."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.name, group.ranks, group.ranks[group.index], group.handle, None)
        self.gathered: list[int] = []
        self.reduced: list[int] = []

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> None:
        self.gathered.append(output.nbytes)
        super().all_gather(output, source)

    def start_all_gather(self, output: torch.Tensor, source: torch.Tensor) -> Pending | None:
        self.gathered.append(output.nbytes)
        return super().start_all_gather(output, source)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self.reduced.append(tensor.nbytes)
        super().all_reduce(tensor)


class GatheredRank:
    """Buffers of one rank with its weights, published from master values."""

    def __init__(
        self,
        config: JobConfig,
        rank: int,
        groups: Groups,
        device: torch.device = CPU,
        kernels: Literal["torch", "triton"] = "torch",
        *,
        overlapped: bool = False,
    ) -> None:
        self.table = parameter_table(config, rank)
        self.dp = CountingGroup(groups.dp)
        fp8 = fp8_gather_of(config, self.table, device, self.dp, kernels)
        named = {**groups.named, "gradient": self.dp}
        place = Place(self.table, torch.bfloat16, device, replace(groups, named=named))
        self.buffers = (
            OverlappedBuffers(place, config.micro_batches, WeightGradients(), fp8)
            if overlapped
            else FlatBuffers(place, fp8)
        )
        self.bytes_travel = fp8 is not None
        self.weights = bind_weights(
            self.table, self.buffers.values, self.buffers.gradients, self.buffers.scales
        )
        self.casts = Fp8Weights(casts(kernels))
        self._cast = {tensor.name for tensor in fp8_weights(config.fp8_layers, self.table)}

    def publish(self, master: torch.Tensor) -> None:
        """Have all ranks get these values, of which this rank has its shard."""
        self.dp.gathered.clear()
        self.dp.reduced.clear()
        self.buffers.publish(master)
        self.buffers.await_parameters()
        self.casts.forget()

    def operands(self) -> dict[str, Operand]:
        """The FP8 weights by name, as the GEMMs read them."""
        return {name: self.casts.operand(self.weights[name]) for name in sorted(self._cast)}

    def others(self) -> dict[str, torch.Tensor]:
        """The values that are no operands."""
        return {
            name: weight.value.detach()
            for name, weight in self.weights.items()
            if name not in self._cast
        }


def publish_in_both_ways(
    rank: int,
    world_size: int,
    folder: Path,
    *,
    job: dict[str, Any],
    kernels: Literal["torch", "triton"] = "torch",
) -> dict[str, Any]:
    """Program of one rank: publish values, then for each dp rank some that it has broken.

    In bf16 and in FP8, plain and overlapped, through the same groups. Returns what differs, how
    many operands moved, how many scales were NaN each time, and the bytes of each way.
    """
    jobs = [gathering(job, kind) for kind in ("bf16", "fp8")]
    config, groups = jobs[0], training._groups(jobs[0], rank, folder)
    device = training.device_of(rank)
    wanted, *ways = (
        GatheredRank(one, rank, groups, device, kernels, overlapped=overlapped)
        for one, overlapped in ((jobs[0], False), (jobs[1], False), (jobs[1], True))
    )
    assert not wanted.bytes_travel and all(way.bytes_travel for way in ways)
    differ, places, broken = list[str](), list[set[tuple[int, ...]]](), list[int]()
    for breaker in (None, *range(config.parallelism.dp)):
        master = master_of(config, rank, breaker).to(device)
        for way in (wanted, *ways):
            way.publish(master)
        operands = wanted.operands()
        broken.append(sum(bool(operand.scale.isnan()) for operand in operands.values()))
        for way in ways:
            found = way.operands()
            differ += [name for name in operands if not same_bits(operands[name], found[name])]
            differ += [
                name
                for name, value in wanted.others().items()
                if not torch.equal(value.view(torch.int16), way.others()[name].view(torch.int16))
            ]
        places.append({_places(operand) for way in ways for operand in way.operands().values()})
    destroy_groups()
    return {
        "differ": sorted({*differ}),
        "moved": sum(len(found ^ places[0]) for found in places),
        "broken": broken,
        "travelling": len(fp8_buckets(jobs[1], wanted.table)),
        "gathered": [way.dp.gathered for way in (wanted, *ways)],
        "reduced": [way.dp.reduced for way in (wanted, *ways)],
    }


def buffers_bytes(job: dict[str, Any], rank: int, kind: str) -> int:
    """What a rank holds of its parameters, FP8 operands included, but for scales."""
    config, groups = gathering(job, kind), single_process_groups()
    held = GatheredRank(config, rank, groups)
    tensors = [*held.weights.values()]
    memory = [weight.value for weight in tensors] + held.buffers.parameter_shards()
    for operand in held.operands().values():
        assert operand.transposed is not None
        memory += [operand.data, operand.transposed]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in memory}
    return sum(storage.nbytes() for storage in storages.values())


def gathering(job: dict[str, Any], kind: str) -> JobConfig:
    """``job`` in FP8, whose parameters travel in the format ``kind``."""
    training_section = {**job["training"], "precision": "fp8", "fp8": {"parameter_gather": kind}}
    return from_accepted({**job, "training": training_section})


def master_of(config: JobConfig, rank: int, breaker: int | None) -> torch.Tensor:
    """Master values of a rank's shard, some of them -0.

    dp rank ``breaker`` has NaN in every matrix that it owns a part of, but Inf in the first, and in
    all else some NaNs.
    """
    table = parameter_table(config, rank)
    seed = 10 * rank + (0 if breaker is None else 1 + breaker)
    master = torch.randn(table.shard_elements, generator=torch.Generator().manual_seed(seed))
    master[::7] = -0.0
    if table.at.dp != breaker:
        return master
    broken = torch.inf
    for owned, piece, start, stop in table.overlaps():
        last = owned.shard_offset + stop - owned.start - 1
        if piece.name.startswith("layers.") and len(piece.start) > 1:
            master[last], broken = broken, torch.nan
        else:
            master[last - (stop - start) + 1 : last : 5] = torch.nan
    return master


def same_bits(one: Operand, other: Operand) -> bool:
    """Whether all bits are equal; of NaN scales that both are NaN."""
    assert one.transposed is not None and other.transposed is not None
    return (
        torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))
        and torch.equal(one.transposed.view(torch.uint8), other.transposed.view(torch.uint8))
        and torch.equal(one.scale.nan_to_num(-1.0), other.scale.nan_to_num(-1.0))
    )


def _places(operand: Operand) -> tuple[int, ...]:
    assert operand.transposed is not None
    tensors = (operand.data, operand.transposed, operand.scale)
    return tuple(tensor.data_ptr() for tensor in tensors)

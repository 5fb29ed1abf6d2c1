"""Programs of ranks that compare overlapped matmuls with plain ones, on CPUs and on GPUs."""

from __future__ import annotations

import contextlib
import io
import random
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from tests.harness.training import GROUP_TIMEOUT_S, device_of, tiny_job
from torch._C._distributed_c10d import FileStore

from megascale_job.layout import RankLayout
from megascale_job.loading import from_accepted
from megascale_kernels.operators import torch_operators
from megascale_kernels.overlap import peer_memory
from megascale_kernels.overlap.collective_matmul import CollectiveMatmuls
from megascale_kernels.overlap.peer_memory import PeerMemory, open_peer_memory, why_unreachable
from megascale_kernels.overlap.row_transfers import region_bytes
from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.tensor.matmul import (
    OverlappedMatmuls,
    PlainMatmuls,
    SequenceMatmuls,
)
from megascale_trainer.parallel.tensor.sharding import tensor_parallel
from megascale_trainer.process.bootstrap import Rendezvous, create_groups, destroy_groups
from megascale_trainer.trainer import DTYPES

_CYCLES_PER_S = 1.5e9  # roughly, of torch.cuda._sleep
Operation = Callable[[SequenceMatmuls], Sequence[torch.Tensor]]


def compare(
    rank: int,
    world_size: int,
    folder: Path,
    *,
    dtype: str,
    chunks: list[int],
    operations: int,
    part_bytes: int,
    delay_s: float,
) -> dict[str, Any]:
    """Program of one rank: random operations, overlapped with and without delays, and plain.

    All numbers are small whole ones, whose sums are exact in any order: every comparison is for
    equality.

    Returns:
        By number of chunks and delay, how many operations differed from the plain ones in a bit.
    """
    tp, device = tp_group(rank, world_size, folder), device_of(rank)
    shared, own = random.Random(7), random.Random(rank)
    program = [
        _operation(shared, rank, world_size, part_bytes, DTYPES[dtype], device)
        for _ in range(operations)
    ]
    expected = [operation(PlainMatmuls(tp)) for operation in program]
    wrong = {}
    for number in chunks:
        memory = _open(tp, region_bytes(part_bytes * world_size), device)
        for delay in (delay_s, 0.0):
            kernel = CollectiveMatmuls(Delayed(memory, own, delay), number)
            products = OverlappedMatmuls(tp, kernel)
            found = [operation(products) for operation in program]
            memory.barrier()  # the next object starts with the first slot again
            wrong[f"{number} chunks, delays of {delay} s"] = sum(
                not all(torch.equal(*pair) for pair in zip(one, other, strict=True))
                for one, other in zip(found, expected, strict=True)
            )
    destroy_groups()
    return wrong


def memory_is_shared(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """Program of one rank: write into every rank's memory, read its own, and access beyond it."""
    tp, device = tp_group(rank, world_size, folder), device_of(rank)
    assert tp.handle is not None
    reason = why_unreachable(tp.handle, device)
    memory = _open(tp, 4 * world_size, device)
    for peer in range(world_size):
        memory.tensor_of(peer, (1,), torch.int32, 4 * rank).fill_(10 * peer + rank)
    memory.barrier()
    found = memory.tensor_of(rank, (world_size, 1), torch.int32).flatten().tolist()
    error = ""
    try:
        memory.tensor_of(rank, (world_size,), torch.int32, 4)
    except RuntimeError as refusal:
        error = str(refusal)
    memory.barrier()
    destroy_groups()
    return {"reason": reason, "found": found, "error": error}


def sum_is_wide(rank: int, world_size: int, folder: Path) -> float:
    """Program of one rank: the sum of 256, 1, 1, ... over ranks, in bf16.

    A running sum in bf16 would stay 256.
    """
    tp, device = tp_group(rank, world_size, folder), device_of(rank)
    products = CollectiveMatmuls(_open(tp, region_bytes(2 * world_size * 64), device), 1)
    x = torch.zeros(world_size, 1, 8, dtype=torch.bfloat16, device=device)
    x[..., 0] = 1.0 if rank else 256.0
    total = products.matmul_reduce_scatter(x, torch.eye(8, dtype=torch.bfloat16, device=device))[
        0, 0, 0
    ].item()
    destroy_groups()
    return total


def too_much(rank: int, world_size: int, folder: Path) -> str:
    """Program of one rank: an operation that its slot cannot hold; returns the refusal."""
    tp, device = tp_group(rank, world_size, folder), device_of(rank)
    products = CollectiveMatmuls(_open(tp, region_bytes(1024), device), 1)
    error = ""
    try:
        products.all_gather_matmul(
            torch.zeros(65, 1, 4, device=device), torch.zeros(4, 4, device=device)
        )
    except RuntimeError as refusal:
        error = str(refusal)
    destroy_groups()
    return error


def choice(
    rank: int, world_size: int, folder: Path, *, overlap: bool, one_host: bool
) -> dict[str, str]:
    """Program of one rank: which implementation a job gets, and the lines of the log."""
    if not one_host:
        peer_memory._host_key = lambda: rank
    job = tiny_job(parallelism={"tp": world_size, "overlap": {"tp": overlap}})
    group = tp_group(rank, world_size, folder)
    with contextlib.redirect_stdout(io.StringIO()) as log:
        tp = tensor_parallel(
            from_accepted(job), group, torch.float32, device_of(rank), torch_operators()
        )
    destroy_groups()
    return {"products": type(tp.matmuls).__name__, "log": log.getvalue()}


def tp_group(rank: int, world_size: int, folder: Path) -> Group:
    """A tp group of all ranks, which meet in ``folder``."""
    store = FileStore(str(folder / "store"), world_size)
    store.set_timeout(timedelta(seconds=GROUP_TIMEOUT_S))
    layout = RankLayout(tp=world_size, cp=1, dp=1, pp=1)
    return create_groups(layout, rank, Rendezvous(store, device_of(rank), GROUP_TIMEOUT_S)).tp


class Delayed:
    """Peer memory whose uses are delayed, on their streams, by random times up to ``delay_s``."""

    def __init__(self, memory: PeerMemory, dice: random.Random, delay_s: float) -> None:
        self.rank, self.size, self.size_bytes, self.device = (
            memory.rank,
            memory.size,
            memory.size_bytes,
            memory.device,
        )
        self._memory, self._random, self._delay_s = memory, dice, delay_s

    def tensor_of(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> torch.Tensor:
        self._sleep()
        return self._memory.tensor_of(rank, shape, dtype, offset_bytes)

    def barrier(self) -> None:
        self._sleep()
        self._memory.barrier()
        self._sleep()

    def _sleep(self) -> None:
        seconds = self._random.random() * self._delay_s
        if self.device.type == "cuda":
            torch.cuda._sleep(int(seconds * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
        else:
            time.sleep(seconds)


def _open(tp: Group, size_bytes: int, device: torch.device) -> PeerMemory:
    assert tp.handle is not None
    return open_peer_memory(tp.handle, size_bytes, device, timeout_s=GROUP_TIMEOUT_S)


def _operation(
    shared: random.Random,
    rank: int,
    size: int,
    part_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Operation:
    """A random operation, of one kind and shape on all ranks, that moves up to ``part_bytes``."""
    gathers, batch = shared.random() < 0.5, shared.choice((1, 2, 3))
    travelling, other = (shared.choice((8, 16, 24, 64)) for _ in range(2))
    most = part_bytes // (batch * travelling * dtype.itemsize)
    rows = shared.randint(max(most // 2, 1), most)
    generator = torch.Generator().manual_seed(1000 * shared.randrange(1000) + rank)
    width, out = (travelling, other) if gathers else (other, travelling)
    x = (
        _whole_numbers((rows * (1 if gathers else size), batch, width), generator)
        .to(dtype)
        .to(device)
    )
    factor = _whole_numbers((out, width), generator).to(dtype).to(device)
    factor = factor.t() if shared.random() < 0.5 else factor.t().contiguous()
    if gathers:
        return lambda products: products.all_gather_matmul(x, factor)
    return lambda products: _scatter_beside_work(products, x, factor)


def _scatter_beside_work(
    products: SequenceMatmuls, x: torch.Tensor, factor: torch.Tensor
) -> Sequence[torch.Tensor]:
    work: list[torch.Tensor] = []
    part = products.matmul_reduce_scatter(x, factor, lambda: work.append(x.sum(0)))
    return part, *work


def _whole_numbers(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """-1, 0 and 1, mostly 0: sums over 64 columns and 8 ranks are exact in bf16, far below 256."""
    values = torch.randint(-1, 2, shape, generator=generator)
    return values * (torch.rand(shape, generator=generator) < 0.3)

"""Programs of ranks that compare overlapped FP8 GEMMs with plain ones, on CPUs and on GPUs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tests.harness.tensor_products import Delayed, tp_group
from tests.harness.training import GROUP_TIMEOUT_S, device_of

from megascale_kernels.gemm import Gemm
from megascale_kernels.overlap.fp8_matmul import Fp8Gemms, OverlappedFp8Gemms, PlainFp8Gemms
from megascale_kernels.overlap.peer_memory import open_peer_memory
from megascale_kernels.overlap.row_transfers import RowTransfers, region_bytes
from megascale_kernels.quantize import E4M3, E5M2, Operand
from megascale_trainer.process.bootstrap import destroy_groups

_WIDTHS = (16, 32, 64)
Operation = Callable[[Fp8Gemms], Sequence[torch.Tensor]]


def compare(
    rank: int,
    world_size: int,
    folder: Path,
    *,
    chunks: list[int],
    operations: int,
    part_rows: int,
    delay_s: float,
) -> dict[str, int]:
    """Program of one rank: random operations, overlapped with random delays and without, and plain.

    All numbers are small whole ones, whose sums are exact in any order: every comparison is for
    equality.

    Returns:
        Per chunk number and delay, how many operations gave other bits than the plain one.
    """
    tp, device = tp_group(rank, world_size, folder), device_of(rank)
    assert tp.handle is not None
    shared, own, gemm = random.Random(7), random.Random(rank), Gemm(timed=False)
    program = [_operation(shared, rank, world_size, part_rows, device) for _ in range(operations)]
    expected = [operation(PlainFp8Gemms(tp, gemm)) for operation in program]
    slot_bytes = 2 * max(_WIDTHS) * (part_rows + 128) * world_size
    wrong = {}
    for number in chunks:
        memory = open_peer_memory(
            tp.handle, region_bytes(slot_bytes), device, timeout_s=GROUP_TIMEOUT_S
        )
        for delay in (delay_s, 0.0):
            gemms = OverlappedFp8Gemms(RowTransfers(Delayed(memory, own, delay), number), gemm)
            found = [operation(gemms) for operation in program]
            memory.barrier()  # the next object starts with the first slot again
            wrong[f"{number} chunks, delays of {delay} s"] = sum(
                not all(torch.equal(*pair) for pair in zip(one, other, strict=True))
                for one, other in zip(found, expected, strict=True)
            )
    destroy_groups()
    return wrong


def _operation(
    shared: random.Random, rank: int, size: int, part_rows: int, device: torch.device
) -> Operation:
    """A random operation of the same kind and shape on all ranks, with the rank's own numbers."""
    kind = shared.choice(("gather", "gather", "scatter", "scatter", "largest"))
    rows, (width, columns) = shared.randint(2, part_rows), shared.choices(_WIDTHS, k=2)
    dtype, by_row = shared.choice((E4M3, E5M2)), shared.random() < 0.5
    if by_row:  # cuBLASLt takes multiples of 16 rows then, which each of 8 chunks of 128 has
        rows, dtype = 128 * math.ceil(rows / 128), E4M3
    fast = shared.random() < 0.5
    draw = torch.Generator().manual_seed(1000 * shared.randrange(1000) + rank)
    weight = _operand(columns, width, E4M3, draw, device, by_row=False).over_columns()
    if kind == "largest":
        value = torch.rand(1, generator=draw).to(device)
        return lambda gemms: [gemms.largest(value)]
    if kind == "gather":
        part = _operand(rows, width, dtype, draw, device, by_row=by_row)
        return lambda gemms: _gathered(*gemms.all_gather_matmul(part, weight, fast=fast))
    x = _operand(rows * size, width, dtype, draw, device, by_row=by_row).over_columns()

    def scatter(gemms: Fp8Gemms) -> Sequence[torch.Tensor]:
        work: list[torch.Tensor] = []
        part = gemms.matmul_reduce_scatter(
            x, weight, lambda: work.append(x.data.float().sum(0)), fast=fast
        )
        return part, *work

    return scatter


def _gathered(product: torch.Tensor, gathered: Operand) -> Sequence[torch.Tensor]:
    return product, gathered.data.view(torch.uint8), gathered.scale


def _operand(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    draw: torch.Generator,
    device: torch.device,
    *,
    by_row: bool,
) -> Operand:
    """-1, 0 and 1, mostly 0, under scales of 1 and 2: bf16 counts exactly up to their sums."""
    values = torch.randint(-1, 2, (rows, columns), generator=draw)
    values *= torch.rand((rows, columns), generator=draw) < 0.3
    scale = torch.randint(1, 3, (rows,), generator=draw) if by_row else torch.ones(1)
    return Operand(values.float().to(dtype).to(device), scale.float().to(device))

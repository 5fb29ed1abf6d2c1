"""Tensor parallelism whose transfers hide under its GEMMs (MegaScale section 3.2).

The numbers are the plain version's except for the order of sums: GEMMs run in row chunks, and
partial sums of the ranks are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megascale_job.config import JobConfig
from megascale_kernels.operators import Operators
from megascale_kernels.overlap.collective_matmul import CollectiveMatmuls
from megascale_kernels.overlap.peer_memory import open_peer_memory, why_unreachable
from megascale_kernels.overlap.row_transfers import RowTransfers, region_bytes
from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.tensor.sharding import TensorParallel, plain_tensor_parallel

# benchmarks/results/2026-11-22-fp8-overlap-2x-and-4xh200.md
_ONE_STEP_UP_TO = 4


def tensor_parallel(
    config: JobConfig,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    operators: Operators,
) -> TensorParallel:
    """The tp ``group`` with the matmuls that ``parallelism.overlap.tp`` asks for.

    All its ranks call this together. Where the ranks cannot reach each other's memory, the plain
    matmuls are used and the log names the reason. Peer memory is allocated once, for the one size
    that all layers and the head communicate: hidden states [S, B, H] in ``dtype``.

    Raises:
        RuntimeError, OSError: there is not enough memory to share.
    """
    if not config.parallelism.overlap.tp or group.handle is None:  # not wanted, or one rank
        return plain_tensor_parallel(group)
    if reason := why_unreachable(group.handle, device):
        print(
            "the tensor-parallel group is not overlapped (trainer.parallelism.overlap.tp): "
            f"{reason}",
            flush=True,
        )
        return plain_tensor_parallel(group)
    model = config.model
    sequences = config.training.micro_batch_size
    whole_bytes = model.sequence_length * sequences * model.hidden_size * dtype.itemsize
    memory = open_peer_memory(
        group.handle,
        region_bytes(whole_bytes),
        device,
        timeout_s=config.recovery.collective_timeout_s,
    )
    kernel = CollectiveMatmuls(memory, chunks(group.size), operators.sum_of_parts)
    return TensorParallel(group, OverlappedMatmuls(group, kernel))


def chunks(size: int) -> int:
    """Into how many steps the rows of ``size - 1`` peers are cut.

    Few, because a GEMM of few rows fills a device badly. One is the fastest on 2 and on 4 H200s:
    two steps cost a layer 1.5 to 3 % on 4 (30B and 7B, bf16). For 8, GEMMs timed on one H200 with
    computed transfers: three is within 2.2 % of the best of each shape, one costs 5 to 16 % more
    (benchmarks/results/2026-11-27-waterfalls-4xh200.md).
    """
    return 1 if size <= _ONE_STEP_UP_TO else 3


class OverlappedMatmuls:
    """The kernel's overlapped matmuls, each counted as one operation of the group.

    Copies between peers bypass the communicator, so the status page would not show them otherwise.
    """

    def __init__(self, group: Group, kernel: CollectiveMatmuls) -> None:
        self._group, self._kernel = group, kernel

    @property
    def transfers(self) -> RowTransfers:
        """Those of the kernel, for FP8 GEMMs of the same group."""
        return self._kernel.transfers

    def all_gather_matmul(
        self, part: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._group.operation(part):
            return self._kernel.all_gather_matmul(part, factor)

    def matmul_reduce_scatter(
        self, x: torch.Tensor, factor: torch.Tensor, meanwhile: Callable[[], None] | None = None
    ) -> torch.Tensor:
        with self._group.operation(x):
            return self._kernel.matmul_reduce_scatter(x, factor, meanwhile)

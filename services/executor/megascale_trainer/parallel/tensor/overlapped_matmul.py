"""Tensor parallelism whose transfers hide under its matrix products (MegaScale section 3.2), chosen
by the job.

The numbers are the plain version's but for the order of sums: products are made in row chunks, and
partial sums of the ranks are added in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megascale_common.job.config import JobConfig
from megascale_kernels.overlap.collective_matmul import OverlappedProducts
from megascale_kernels.overlap.peer_memory import open_peer_memory, why_unreachable
from megascale_kernels.overlap.row_transfers import region_bytes
from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.tensor.matmul import TensorParallel, plain_tensor_parallel


def tensor_parallel(
    config: JobConfig, group: Group, dtype: torch.dtype, device: torch.device
) -> TensorParallel:
    """The tp ``group`` with the products that ``parallelism.overlap.tp`` asks for; all its ranks
    call this together.

    Where the ranks cannot reach each other's memory the plain ones are taken, and the log says why.
    Peer memory is taken once, for the one size that all layers and the head communicate: hidden
    states [S, B, H] in ``dtype``.

    Raises:
        RuntimeError, OSError: there is not enough memory to share.
    """
    if not config.parallelism.overlap.tp:
        return plain_tensor_parallel(group)
    reason = "it has one rank" if group.handle is None else why_unreachable(group.handle, device)
    if group.handle is None or reason:
        print(
            f"the tensor-parallel group is not overlapped (parallelism.overlap.tp): {reason}",
            flush=True,
        )
        return plain_tensor_parallel(group)
    model = config.model
    whole = (
        model.sequence_length
        * config.training.micro_batch_size
        * model.hidden_size
        * dtype.itemsize
    )
    timeout_s = config.recovery.collective_timeout_s
    memory = open_peer_memory(group.handle, region_bytes(whole), device, timeout_s=timeout_s)
    return TensorParallel(group, _Counted(group, OverlappedProducts(memory, chunks(group.size))))


def chunks(size: int) -> int:
    """Into how many steps the rows of ``size - 1`` peers are cut.

    Few, since a product of few rows fills a device badly; enough that the first of them arrive
    under the product of a rank's own rows, which are 1 / ``size`` of all.
    """
    return min(max(size // 2, 1), 3)


class _Counted:
    """Overlapped products that show on the group's row of the status page, one operation each."""

    def __init__(self, group: Group, products: OverlappedProducts) -> None:
        self._group, self._products = group, products

    def gather_multiply(
        self, part: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with self._group.operation(part):
            return self._products.gather_multiply(part, factor)

    def multiply_scatter(
        self, x: torch.Tensor, factor: torch.Tensor, meanwhile: Callable[[], None] | None = None
    ) -> torch.Tensor:
        with self._group.operation(x):
            return self._products.multiply_scatter(x, factor, meanwhile)

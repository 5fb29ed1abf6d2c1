"""GEMMs in bf16 or float32 whose sequence-parallel all-gather or reduce-scatter runs under them.

:mod:`megascale_kernels.overlap.row_transfers` says when rows travel, and why the use of peer memory
is safe. :mod:`megascale_kernels.overlap.fp8_matmul` has the same GEMMs in FP8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megascale_kernels.overlap.peer_memory import PeerMemory
from megascale_kernels.overlap.row_transfers import RowTransfers
from megascale_kernels.partial_sums import SumOfParts, sum_of_parts


class CollectiveMatmuls:
    """The two GEMMs over ``memory``, which belongs to this object alone.

    ``chunks``: the number of steps for the peers' rows
    (:func:`megascale_kernels.overlap.plan.gather_plan`). ``total`` adds the ranks' partial sums.
    """

    def __init__(self, memory: PeerMemory, chunks: int, total: SumOfParts = sum_of_parts) -> None:
        self.transfers = RowTransfers(memory, chunks, total)

    def all_gather_matmul(
        self, part: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product of all ranks' rows with this rank's ``factor``.

        Args:
            part: [S / size, B, K], this rank's rows.
            factor: [K, N]; may be a transposed view.

        Returns:
            product: [S, B, N].
            gathered: [S, B, K], all ranks' rows.

        Raises:
            RuntimeError: the slot is too small for ``part``.
        """
        rows = self.transfers.size * part.shape[0]
        product = part.new_empty((rows, *part.shape[1:-1], factor.shape[1]))

        def multiply(arrived: Sequence[torch.Tensor], start: int, stop: int) -> None:
            _multiply(arrived[0], factor, product[start:stop])

        [gathered] = self.transfers.gather([part], multiply)
        return product, gathered

    def matmul_reduce_scatter(
        self, x: torch.Tensor, factor: torch.Tensor, meanwhile: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """This rank's rows of the sum over ranks of their products: added in float32, rounded once.

        Args:
            x: [S, B, K].
            factor: [K, N]; may be a transposed view.
            meanwhile: further work for the caller's stream, under which the last rows travel.

        Returns:
            [S / size, B, N].

        Raises:
            RuntimeError: the slot is too small for the whole product.
        """
        x = x.contiguous()

        def multiply(start: int, stop: int, out: torch.Tensor) -> None:
            _multiply(x[start:stop], factor, out)

        product = x.new_empty((*x.shape[:-1], factor.shape[1]))
        return self.transfers.scatter(product, multiply, meanwhile)


def _multiply(rows: torch.Tensor, factor: torch.Tensor, out: torch.Tensor) -> None:
    """Write [R, B, K] x [K, N] into ``out`` [R, B, N]; all except ``factor`` are contiguous."""
    torch.mm(rows.flatten(0, 1), factor, out=out.flatten(0, 1))

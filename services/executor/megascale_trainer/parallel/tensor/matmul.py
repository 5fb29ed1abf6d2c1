"""All-gather matmul and matmul reduce-scatter: the two GEMMs of sequence parallelism.

Between the GEMMs every tp rank holds its own part of the sequence (Korthikanti et al., arXiv
2205.05198; MegaScale section 3.2). Each of the two is the other's backward. The plain version comes
first, then the one that hides the transfers under the GEMMs. The embedding gathers and scatters
without a GEMM, so these two are here as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from megascale_kernels.overlap.collective_matmul import CollectiveMatmuls
from megascale_kernels.overlap.row_transfers import RowTransfers
from megascale_kernels.torch_calls import apply
from megascale_trainer.parallel.groups import Group


def gather(part: torch.Tensor, tp: Group) -> torch.Tensor:
    """[S / tp, ...] of each rank to the whole [S, ...]; not differentiable."""
    if tp.size == 1:
        return part
    whole = part.new_empty((part.shape[0] * tp.size, *part.shape[1:]))
    tp.all_gather(whole, part.contiguous())
    return whole


def reduce_scatter(partial: torch.Tensor, tp: Group) -> torch.Tensor:
    """Partial sums [S, ...] of each rank to this rank's part [S / tp, ...]; not differentiable."""
    if tp.size == 1:
        return partial
    part = partial.new_empty((partial.shape[0] // tp.size, *partial.shape[1:]))
    tp.reduce_scatter(part, partial.contiguous())
    return part


def reduce_scatter_sequence(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """:func:`reduce_scatter` whose backward gathers."""
    if tp.size == 1:
        return x
    part: torch.Tensor = apply(_ReduceScatter, x, tp)
    return part


def sequence_part(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """This rank's part [S / tp, ...] of a tensor [S, ...] that every rank has."""
    return x.chunk(tp.size, dim=0)[tp.index]


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gather(gradient, ctx.tp), None


class SequenceMatmuls(Protocol):
    """The two matmuls of a tp group; all its ranks call them in the same order."""

    def all_gather_matmul(
        self, part: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-gather the ranks' [S / tp, B, K], then multiply by ``factor`` [K, N].

        Returns:
            The result [S, B, N] and the gathered [S, B, K].
        """
        ...

    def matmul_reduce_scatter(
        self, x: torch.Tensor, factor: torch.Tensor, meanwhile: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """[S, B, K] times [K, N], summed over the ranks: this rank's part [S / tp, B, N].

        ``meanwhile`` is further work that does not need the result: transfers may hide under it.
        """
        ...


class PlainMatmuls:
    """One collective and one GEMM after the other."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def all_gather_matmul(
        self, part: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole = gather(part, self._group)
        return torch.matmul(whole, factor), whole

    def matmul_reduce_scatter(
        self, x: torch.Tensor, factor: torch.Tensor, meanwhile: Callable[[], None] | None = None
    ) -> torch.Tensor:
        partial = torch.matmul(x, factor)
        if meanwhile is not None:
            meanwhile()
        return reduce_scatter(partial, self._group)


class OverlappedMatmuls:
    """The kernel's overlapped matmuls, each counted as one operation of the group.

    Copies between peers bypass the communicator, so the status page would not show them otherwise.
    """

    def __init__(self, group: Group, kernel: CollectiveMatmuls) -> None:
        self._group = group
        self._kernel = kernel

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

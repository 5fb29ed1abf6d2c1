"""Matrix products beside which the sequence is gathered or scattered, and how one rank of a tp
group makes them.

Both are their own backward's building blocks: the gradient of gather-multiply is multiply-scatter
and the other way round. The plain version is here;
:mod:`megascale_trainer.parallel.tensor.overlapped_matmul` hides its transfers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.tensor.sequence import gather, reduce_scatter


class Products(Protocol):
    """The two products of a tp group; all its ranks call them in the same order."""

    def gather_multiply(
        self, part: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[S / tp, B, K] of each rank, gathered, times [K, N]: the product [S, B, N] and the
        gathered [S, B, K].
        """
        ...

    def multiply_scatter(
        self, x: torch.Tensor, factor: torch.Tensor, meanwhile: Callable[[], None] | None = None
    ) -> torch.Tensor:
        """[S, B, K] times [K, N], summed over the ranks: this rank's part [S / tp, B, N].

        ``meanwhile`` is further work that does not need the result: transfers may hide under it.
        """
        ...


@dataclass(frozen=True)
class TensorParallel:
    """A tp group and how its products are made."""

    group: Group
    products: Products

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size

    @property
    def index(self) -> int:
        """This rank's place among them."""
        return self.group.index


class PlainProducts:
    """One collective and one product after the other."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def gather_multiply(
        self, part: torch.Tensor, factor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        whole = gather(part, self._group)
        return torch.matmul(whole, factor), whole

    def multiply_scatter(
        self, x: torch.Tensor, factor: torch.Tensor, meanwhile: Callable[[], None] | None = None
    ) -> torch.Tensor:
        partial = torch.matmul(x, factor)
        if meanwhile is not None:
            meanwhile()
        return reduce_scatter(partial, self._group)


def plain_tensor_parallel(group: Group) -> TensorParallel:
    """``group`` with plain products; with one rank these are products alone."""
    return TensorParallel(group, PlainProducts(group))

"""All-gather matmul and matmul reduce-scatter: the two GEMMs of sequence parallelism.

Each is the other's backward: the gradient of an all-gather matmul is a matmul reduce-scatter and
the other way round. The plain version is here;
:mod:`megascale_trainer.parallel.tensor.overlapped_matmul` hides the transfers under the GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from megascale_trainer.parallel.groups import Group
from megascale_trainer.parallel.tensor.sequence import gather, reduce_scatter


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

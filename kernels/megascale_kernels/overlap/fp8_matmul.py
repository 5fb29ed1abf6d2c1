"""GEMMs in FP8 whose rows are gathered as FP8 bytes, or whose partial sums travel in bf16.

Rows are tokens: [tokens, width]. A gathered operand has one of two kinds of scale:

- [1], the same on all ranks, so that it does not travel. The bound of the norm's result
  (:func:`megascale_kernels.quantize.norm_bound`) is the same without communication; for a gradient
  the ranks agree on an amax by :meth:`Fp8Gemms.largest` before the cast;
- [rows / size], one per row, which travels with the rows; on CUDA a multiple of 16 of them.

The operand that a scatter multiplies stays on its rank, so its scale is that rank's own. GEMMs
write partial sums in bf16, and these are added like those of bf16 GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megascale_kernels.gemm import Gemm
from megascale_kernels.overlap.row_transfers import RowTransfers
from megascale_kernels.quantize import Factor, Operand


class Fp8Gemms(Protocol):
    """The two FP8 GEMMs of a tensor-parallel group; all ranks call them in the same order."""

    def all_gather_matmul(
        self, part: Operand, factor: Factor, *, fast: bool
    ) -> tuple[torch.Tensor, Operand]:
        """The product of all ranks' rows with this rank's ``factor``.

        Args:
            part: [rows / size, K], this rank's rows; its transposed copy is not used.
            factor: [N, K].
            fast: as of :meth:`megascale_kernels.gemm.Gemm.multiply`.

        Returns:
            product: [rows, N] in bf16.
            gathered: [rows, K], all ranks' rows, without a transposed copy: the weight gradient
                needs one (:func:`megascale_kernels.fused.quantize.transpose`). With one rank it is
                ``part`` itself.
        """
        ...

    def matmul_reduce_scatter(
        self,
        x: Factor,
        factor: Factor,
        meanwhile: Callable[[], None] | None = None,
        *,
        fast: bool,
    ) -> torch.Tensor:
        """This rank's rows of the sum over ranks of their products, bf16 [rows / size, N].

        Args:
            x: [rows, K], with a scale of this rank's own.
            factor: [N, K].
            meanwhile: further work that does not need the result, under which transfers can hide.
            fast: as of :meth:`megascale_kernels.gemm.Gemm.multiply`.
        """
        ...

    def largest(self, amax: torch.Tensor) -> torch.Tensor:
        """The largest of the ranks' ``amax`` (float32 [1]), the same on all; NaN spreads."""
        ...

    def own_part(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Memory, shaped like ``like``, for the data of the next gather's part.

        The gather does not copy a part that was written there. There must be no other operation
        before that gather.
        """
        ...

    def rows_at_once(self, rows: int) -> Sequence[int]:
        """The different numbers of rows of the GEMMs that make up ``rows`` rows of all ranks."""
        ...


class Collectives(Protocol):
    """The collectives of a group of ranks that :class:`PlainFp8Gemms` uses."""

    size: int

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Concatenate every rank's ``source`` along dimension 0 into ``output``."""
        ...

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> None:
        """Sum ``source`` over the ranks; this rank's part of dimension 0 goes to ``output``."""
        ...

    def all_reduce_max(self, tensor: torch.Tensor) -> None:
        """Maximum of ``tensor`` over the ranks, in place."""
        ...


class PlainFp8Gemms:
    """One collective and one GEMM after the other."""

    def __init__(self, group: Collectives, gemm: Gemm) -> None:
        self._group = group
        self._gemm = gemm

    def all_gather_matmul(
        self, part: Operand, factor: Factor, *, fast: bool
    ) -> tuple[torch.Tensor, Operand]:
        gathered = part
        if self._group.size > 1:
            gathered = _operand([self._gathered(one) for one in _travelling(part)], part)
        product = _bf16(part.data, gathered.data.shape[0], factor)
        self._gemm.multiply(gathered.over_columns(), factor, product, fast=fast)
        return product, gathered

    def matmul_reduce_scatter(
        self,
        x: Factor,
        factor: Factor,
        meanwhile: Callable[[], None] | None = None,
        *,
        fast: bool,
    ) -> torch.Tensor:
        partial = _bf16(x.data, x.data.shape[0], factor)
        self._gemm.multiply(x, factor, partial, fast=fast)
        if meanwhile is not None:
            meanwhile()
        if self._group.size == 1:
            return partial
        part = partial.new_empty((partial.shape[0] // self._group.size, partial.shape[1]))
        self._group.reduce_scatter(part, partial)
        return part

    def largest(self, amax: torch.Tensor) -> torch.Tensor:
        # Magnitudes have the same order as integers, and NaN is the largest of these. A maximum of
        # floats can drop NaN.
        found = amax.view(torch.int32).clone()
        self._group.all_reduce_max(found)
        return found.view(torch.float32)

    def own_part(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_like(like, dtype=dtype)

    def rows_at_once(self, rows: int) -> Sequence[int]:
        return [rows]

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        whole = part.new_empty((part.shape[0] * self._group.size, *part.shape[1:]))
        self._group.all_gather(whole, part.contiguous())
        return whole


class OverlappedFp8Gemms:
    """GEMMs in row chunks, under which rows travel. Only the order of sums differs.

    ``transfers`` can be those of
    :class:`megascale_kernels.overlap.collective_matmul.CollectiveMatmuls`: then the operations of
    both share its slots and its order.
    """

    def __init__(self, transfers: RowTransfers, gemm: Gemm) -> None:
        self._transfers = transfers
        self._gemm = gemm

    def all_gather_matmul(
        self, part: Operand, factor: Factor, *, fast: bool
    ) -> tuple[torch.Tensor, Operand]:
        rows = part.data.shape[0] * self._transfers.size
        product = _bf16(part.data, rows, factor)

        def multiply(arrived: Sequence[torch.Tensor], start: int, stop: int) -> None:
            left = _operand(arrived, part).over_columns()
            self._gemm.multiply(left, factor, product[start:stop], fast=fast)

        return product, _operand(self._transfers.gather(_travelling(part), multiply), part)

    def matmul_reduce_scatter(
        self,
        x: Factor,
        factor: Factor,
        meanwhile: Callable[[], None] | None = None,
        *,
        fast: bool,
    ) -> torch.Tensor:
        def multiply(start: int, stop: int, out: torch.Tensor) -> None:
            self._gemm.multiply(_rows(x, start, stop), factor, out, fast=fast)

        whole = _bf16(x.data, x.data.shape[0], factor)
        return self._transfers.scatter(whole, multiply, meanwhile)

    def largest(self, amax: torch.Tensor) -> torch.Tensor:
        return self._transfers.largest(amax)

    def own_part(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self._transfers.own_part(like.shape, dtype)

    def rows_at_once(self, rows: int) -> Sequence[int]:
        return self._transfers.rows_at_once(rows)


def _travelling(part: Operand) -> list[torch.Tensor]:
    """The parts of an operand that travel: its rows as bytes, and scales of rows."""
    data = part.data.view(torch.uint8)  # not all collectives take FP8
    return [data, part.scale] if part.scale.numel() == part.data.shape[0] else [data]


def _operand(arrived: Sequence[torch.Tensor], part: Operand) -> Operand:
    """Rows that arrived as an operand in the format of ``part``, with its scale if none arrived."""
    data, *scales = arrived
    return Operand(data.view(part.data.dtype), scales[0] if scales else part.scale)


def _rows(factor: Factor, start: int, stop: int) -> Factor:
    assert factor.scale is not None
    by_row = factor.scale.numel() == factor.data.shape[0]
    return Factor(factor.data[start:stop], factor.scale[start:stop] if by_row else factor.scale)


def _bf16(like: torch.Tensor, rows: int, factor: Factor) -> torch.Tensor:
    return like.new_empty((rows, factor.data.shape[0]), dtype=torch.bfloat16)

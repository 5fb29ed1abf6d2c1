"""Sequence parallelism, plain: between the GEMMs every tp rank holds its own part of the sequence.

A column-parallel GEMM needs the whole sequence first (all-gather); after a row-parallel GEMM the partial sums of the
ranks are added and each keeps its part (reduce-scatter). Each is the other's backward (Korthikanti et al., arXiv
2205.05198; MegaScale section 3.2).
"""

from __future__ import annotations

from typing import Any

import torch

from megascale_executor.trainer.groups import Group


def gather_sequence(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """[S / tp, B, H] of each rank to the whole [S, B, H]; backward sums the ranks' gradients and scatters them."""
    if tp.size == 1:
        return x
    whole: torch.Tensor = _Gather.apply(x, tp)  # type: ignore[no-untyped-call]
    return whole


def reduce_scatter_sequence(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """Partial sums [S, B, H] of each rank to this rank's part [S / tp, B, H] of the total; backward gathers."""
    if tp.size == 1:
        return x
    part: torch.Tensor = _ReduceScatter.apply(x, tp)  # type: ignore[no-untyped-call]
    return part


def sequence_part(x: torch.Tensor, tp: Group) -> torch.Tensor:
    """This rank's part [S / tp, ...] of a tensor [S, ...] that every rank has."""
    return x.chunk(tp.size, dim=0)[tp.index]


def _gather(x: torch.Tensor, tp: Group) -> torch.Tensor:
    whole = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
    tp.all_gather(whole, x.contiguous())
    return whole


def _scatter(x: torch.Tensor, tp: Group) -> torch.Tensor:
    part = x.new_empty((x.shape[0] // tp.size, *x.shape[1:]))
    tp.reduce_scatter(part, x.contiguous())
    return part


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return _gather(x, tp)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _scatter(gradient, ctx.tp), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return _scatter(x, tp)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _gather(gradient, ctx.tp), None

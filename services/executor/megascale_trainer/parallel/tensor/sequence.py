"""Sequence parallelism outside the GEMMs: what the embedding needs of it.

Between the GEMMs every tp rank holds its own part of the sequence (Korthikanti et al., arXiv
2205.05198; MegaScale section 3.2); the GEMMs themselves are in
:mod:`megascale_trainer.parallel.tensor.matmul`.
"""

from __future__ import annotations

from typing import Any

import torch

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
    part: torch.Tensor = _ReduceScatter.apply(x, tp)  # type: ignore[no-untyped-call]
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

"""Names that differ between torch 2.11 and 2.13; only this module tests which of them exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 deprecates the names that torch 2.11 has, and 2.11 lacks the new ones
_all_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def all_gather(output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Concatenate every rank's ``source`` along dimension 0 into ``output``.

    ``source`` may be a view of ``output``.
    """
    _all_gather(output, source, group=group)


def start_all_gather(
    output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work:
    """:func:`all_gather` that returns at once; the result is complete after ``wait``."""
    work: dist.Work = _all_gather(output, source, group=group, async_op=True)
    return work


def reduce_scatter(output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum ``source`` over the ranks; ``output`` gets this rank's part of dimension 0.

    ``output`` may be a view of ``source``.
    """
    _reduce_scatter(output, source, group=group)


def start_reduce_scatter(
    output: torch.Tensor, source: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work:
    """:func:`reduce_scatter` that returns at once; the result is complete after ``wait``."""
    work: dist.Work = _reduce_scatter(output, source, group=group, async_op=True)
    return work


def matmul_in_float32(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left @ right as float32 [m, n], of factors [m, k] and [k, n] of one dtype."""
    if left.dtype == torch.float32:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def accumulate_matmul(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """total += left @ right: ``total`` float32 [m, n], factors [m, k] and [k, n] of one dtype.

    On CUDA the GEMM itself sums in float32. A CPU has no such GEMM, so bf16 factors are widened.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))

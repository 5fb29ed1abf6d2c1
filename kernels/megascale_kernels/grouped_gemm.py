"""GEMMs of experts: rows in order of their expert, each expert with a weight of its own.

    forward            y[rows of e]  = x[rows of e]  @ w[e]^T
    input gradient     dx[rows of e] = dy[rows of e] @ w[e]
    weight gradient    dw[e]        += dy[rows of e]^T @ x[rows of e]

The device alone knows how many rows an expert has: :class:`ExpertGroups` holds the numbers. All
shapes are static, and no function waits for the device, except the plain loops of this module,
which read the offsets. These loops define what the kernels of
:mod:`megascale_kernels.fused.grouped_gemm` compute in one launch each. An expert can have no rows,
or all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from megascale_kernels.quantize import Factor, dequantize

# Rows of a group: the rows of one tile of a GEMM, and the unit of a transposed copy.
GROUP_ROWS = 128


@dataclass(frozen=True)
class ExpertGroups:
    """The rows of each expert, in groups of GROUP_ROWS of which the last can be partial.

    Args:
        offsets: int32 [experts + 1]: expert e has the rows offsets[e] to offsets[e + 1]; the first
            is 0, the last is the number of rows.
        starts: int32 [experts + 1]: the number of groups before each expert; the last is the number
            of all groups.
        expert: int32 [rows / GROUP_ROWS + experts], the largest possible number of groups: the
            expert of each group; the number of experts after the last group.
        parts: int32 [experts * ranks + 1]: the rows of each expert by the rank that sent them;
            None: all are of one rank. The loops of this module multiply each part by itself, so
            that the bits of a row do not depend on what other ranks sent.
    """

    offsets: torch.Tensor
    starts: torch.Tensor
    expert: torch.Tensor
    parts: torch.Tensor | None = None

    @property
    def experts(self) -> int:
        """The number of experts."""
        return self.offsets.numel() - 1


@dataclass(frozen=True)
class FlippedRows:
    """A transposed copy in FP8, for sums over the rows of each expert.

    Args:
        data: [columns, GROUP_ROWS * len(ExpertGroups.expert)] in FP8: the rows of expert e begin
            at column GROUP_ROWS * starts[e]; zeros fill its last group. Columns after the last
            group are not written.
        scale: float32 [experts]: a value is ``data`` times its expert's scale.
    """

    data: torch.Tensor
    scale: torch.Tensor


def expert_groups(
    offsets: torch.Tensor, rows: int, parts: torch.Tensor | None = None
) -> ExpertGroups:
    """The groups of ``rows`` rows under ``offsets``, on their device and without waiting for it.

    ``parts``: see :class:`ExpertGroups`.
    """
    counts = offsets.diff()
    groups = (counts + (GROUP_ROWS - 1)).div(GROUP_ROWS, rounding_mode="floor")
    ends = groups.cumsum(0, dtype=torch.int32)
    starts = torch.cat([torch.zeros_like(ends[:1]), ends])
    # Each expert adds at most one partial group to the full ones.
    most = torch.arange(
        rows // GROUP_ROWS + counts.numel(), dtype=torch.int32, device=offsets.device
    )
    expert = torch.searchsorted(ends, most, right=True, out_int32=True)
    return ExpertGroups(offsets, starts, expert, parts)


def multiply(
    rows: Factor,
    weights: Factor,
    groups: ExpertGroups,
    out: torch.Tensor,
    *,
    over_rows: bool = False,
    fast: bool = True,
) -> None:
    """out[rows of e] = rows[rows of e] @ weights[e]^T, or @ weights[e] with ``over_rows``.

    Args:
        rows: [rows, depth]; in FP8 with one scale for each row.
        weights: [experts, width, depth], with ``over_rows`` [experts, depth, width]; in FP8 with
            one scale for each expert and column of the result, [experts, width].
        out: [rows, width]; all of it is written.
        fast: allows the kernels to sum FP8 with fewer bits than float32 has.
    """
    for expert, begin, end in _parts(groups):
        matrix = _weight(weights, expert, over_rows)
        product = dequantize(_rows_of(rows, begin, end)) @ (matrix if over_rows else matrix.t())
        out[begin:end].copy_(product)


def add_weight_gradients(
    gradient: torch.Tensor,
    rows: torch.Tensor,
    groups: ExpertGroups,
    out: torch.Tensor,
    *,
    accumulate: bool = True,
) -> None:
    """out[e] += gradient[rows of e]^T @ rows[rows of e], in float32.

    Args:
        gradient: [rows, width].
        rows: [rows, depth], in the dtype of ``gradient``.
        out: float32 [experts, width, depth].
        accumulate: False: write instead of add; the gradient of an expert without rows is 0.
    """
    if not accumulate:
        out.zero_()
    for expert, begin, end in _parts(groups):
        out[expert] += gradient[begin:end].float().t() @ rows[begin:end].float()


def add_weight_gradients_in_fp8(
    gradient: FlippedRows,
    rows: FlippedRows,
    groups: ExpertGroups,
    out: torch.Tensor,
    *,
    accumulate: bool = True,
) -> None:
    """:func:`add_weight_gradients` of transposed copies, [width, ...] and [depth, ...]."""
    starts = (groups.starts * GROUP_ROWS).tolist()
    for expert in range(groups.experts):
        begin, end = starts[expert], starts[expert + 1]
        scale = gradient.scale[expert] * rows.scale[expert]
        left, right = gradient.data[:, begin:end].float(), rows.data[:, begin:end].float()
        product = (left @ right.t()) * scale
        out[expert].copy_(out[expert] + product if accumulate else product)


def _parts(groups: ExpertGroups) -> list[tuple[int, int, int]]:
    """(expert, begin, end) of the rows that are multiplied together, without empty ones."""
    bounds = (groups.offsets if groups.parts is None else groups.parts).tolist()
    ranks = (len(bounds) - 1) // groups.experts
    return [
        (number // ranks, begin, end)
        for number, (begin, end) in enumerate(itertools.pairwise(bounds))
        if begin < end
    ]


def _rows_of(rows: Factor, begin: int, end: int) -> Factor:
    scale = None if rows.scale is None else rows.scale[begin:end]
    return Factor(rows.data[begin:end], scale)


def _weight(weights: Factor, expert: int, over_rows: bool) -> torch.Tensor:
    """One expert's matrix in float32."""
    matrix = weights.data[expert].float()
    if weights.scale is None:
        return matrix
    scale = weights.scale[expert]
    return matrix * (scale.view(1, -1) if over_rows else scale.view(-1, 1))

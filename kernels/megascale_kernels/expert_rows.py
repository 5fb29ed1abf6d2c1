"""Copies of tokens to their experts and back (rows), and the experts' activation.

Each token has ``top_k`` rows, one for each expert that it chose. Rows are ordered by expert, then
by the position of their token, then by choice: :class:`RowPlan`. A row's weight is applied in the
activation, between the two products of an expert: so the way back is a plain sum, its backward is
the way there, and nothing of the second product is kept for backward.

    rows = spread(x)             there: row r is a copy of token source[r]
    h = rows @ w1[expert]^T
    a = activate(h, weights)     silu(gate) * up * weight
    y = join(a @ w2[expert]^T)   back: the sum of a token's rows, in the order of its choices

The backward of ``spread`` is ``join``, and that of ``join`` is ``spread``. Functions named
``in_fp8`` cast on the way, with one scale for each row, a power of two; :func:`flip` makes the
transposed copy that a weight's gradient in FP8 needs. No function waits for the device, except the
plain :func:`flip`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megascale_kernels.activation import swiglu
from megascale_kernels.grouped_gemm import (
    GROUP_ROWS,
    ExpertGroups,
    FlippedRows,
    expert_groups,
)
from megascale_kernels.quantize import E4M3, Operand, cast, quantize


@dataclass(frozen=True)
class RowPlan:
    """The order of the rows: the token and the choice of each, and the reverse.

    Rows after those of the last expert are of experts that are not here: they are not spread, and
    nothing is read from them.

    Args:
        groups: the rows of each expert.
        source: int32 [rows]: the token of each row.
        choice: int32 [rows]: the position of each row in the flattened choices, so that
            ``weights.flatten()[choice]`` are the rows' weights.
        place: int32 [tokens, top_k]: the row of each choice.
    """

    groups: ExpertGroups
    source: torch.Tensor
    choice: torch.Tensor
    place: torch.Tensor

    @property
    def end(self) -> torch.Tensor:
        """int32 [1]: the number of rows whose experts are here."""
        return self.groups.offsets[-1:]

    @property
    def here(self) -> torch.Tensor:
        """bool [tokens, top_k]: whether the expert of each choice is here."""
        return self.place < self.end


def row_plan(chosen: torch.Tensor, experts: int, first: int | None = None) -> RowPlan:
    """The plan of ``chosen`` [tokens, top_k], the experts of each token, all different.

    Shapes are static: any choice makes tokens * top_k rows.

    Args:
        first: only the ``experts`` from this one on are here; None: all are.
    """
    tokens, top_k = chosen.shape
    rows = tokens * top_k
    if first is not None:
        here = chosen - first
        chosen = torch.where((here >= 0) & (here < experts), here, experts)
    # A short key sorts faster; a stable sort keeps the order of tokens and choices.
    key = chosen.flatten().to(torch.int16 if experts < 2**15 else torch.int32)
    ordered, choice = torch.sort(key, stable=True)
    bounds = torch.arange(experts + 1, dtype=key.dtype, device=key.device)
    offsets = torch.searchsorted(ordered, bounds, out_int32=True)
    place = torch.empty(rows, dtype=torch.int32, device=key.device)
    place[choice] = torch.arange(rows, dtype=torch.int32, device=key.device)
    choice = choice.to(torch.int32)
    source = choice.div(top_k, rounding_mode="floor")
    return RowPlan(expert_groups(offsets, rows), source, choice, place.view(tokens, top_k))


def spread(x: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    """[rows, columns]: each row a copy of its token in ``x`` [tokens, columns]."""
    return x[plan.source]


def spread_in_fp8(x: torch.Tensor, plan: RowPlan, dtype: torch.dtype = E4M3) -> Operand:
    """:func:`spread` with one scale for each row."""
    operand = quantize(x, dtype, per="row", power_of_two=True)
    # Indexed as bytes, because not every version of torch can index FP8.
    data = operand.data.view(torch.uint8)[plan.source].view(dtype)
    return Operand(data, operand.scale[plan.source])


def join(rows: torch.Tensor, plan: RowPlan, weights: torch.Tensor | None = None) -> torch.Tensor:
    """[tokens, columns]: the sum in float32 of each token's rows, in the order of its choices.

    Args:
        rows: [rows, columns].
        weights: float32 [tokens, top_k], of each choice; None: 1.
    """
    tokens, top_k = plan.place.shape
    total = torch.zeros(tokens, rows.shape[1], dtype=torch.float32, device=rows.device)
    here = plan.here
    for number in range(top_k):
        value = rows[plan.place[:, number]].float()
        value = torch.where(here[:, number : number + 1], value, 0.0)
        total += value if weights is None else value * weights[:, number : number + 1]
    return total.to(rows.dtype)


def activate(h: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """[rows, width]: silu(gate) * up * weight, of ``h`` [rows, 2 width]: gate, then up.

    Args:
        weights: float32 [rows]; None: 1.
    """
    return _activated(h, weights).to(h.dtype)


def activate_in_fp8(
    h: torch.Tensor, weights: torch.Tensor | None, dtype: torch.dtype = E4M3
) -> Operand:
    """:func:`activate` with one scale for each row, cast from float32."""
    return quantize(_activated(h, weights), dtype, per="row", power_of_two=True)


def activation_gradient(
    d_result: torch.Tensor, h: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of ``h`` and of ``weights`` (None without) from that of :func:`activate`."""
    d_h, d_weights = _gradients(d_result, h, weights)
    return d_h.to(h.dtype), d_weights


def activation_gradient_in_fp8(
    d_result: torch.Tensor,
    h: torch.Tensor,
    weights: torch.Tensor | None,
    dtype: torch.dtype = E4M3,
) -> tuple[Operand, torch.Tensor | None]:
    """:func:`activation_gradient` with one scale for each row of the gradient of ``h``."""
    d_h, d_weights = _gradients(d_result, h, weights)
    return quantize(d_h, dtype, per="row", power_of_two=True), d_weights


def flip(rows: Operand, groups: ExpertGroups) -> FlippedRows:
    """The transposed copy of ``rows`` (a scale for each), with one scale for each expert.

    That scale is the largest of the expert's rows. Scales of rows are powers of two, so values stay
    the same, except in rows with far smaller scales, which reach the lower end of FP8's range.
    """
    offsets, starts = groups.offsets.tolist(), (groups.starts * GROUP_ROWS).tolist()
    columns, dtype = rows.data.shape[1], rows.data.dtype
    flipped = torch.zeros(
        columns, GROUP_ROWS * groups.expert.numel(), dtype=torch.uint8, device=rows.data.device
    ).view(dtype)
    scale = torch.ones(groups.experts, dtype=torch.float32, device=rows.data.device)
    for expert in range(groups.experts):
        begin, end = offsets[expert], offsets[expert + 1]
        if begin < end:
            own = rows.scale[begin:end]
            scale[expert] = own.amax()
            values = rows.data[begin:end].float() * (own / scale[expert]).view(-1, 1)
            again = cast(values, torch.ones(1, device=values.device), dtype)
            first = starts[expert]
            flipped.view(torch.uint8)[:, first : first + end - begin] = again.t().view(torch.uint8)
    return FlippedRows(flipped, scale)


def _activated(h: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    gate, up = h.float().chunk(2, dim=-1)
    result = swiglu(gate, up)
    return result if weights is None else result * weights.view(-1, 1)


def _gradients(
    d_result: torch.Tensor, h: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    with torch.enable_grad():
        leaf = h.detach().float().requires_grad_()
        own = None if weights is None else weights.detach().clone().requires_grad_()
        result = _activated(leaf, own)
    wanted = [leaf] if own is None else [leaf, own]
    found = torch.autograd.grad(result, wanted, d_result.float())
    return found[0], found[1] if own is not None else None

"""The linear layers of a parallel block in FP8 and in bf16: shapes, and what each recipe runs.

A recipe is a way to run one layer's GEMMs on one tensor-parallel rank, with all that makes their
operands: the norm before the input projection and the activation before the output projection, and
the casts of both gradients. Rows that a rank casts before a gather are its own; the transposed copy
is made of what was gathered. :func:`surroundings` is what a layer computes besides, the same for
every recipe; transfers between ranks are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from megascale_kernels import quantize as plain
from megascale_kernels.attention import attention, attention_mask
from megascale_kernels.fused import quantize as casts
from megascale_kernels.fused.activation import write_activation, write_gradients
from megascale_kernels.fused.activation_operand import activation_operand, activation_with_amax
from megascale_kernels.fused.norm import norm
from megascale_kernels.fused.norm_operand import NormCast, Normed, norm_operand
from megascale_kernels.fused.rotary import read_heads, write_head_gradients
from megascale_kernels.gemm import Gemm, multiply_by_torch
from megascale_kernels.quantize import E4M3, E5M2, Factor, Operand, norm_bound, scale_of
from megascale_kernels.rotary import Heads, rotary_frequencies, rotary_table

EPSILON = 1e-5
Run = Callable[[], object]


@dataclass(frozen=True)
class Layer:
    """One rank's share of a parallel block.

    ``tokens`` are those of a micro-batch; widths are the whole model's, divided by ``tp``.
    """

    name: str
    hidden: int
    tp: int
    tokens: int
    sequence: int = 2048

    @property
    def width_in(self) -> int:
        """Columns of the merged input projection: q, k, v and the feed-forward's."""
        return 7 * self.hidden // self.tp

    @property
    def width_out(self) -> int:
        """Rows of the merged output projection: attention's result and the activation's."""
        return 5 * self.hidden // self.tp

    @property
    def flops(self) -> int:
        """Of all six GEMMs."""
        return 6 * self.tokens * self.hidden * (self.width_in + self.width_out)

    def gemms(self) -> Mapping[str, tuple[int, int, int]]:
        """(rows, columns, depth) of each GEMM."""
        tokens, hidden, into, out = self.tokens, self.hidden, self.width_in, self.width_out
        return {
            "in, forward": (tokens, into, hidden),
            "in, dgrad": (tokens, hidden, into),
            "in, wgrad": (into, hidden, tokens),
            "out, forward": (tokens, hidden, out),
            "out, dgrad": (tokens, out, hidden),
            "out, wgrad": (out, hidden, tokens),
        }


LAYERS = {
    layer.name: layer
    for layer in (
        Layer("175b tp4", 12288, 4, 8192),
        Layer("30b tp4", 7168, 4, 8192, sequence=4096),
        Layer("13b tp2", 5120, 2, 8192),
        Layer("7b tp2", 4096, 2, 8192),
        Layer("7b tp1", 4096, 1, 8192),
    )
}


def random(device: torch.device, *shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers in bf16 (zeros would draw less power)."""
    return torch.randn(shape, device=device).mul_(scale).bfloat16()


class Tensors:
    """What a layer's GEMMs read and write, random; weights' gradients are float32 sums."""

    def __init__(self, layer: Layer, device: torch.device) -> None:
        tokens, hidden, into, out = layer.tokens, layer.hidden, layer.width_in, layer.width_out
        self.layer, own = layer, tokens // layer.tp
        self.x, self.residual = random(device, own, hidden), random(device, own, hidden)
        self.norm_weight = 1 + random(device, hidden, scale=0.1)
        self.vector = random(device, hidden, scale=0.1)
        self.gathered = random(device, tokens, hidden)
        self.attended = random(device, tokens, hidden // layer.tp, scale=0.3)
        self.weight_in, self.weight_out = (
            random(device, into, hidden, scale=0.02),
            random(device, hidden, out, scale=0.02),
        )
        self.bias = random(device, 4 * hidden // layer.tp, scale=0.1)
        self.d_part, self.d_gathered = (
            random(device, rows, hidden, scale=1e-3) for rows in (own, tokens)
        )
        self.projected, self.d_inputs = (
            random(device, tokens, into),
            random(device, tokens, into, scale=1e-3),
        )
        self.joined = random(device, tokens, out)
        self.beside = torch.empty_like(self.attended)
        self.y = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
        self.main_in, self.main_out = (
            torch.zeros(into, hidden, device=device),
            torch.zeros(out, hidden, device=device),
        )

    @property
    def ffn(self) -> torch.Tensor:
        """The activation's columns of the input projection's result."""
        return self.projected[:, 3 * self.layer.hidden // self.layer.tp :]


def bf16_layer(t: Tensors, gemm: Gemm | None) -> Run:
    """The six GEMMs in bf16, with the bf16 norm and activation.

    ``gemm`` None: by torch; else by its measured choice.
    """
    multiply = multiply_by_torch if gemm is None else gemm.multiply

    def run() -> None:
        _norm_operand(t, NormCast("amax"))
        multiply(Factor(t.gathered), Factor(t.weight_in), t.projected)
        plain_activation(t)
        multiply(Factor(t.joined), Factor(t.weight_out), t.y)
        multiply(Factor(t.d_gathered), Factor(t.weight_out.t()), t.joined)
        multiply(Factor(t.joined.t()), Factor(t.d_gathered.t()), t.main_out, accumulate=True)
        multiply(Factor(t.d_inputs), Factor(t.weight_in.t()), t.y)
        multiply(Factor(t.d_inputs.t()), Factor(t.gathered.t()), t.main_in, accumulate=True)

    return run


@dataclass(frozen=True)
class Recipe:
    """Where scales come from, which format gradients have, and how GEMMs sum.

    - ``separate``: current scaling of tensors, each amax by a pass of its own;
    - ``fused``: the same, amax of norm and activation found by the kernels that make them;
    - ``bound``: the same, but the norm's result leaves its kernel in FP8 under the bound of its
      scale;
    - ``rows``: norm and activation leave their kernels in FP8 with one scale for each row.

    ``by_row``: gradients are cast by row. ``known``: their amax costs nothing, as if the kernels
    that make them had found it.
    """

    scaling: str
    gradients: torch.dtype = E4M3
    fast: bool = True
    power_of_two: bool = False
    by_row: bool = False
    known: bool = False


RECIPES = {
    "tensor, separate amax": Recipe("separate"),
    "tensor, fused amax": Recipe("fused"),
    "tensor, bounded norm": Recipe("bound"),
    "tensor, bounded norm, e5m2 gradients": Recipe("bound", gradients=E5M2),
    "tensor, bounded norm, accurate sums": Recipe("bound", fast=False),
    "tensor, bounded norm, gradients' amax known": Recipe("bound", known=True),
    "tensor, bounded norm, gradients by rows": Recipe("bound", by_row=True),
    "rows": Recipe("rows", by_row=True, power_of_two=True),
}


def fp8_layer(t: Tensors, recipe: Recipe, gemm: Gemm) -> tuple[Run, Run]:
    """A layer by ``recipe``: (GEMMs and all casts, the casts alone); weights are cast before."""
    weight_in, weight_out = (
        _cast_weight(weight, recipe) for weight in (t.weight_in, t.weight_out.t().contiguous())
    )
    x_gathered, d_gathered = (
        plain.quantize(one, dtype, per="row" if by_row else "tensor", power_of_two=True)
        for one, dtype, by_row in (
            (t.gathered, E4M3, recipe.scaling == "rows"),
            (t.d_gathered, recipe.gradients, recipe.by_row),
        )
    )
    bound = scale_of(norm_bound(t.norm_weight, t.vector), E4M3)
    known = [casts.amax(one) if recipe.known else None for one in (t.d_part, t.d_inputs)]
    kept: dict[str, Operand] = {}

    def forward_casts() -> None:
        norm_cast(t, recipe, bound)
        kept["x"] = casts.transpose(x_gathered)
        kept["joined"] = activation_cast(t, recipe)

    def backward_casts() -> None:
        cast(t.d_part, recipe, known[0], transposed=False)
        kept["dy"] = casts.transpose(d_gathered)
        kept["d_inputs"] = cast(t.d_inputs, recipe, known[1], transposed=True)

    def gemms() -> None:
        multiply, fast = gemm.multiply, recipe.fast
        multiply(kept["x"].over_columns(), weight_in.over_columns(), t.projected, fast=fast)
        multiply(kept["joined"].over_columns(), weight_out.over_rows(), t.y, fast=fast)
        multiply(kept["dy"].over_columns(), weight_out.over_columns(), t.joined, fast=fast)
        multiply(
            kept["joined"].over_rows(),
            kept["dy"].over_rows(),
            t.main_out,
            accumulate=True,
            fast=fast,
        )
        multiply(kept["d_inputs"].over_columns(), weight_in.over_rows(), t.y, fast=fast)
        multiply(
            kept["d_inputs"].over_rows(),
            kept["x"].over_rows(),
            t.main_in,
            accumulate=True,
            fast=fast,
        )

    def both() -> None:
        all_casts()
        gemms()

    def all_casts() -> None:
        forward_casts()
        backward_casts()

    return both, all_casts


def surroundings(t: Tensors, head_size: int) -> Run:
    """What a layer computes on a rank besides its GEMMs, forward and backward.

    Rotary embedding, attention, activation, norm and biases.
    """
    device, sequence, width = t.x.device, t.layer.sequence, t.attended.shape[1]
    batch = t.layer.tokens // sequence
    number = width // head_size
    heads, mask = Heads(number, number, head_size), attention_mask(sequence)
    table = rotary_table(
        torch.arange(sequence, device=device).expand(batch, -1),
        rotary_frequencies(head_size, 10_000.0, device),
    )
    columns, gradients = (
        one.view(sequence, batch, -1) for one in (t.projected, t.d_inputs.clone())
    )
    bias, sums = random(device, t.layer.width_in), torch.zeros(t.layer.width_in, device=device)
    q, k, v = (one.requires_grad_() for one in read_heads(columns, bias, heads, table))
    d_attended = random(device, batch, number, sequence, head_size, scale=1e-3)
    norm_weights = [
        _Weight(one.clone().requires_grad_()) for one in (t.norm_weight, t.vector, t.vector)
    ]
    rows = t.x.clone().requires_grad_(), t.residual.clone().requires_grad_()
    normed = norm(*rows, *norm_weights[:2], "layernorm", EPSILON, norm_weights[2:])
    d_normed = torch.randn_like(t.x), torch.randn_like(t.x)

    def run() -> None:
        read_heads(columns, bias, heads, table)
        found = torch.autograd.grad(attention(q, k, v, mask), (q, k, v), d_attended)
        write_head_gradients(gradients, sums, found, heads, table)
        ffn, own = gradients.flatten(0, 1)[:, 3 * width :], slice(3 * width, None)
        write_gradients(ffn, sums[own], t.joined[:, width:], t.ffn, bias[own], "gelu")
        torch.autograd.grad(normed, rows, d_normed, retain_graph=True)

    return run


class _Weight:
    """As much of a weight as the fused norm uses."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.main_grad = value, torch.zeros(value.shape, device=value.device)

    def tracked(self) -> torch.Tensor:
        return self.value


def norm_cast(t: Tensors, recipe: Recipe, bound: torch.Tensor) -> Operand:
    """The norm of this rank's rows in FP8."""
    if recipe.scaling in ("bound", "rows"):
        given = NormCast("given", scale=bound) if recipe.scaling == "bound" else NormCast("rows")
        found = _norm_operand(t, given)
        assert found.operand is not None
        return found.operand
    found = _norm_operand(t, NormCast("amax"))
    assert found.normed is not None
    amax = found.amax if recipe.scaling == "fused" else casts.amax(found.normed)
    assert amax is not None
    return casts.quantize(found.normed, amax=amax, transposed=False)


def _norm_operand(t: Tensors, cast: NormCast) -> Normed:
    vectors = t.vector, t.norm_weight, t.vector
    return norm_operand(t.x, t.residual, *vectors, "layernorm", EPSILON, cast)


def activation_cast(t: Tensors, recipe: Recipe) -> Operand:
    """The output projection's input in FP8, with its transposed copy.

    The attention's heads are copied into rows first.
    """
    if recipe.scaling == "separate":
        plain_activation(t)
        return casts.quantize(t.joined, amax=casts.amax(t.joined))
    t.beside.copy_(t.attended)
    if recipe.scaling == "rows":
        return casts.transpose(activation_operand(t.ffn, t.bias, "gelu", t.beside))
    made, amax = activation_with_amax(t.ffn, t.bias, "gelu", t.beside)
    return casts.quantize(made, amax=amax)


def plain_activation(t: Tensors) -> None:
    """The output projection's input in bf16, as fused.block_inner makes it."""
    others = t.attended.shape[1]
    write_activation(t.joined[:, others:], t.ffn, t.bias, "gelu")
    t.joined[:, :others].copy_(t.attended)


def cast(
    x: torch.Tensor, recipe: Recipe, amax: torch.Tensor | None = None, *, transposed: bool
) -> Operand:
    """A gradient in FP8; ``amax`` None: it is found first."""
    if recipe.by_row:
        return casts.quantize_rows(x, recipe.gradients, transposed=transposed)
    amax = casts.amax(x) if amax is None else amax
    return casts.quantize(x, recipe.gradients, amax=amax, transposed=transposed)


def _cast_weight(weight: torch.Tensor, recipe: Recipe) -> Operand:
    return casts.quantize(weight, amax=casts.amax(weight), power_of_two=recipe.power_of_two)

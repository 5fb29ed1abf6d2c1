"""The declaration of a block: its weights, its operators, and what they keep for backward.

A model is a sequence of *units*: embedding, layers, head. A unit is a tuple of operators in the
order of forward, and an operator lists the stored tensors that it reads and what it keeps for
backward. A layer's unit joins the operators of its sub-blocks
(:mod:`megascale_job.blocks.layer`). The parameter table
(:mod:`megascale_job.sizes.parameter_table`), initial values, checkpoint names, FLOPs
(:mod:`megascale_job.sizes.flops`) and the memory estimate (:mod:`megascale_job.sizes.memory`) are
computed from these tuples. To add a weight, declare it in the module of its block here, and use it
in the module of the same name in :mod:`megascale_trainer.model.blocks`.

*Logical* names (``layers.3.q.weight``) never change with the layout. A *stored* tensor can merge
several parameters row by row, so that one GEMM reads them all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from megascale_job.config import ModelConfig
from megascale_job.layout import Coordinates, RankLayout

Initial = Literal["normal", "zeros", "ones"]
Split = Literal["whole", "even", "padded", "experts"]
Kind = Literal["weight", "bias", "load"]

# Local FFN and vocabulary widths are multiples of this: bf16 tensor cores need K and N in steps of
# 16 bytes.
WIDTH_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Extent:
    """A dimension and how it is split over ranks.

    ``whole``: every rank holds all of it. ``even``: equal parts over tp (heads, or the sequence of
    hidden states); the layout is known to divide it. ``padded``: equal padded widths over tp, of
    which the last ranks can use only a part, or nothing. ``experts``: equal parts over ep.
    """

    size: int
    split: Split

    def local(self, layout: RankLayout) -> int:
        """Size on each rank, including padding."""
        if self.split == "whole":
            return self.size
        if self.split == "even":
            return self.size // layout.tp
        if self.split == "experts":
            return self.size // layout.ep
        return -(-self.size // (layout.tp * WIDTH_MULTIPLE)) * WIDTH_MULTIPLE

    def part(self, at: Coordinates, layout: RankLayout) -> tuple[int, int]:
        """(first, number) of the indices on the rank ``at``, without padding."""
        if self.split == "whole":
            return 0, self.size
        width = self.local(layout)
        index = layout.index_in(at, "ep") if self.split == "experts" else at.tp
        first = min(index * width, self.size)
        return first, min(width, self.size - first)


@dataclass(frozen=True, slots=True)
class LogicalParameter:
    """A logical parameter: ``rows`` of a stored tensor. ``std`` is for ``normal`` values."""

    name: str
    rows: Extent
    initial: Initial
    std: float = 0.0


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor: rows of its parameters, each of the shape ``row`` (none: a vector).

    A row of a matrix has its columns; a row of experts is one expert's matrix. Norms and biases are
    vectors and do not decay. A tensor that is not split is replicated over tp. ``tied``: the first
    and the last unit store the same parameter, each under its own name. ``counted``: its gradient
    counts the choices of experts, and a rule of its own changes it instead of the optimizer.
    """

    name: str
    kind: Kind
    parameters: tuple[LogicalParameter, ...]
    row: tuple[int, ...] = ()
    tied: bool = False
    counted: bool = False

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return bool(self.row)

    @property
    def replicated(self) -> bool:
        """Whether every tp rank holds all of it."""
        return all(parameter.rows.split == "whole" for parameter in self.parameters)

    @property
    def of_experts(self) -> bool:
        """Whether it is split over ep."""
        return any(parameter.rows.split == "experts" for parameter in self.parameters)

    @property
    def matrix_elements(self) -> int:
        """Number of values of all its rows, without padding; of experts those of one expert."""
        rows = sum(1 if self.of_experts else part.rows.size for part in self.parameters)
        return rows * math.prod(self.row)

    def elements(self, layout: RankLayout) -> int:
        """Number of values that a rank stores, including padding."""
        return sum(part.rows.local(layout) for part in self.parameters) * math.prod(self.row)


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that an operator keeps for backward: ``elements`` per token, split over tp.

    ``recomputed``: dropped by recompute: selective. ``torch_only``: kept by torch's own operators
    but not by fused kernels. ``float32``: in float32 whatever the compute dtype is. ``fp8``: in one
    byte per value if the layer's GEMMs are in FP8. ``of_rows``: of the rows of experts.
    """

    elements: Extent
    recomputed: bool = False
    torch_only: bool = False
    float32: bool = False
    fp8: bool = False
    of_rows: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """One step of a unit's forward. ``gemm``: each of its matrices is multiplied once per token.

    ``attention_width`` is the number of query columns in attention (0: no attention). ``top_k``:
    its matrices are those of experts, of which a token is multiplied by so many.
    """

    tensors: tuple[Tensor, ...] = ()
    keeps: tuple[Kept, ...] = ()
    gemm: bool = False
    attention_width: int = 0
    top_k: int = 0

    @property
    def gemm_weights(self) -> int:
        """Number of weights by which every token is multiplied."""
        if not self.gemm:
            return 0
        matrices = sum(tensor.matrix_elements for tensor in self.tensors if tensor.row)
        return matrices * (self.top_k or 1)


Unit = tuple[Operator, ...]


def normal(model: ModelConfig, name: str, rows: Extent, *, out: bool = False) -> LogicalParameter:
    """A parameter with normal initial values; ``out``: it writes to the residual stream."""
    std = model.initializer_std / (math.sqrt(2 * model.layers) if out else 1.0)
    return LogicalParameter(name, rows, "normal", std)


def norm(model: ModelConfig, name: str) -> Operator:
    """A norm of the hidden states, which keeps its input."""
    whole = Extent(model.hidden_size, "whole")
    tensors = [Tensor(name, "weight", (LogicalParameter(name, whole, "ones"),))]
    if model.norm == "layernorm" and model.norm_bias:
        tensors.append(Tensor(name, "bias", (LogicalParameter(name, whole, "zeros"),)))
    sequence_part = Extent(model.hidden_size, "even")  # hidden states are [S / tp, B, H]
    keeps = [Kept(sequence_part)]
    if model.norm == "rmsnorm":  # torch's own operators also keep a float32 intermediate
        keeps.append(Kept(sequence_part, torch_only=True, float32=True))
    return Operator(tuple(tensors), tuple(keeps))


def projections(
    model: ModelConfig,
    kind: str,
    inputs: tuple[LogicalParameter, ...],
    inner: Operator,
    outputs: tuple[LogicalParameter, ...],
    *,
    fp8: bool = True,
) -> Unit:
    """Column-parallel GEMM, ``inner``, row-parallel GEMM; ``kind`` begins their names.

    ``fp8``: they are in FP8 in a layer in FP8.

    Output projections are stored input-major, [in, out], so that every parameter is a block of
    whole rows. Biases of outputs are added once, after the sum over tp, so they are replicated.
    """
    hidden = Extent(model.hidden_size, "whole")
    into = [Tensor(f"{kind}in", "weight", inputs, (hidden.size,))]
    out_of = [Tensor(f"{kind}out", "weight", outputs, (hidden.size,))]
    if model.bias or (model.attention_bias and kind == "attention_"):
        into.append(Tensor(f"{kind}in", "bias", tuple(map(_zeros, inputs))))
    if model.bias:
        for part in outputs:
            bias = LogicalParameter(part.name, hidden, "zeros")
            out_of.append(Tensor(part.name, "bias", (bias,)))
    # Each GEMM keeps its input: the gathered sequence, and the columns of attention and FFN. The
    # result of the first is the input of ``inner``.
    gathered, results = Kept(hidden, fp8=fp8), (Kept(part.rows) for part in inputs)
    columns = tuple(Kept(part.rows, fp8=fp8) for part in outputs)
    return (
        Operator(tuple(into), (gathered, *results), gemm=True),
        inner,
        Operator(tuple(out_of), columns, gemm=True),
    )


def _zeros(parameter: LogicalParameter) -> LogicalParameter:
    return replace(parameter, initial="zeros", std=0.0)

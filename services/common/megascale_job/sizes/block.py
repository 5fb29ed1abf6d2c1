"""Declares the model's weights and operators once; everything else is computed from here.

A model is a sequence of *units*: embedding, layers, head. A unit is a tuple of operators in the
order of forward, and an operator lists the stored tensors that it reads and what it keeps for
backward. The parameter table (:mod:`megascale_job.sizes.parameter_table`), initial values,
checkpoint names, FLOPs (:mod:`megascale_job.sizes.flops`) and the memory estimate
(:mod:`megascale_job.sizes.memory`) are computed from these tuples. To add a weight, declare it here
and use it in the layer's forward (:mod:`megascale_trainer.model.layer`).

*Logical* names (``layers.3.q.weight``) never change with the layout. A *stored* tensor can merge
several parameters row by row, so that one GEMM reads them all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from megascale_job.config import ModelConfig

Initial = Literal["normal", "zeros", "ones"]
Split = Literal["whole", "even", "padded"]
Kind = Literal["weight", "bias"]

# Local FFN and vocabulary widths are multiples of this: bf16 tensor cores need K and N in steps of
# 16 bytes.
WIDTH_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class Extent:
    """A dimension and how it is split over tp.

    ``whole``: every rank holds all of it. ``even``: equal parts (heads, or the sequence of hidden
    states); the layout is known to divide it. ``padded``: equal padded widths, of which the last
    ranks can use only a part, or nothing.
    """

    size: int
    split: Split

    def local(self, tp: int) -> int:
        """Size on each of ``tp`` ranks, including padding."""
        if self.split == "whole":
            return self.size
        if self.split == "even":
            return self.size // tp
        return -(-self.size // (tp * WIDTH_MULTIPLE)) * WIDTH_MULTIPLE

    def part(self, tp_rank: int, tp: int) -> tuple[int, int]:
        """(first, number) of the indices on ``tp_rank``, without padding."""
        if self.split == "whole":
            return 0, self.size
        width = self.local(tp)
        first = min(tp_rank * width, self.size)
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
    """A stored tensor: rows of its parameters by ``columns``; without columns it is a vector.

    Norms and biases are vectors and do not decay. A tensor that is not split is replicated over tp.
    ``tied``: the first and the last unit store the same parameter, each under its own name.
    """

    name: str
    kind: Kind
    parameters: tuple[LogicalParameter, ...]
    columns: int = 0
    tied: bool = False

    @property
    def decays(self) -> bool:
        """Whether weight decay applies."""
        return self.columns > 0

    @property
    def replicated(self) -> bool:
        """Whether every tp rank holds all of it."""
        return all(parameter.rows.split == "whole" for parameter in self.parameters)

    def elements(self, tp: int) -> int:
        """Number of values that a rank stores, including padding."""
        return sum(part.rows.local(tp) for part in self.parameters) * (self.columns or 1)


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that an operator keeps for backward: ``elements`` per token, split over tp.

    ``recomputed``: dropped by recompute: selective. ``torch_only``: kept by torch's own operators
    but not by fused kernels. ``float32``: in float32 whatever the compute dtype is. ``fp8``: in one
    byte per value if the layer's GEMMs are in FP8.
    """

    elements: Extent
    recomputed: bool = False
    torch_only: bool = False
    float32: bool = False
    fp8: bool = False


@dataclass(frozen=True, slots=True)
class Operator:
    """One step of a unit's forward. ``gemm``: each of its matrices is multiplied once per token.

    ``attention_width`` is the number of query columns in attention (0: no attention).
    """

    tensors: tuple[Tensor, ...] = ()
    keeps: tuple[Kept, ...] = ()
    gemm: bool = False
    attention_width: int = 0


Unit = tuple[Operator, ...]


def embedding_unit(model: ModelConfig) -> Unit:
    """Token embedding, split over tp by rows, and learned positions, which are not split."""
    std, hidden = model.initializer_std, model.hidden_size
    tokens = LogicalParameter("embedding", Extent(model.vocab_size, "padded"), "normal", std)
    tables = [Tensor("embedding", "weight", (tokens,), hidden, tied=model.tie_embeddings)]
    if model.positions == "learned":
        rows = Extent(model.sequence_length, "whole")
        positions = LogicalParameter("positions", rows, "normal", std)
        tables.append(Tensor("positions", "weight", (positions,), hidden))
    return (Operator(tuple(tables)),)


def layer_unit(model: ModelConfig) -> Unit:
    """One transformer layer; its names follow the prefix ``layers.N.``.

    Parallel block: one norm, one merged GEMM in, attention and activation, one merged GEMM out.
    Serial block: the same once for attention and once for the FFN.
    """
    std = model.initializer_std
    out_std = std / math.sqrt(2 * model.layers)
    query = Extent(model.heads * model.head_size, "even")
    key_value = Extent(model.key_value_heads * model.head_size, "even")
    ffn = Extent(model.ffn_width, "padded")
    names = (("q", query), ("k", key_value), ("v", key_value))
    heads = tuple(LogicalParameter(name, rows, "normal", std) for name, rows in names)
    gates = ("gate", "up") if model.mlp == "swiglu" else ("up",)
    widths = tuple(LogicalParameter(name, ffn, "normal", std) for name in gates)
    attention_out = LogicalParameter("attention_out", query, "normal", out_std)
    ffn_out = LogicalParameter("ffn_out", ffn, "normal", out_std)
    attended = Kept(query, recomputed=True)  # the result of attention
    rotated = tuple(Kept(part.rows, recomputed=True) for part in heads)
    norms, normed = _head_norms(model, query, key_value)
    # torch's own operators also keep silu(gate)
    silu = (Kept(ffn, recomputed=True, torch_only=True),) if model.mlp == "swiglu" else ()
    if model.block == "parallel":
        # Rotated q, k and v are kept in addition to the input GEMM's result, which the activation
        # still needs; in the serial block they replace it.
        keeps = (attended, *rotated, *normed, *silu)
        inner = Operator(norms, keeps, attention_width=query.size)
        return _sub_block(model, "", (*heads, *widths), inner, (attention_out, ffn_out))
    attention = Operator(norms, (attended, *normed), attention_width=query.size)
    activation = Operator(keeps=silu)
    return (
        *_sub_block(model, "attention_", heads, attention, (attention_out,)),
        *_sub_block(model, "ffn_", widths, activation, (ffn_out,)),
    )


def head_unit(model: ModelConfig) -> Unit:
    """Final norm and vocabulary head.

    The gradient of the logits replaces them; torch's own operators also keep a float32
    intermediate. The input of the final norm is not counted, because it is small compared with the
    logits.
    """
    vocabulary = Extent(model.vocab_size, "padded")
    name = "embedding" if model.tie_embeddings else "head"
    weight = LogicalParameter(name, vocabulary, "normal", model.initializer_std)
    head = Operator(
        (Tensor("head", "weight", (weight,), model.hidden_size, tied=model.tie_embeddings),),
        keeps=(
            Kept(Extent(model.hidden_size, "whole")),
            Kept(vocabulary),
            Kept(vocabulary, torch_only=True, float32=True),
        ),
        gemm=True,
    )
    return (replace(_norm(model, "final_norm"), keeps=()), head)


def _sub_block(
    model: ModelConfig,
    kind: str,
    inputs: tuple[LogicalParameter, ...],
    inner: Operator,
    outputs: tuple[LogicalParameter, ...],
) -> Unit:
    """Norm, column-parallel GEMM, ``inner``, row-parallel GEMM.

    Output projections are stored input-major, [in, out], so that every parameter is a block of
    whole rows. Biases of outputs are added once, after the sum over tp, so they are replicated.
    """
    hidden = Extent(model.hidden_size, "whole")
    into = [Tensor(f"{kind}in", "weight", inputs, hidden.size)]
    out_of = [Tensor(f"{kind}out", "weight", outputs, hidden.size)]
    if model.bias or (model.attention_bias and kind == "attention_"):
        into.append(Tensor(f"{kind}in", "bias", tuple(map(_zeros, inputs))))
    if model.bias:
        for part in outputs:
            bias = LogicalParameter(part.name, hidden, "zeros")
            out_of.append(Tensor(part.name, "bias", (bias,)))
    # Each GEMM keeps its input: the gathered sequence, and the columns of attention and FFN. The
    # result of the first is the input of ``inner``.
    gathered, results = Kept(hidden, fp8=True), (Kept(part.rows) for part in inputs)
    columns = tuple(Kept(part.rows, fp8=True) for part in outputs)
    return (
        _norm(model, f"{kind}norm"),
        Operator(tuple(into), (gathered, *results), gemm=True),
        inner,
        Operator(tuple(out_of), columns, gemm=True),
    )


def _head_norms(
    model: ModelConfig, query: Extent, key_value: Extent
) -> tuple[tuple[Tensor, ...], tuple[Kept, ...]]:
    """Norms of every head of q and of k, one weight for all heads, and the tensors they keep."""
    if not model.qk_norm:
        return (), ()
    size = Extent(model.head_size, "whole")
    names = ("q_norm", "k_norm")
    tensors = tuple(
        Tensor(name, "weight", (LogicalParameter(name, size, "ones"),)) for name in names
    )
    return tensors, tuple(Kept(rows, recomputed=True) for rows in (query, key_value))


def _norm(model: ModelConfig, name: str) -> Operator:
    whole = Extent(model.hidden_size, "whole")
    tensors = [Tensor(name, "weight", (LogicalParameter(name, whole, "ones"),))]
    if model.norm == "layernorm" and model.norm_bias:
        tensors.append(Tensor(name, "bias", (LogicalParameter(name, whole, "zeros"),)))
    sequence_part = Extent(model.hidden_size, "even")  # hidden states are [S / tp, B, H]
    keeps = [Kept(sequence_part)]
    if model.norm == "rmsnorm":  # torch's own operators also keep a float32 intermediate
        keeps.append(Kept(sequence_part, torch_only=True, float32=True))
    return Operator(tuple(tensors), tuple(keeps))


def _zeros(parameter: LogicalParameter) -> LogicalParameter:
    return replace(parameter, initial="zeros", std=0.0)

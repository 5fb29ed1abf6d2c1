"""A mixture of experts in place of the feed-forward block: router, experts, shared experts.

The experts of a layer are one parameter per matrix, [experts, out, in], split over ep and never
over tp. A token multiplies by the matrices of ``top_k`` of them. Every tp rank routes the tokens of
its own part of the sequence, so nothing is gathered for experts; the shared experts are an ordinary
SwiGLU, split over tp, and never in FP8.
"""

from __future__ import annotations

from megascale_job.blocks.mlp import silu
from megascale_job.blocks.parts import (
    Extent,
    Kept,
    Kind,
    LogicalParameter,
    Operator,
    Tensor,
    Unit,
    norm,
    normal,
    projections,
)
from megascale_job.config import ModelConfig


def moe_block(model: ModelConfig) -> Unit:
    """Norm, router, experts, and the shared experts if the model has them."""
    return (norm(model, "ffn_norm"), _router(model), *_experts(model), *_shared(model))


def _router(model: ModelConfig) -> Operator:
    """The router's weight and state; it keeps the normed tokens and the float32 logits.

    ``router.load`` has the choices of each expert in the last step, and ``router.bias`` moves
    against the excess of that load.
    """
    experts = Extent(model.experts.count, "whole")
    weight = normal(model, "router", experts)
    counted: tuple[Kind, ...] = ("bias", "load") if model.experts.bias_rate > 0 else ("load",)
    parameter = LogicalParameter("router", experts, "zeros")
    return Operator(
        (
            Tensor("router", "weight", (weight,), (model.hidden_size,)),
            *(Tensor("router", kind, (parameter,), counted=True) for kind in counted),
        ),
        keeps=(
            Kept(Extent(model.hidden_size, "even")),
            Kept(Extent(model.experts.count, "even"), float32=True),
        ),
        gemm=True,
    )


def _experts(model: ModelConfig) -> Unit:
    """Both products of the experts; they keep their input rows and the result of the first."""
    experts, width = Extent(model.experts.count, "experts"), model.expert_width
    top_k, hidden = model.experts.top_k, model.hidden_size
    into = normal(model, "experts_in", experts)
    out_of = normal(model, "experts_out", experts, out=True)
    # Each token has top_k rows, on the rank that routes it; even loads are assumed.
    rows, results = Extent(top_k * hidden, "even"), Extent(top_k * 2 * width, "even")
    return (
        Operator(
            (Tensor("experts_in", "weight", (into,), (2 * width, hidden)),),
            keeps=(
                Kept(rows, recomputed=True, fp8=True, of_rows=True),
                Kept(results, of_rows=True),
            ),
            gemm=True,
            top_k=top_k,
        ),
        Operator(
            (Tensor("experts_out", "weight", (out_of,), (hidden, width)),), gemm=True, top_k=top_k
        ),
    )


def _shared(model: ModelConfig) -> Unit:
    width = model.experts.shared_ffn_size
    if not width:
        return ()
    columns = Extent(width, "padded")
    inputs = tuple(normal(model, name, columns) for name in ("shared_gate", "shared_up"))
    activation = Operator(keeps=silu(model, width))
    output = normal(model, "shared_out", columns, out=True)
    return projections(model, "shared_", inputs, activation, (output,), fp8=False)

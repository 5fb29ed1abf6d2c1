"""The parallel block (MegaScale section 3.1): attention and feed-forward of one norm's result.

Its projections are merged: one GEMM in, one GEMM out.
"""

from __future__ import annotations

from megascale_job.blocks.attention import attention_out, head_norms, heads, normed_heads, query
from megascale_job.blocks.mlp import ffn_out, silu, widths
from megascale_job.blocks.parts import Kept, Operator, Unit, norm, projections
from megascale_job.config import ModelConfig


def parallel_block(model: ModelConfig) -> Unit:
    """One norm, one merged GEMM in, attention and activation, one merged GEMM out."""
    # Rotated q, k and v are kept in addition to the input GEMM's result, which the activation still
    # needs; in a serial layer they replace it.
    rotated = tuple(Kept(part.rows, recomputed=True) for part in heads(model))
    keeps = (
        Kept(query(model), recomputed=True),  # the result of attention
        *rotated,
        *normed_heads(model),
        *silu(model, model.ffn_width),
    )
    inner = Operator(head_norms(model), keeps, attention_width=query(model).size)
    inputs = (*heads(model), *widths(model))
    return (
        norm(model, "norm"),
        *projections(model, "", inputs, inner, (attention_out(model), ffn_out(model))),
    )

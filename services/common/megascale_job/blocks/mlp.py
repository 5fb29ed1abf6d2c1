"""The dense feed-forward block: GELU or SwiGLU between two projections."""

from __future__ import annotations

from megascale_job.blocks.parts import (
    Extent,
    Kept,
    LogicalParameter,
    Operator,
    Unit,
    norm,
    normal,
    projections,
)
from megascale_job.config import ModelConfig


def mlp_block(model: ModelConfig) -> Unit:
    """Norm, input projections, activation, output projection."""
    activation = Operator(keeps=silu(model, model.ffn_width))
    return (
        norm(model, "ffn_norm"),
        *projections(model, "ffn_", widths(model), activation, (ffn_out(model),)),
    )


def widths(model: ModelConfig) -> tuple[LogicalParameter, ...]:
    """The input projections: with SwiGLU gate and up, else up alone."""
    names = ("gate", "up") if model.mlp == "swiglu" else ("up",)
    return tuple(normal(model, name, Extent(model.ffn_width, "padded")) for name in names)


def ffn_out(model: ModelConfig) -> LogicalParameter:
    """The output projection."""
    return normal(model, "ffn_out", Extent(model.ffn_width, "padded"), out=True)


def silu(model: ModelConfig, width: int) -> tuple[Kept, ...]:
    """What SwiGLU's activation keeps: torch's own operators also keep silu(gate)."""
    if model.mlp != "swiglu":
        return ()
    return (Kept(Extent(width, "padded"), recomputed=True, torch_only=True),)

"""Shared by the sub-blocks of a layer: their context, the residual stream, and norms.

Hidden states are [S / tp, B, H], where S is this rank's part of the sequence if cp cuts it. With
the sequence first, gathering a sequence is a concatenation of contiguous memory. A sub-block is a
function of the stream, the micro-batch's context and its weights; megascale_job.blocks declares the
weights in a module of the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from megascale_job.config import LossConfig, ModelConfig
from megascale_kernels.attention import AttentionMask
from megascale_kernels.block_inner import Attend
from megascale_kernels.operators import LayerOperators
from megascale_kernels.rotary import RotaryTable
from megascale_trainer.model.sharding import ExpertSharding, LayerSharding
from megascale_trainer.weights import Weight, Weights

Input = TypeVar("Input")  # what linear operators read: a tensor, or an activation in FP8
Output = TypeVar("Output")


@dataclass(frozen=True)
class MoeContext:
    """The inputs of a mixture of experts besides the layer's context.

    Args:
        operators, sharding: those in the model's dtype, for norm, router and shared experts.
        experts: the experts of the ep group.
        sequence_weights: float32 [B], the sum of the loss weights of each sequence.
        loss: the coefficients.
        forced_balance: tokens go to experts by turn.
    """

    operators: LayerOperators[torch.Tensor]
    sharding: LayerSharding[torch.Tensor]
    experts: ExpertSharding
    sequence_weights: torch.Tensor
    loss: LossConfig
    forced_balance: bool


@dataclass(frozen=True)
class Context(Generic[Input]):
    """Operators, mask and tables that layers of one window share for one micro-batch.

    ``rotary`` is None with learned positions. With ``recompute_inner`` the results between a
    layer's input and output GEMMs are dropped after forward and computed again in backward
    (recompute: selective). ``attend`` is the attention of this rank's part of the sequence.
    ``moe`` is None in a dense model.
    """

    operators: LayerOperators[Input]
    mask: AttentionMask
    rotary: RotaryTable | None
    recompute_inner: bool
    attend: Attend
    moe: MoeContext | None = None


@dataclass(frozen=True)
class Stream:
    """The residual stream between two sub-blocks: ``x`` plus ``update`` plus the ``biases``.

    The sum is left to the operator that reads the stream next: a norm, or the end of the layer. So
    the stream is written and read once. ``update`` None: nothing is left to add. ``terms``: the
    auxiliary terms of the layer so far, float64 [len(AUXILIARY_TERMS)], already part of the
    gradient; None: none.
    """

    x: torch.Tensor
    update: torch.Tensor | None = None
    biases: Sequence[Weight] = ()
    terms: torch.Tensor | None = None


# Sums over the tokens of a micro-batch that layers add to the objective, besides the loss itself:
# the balance of experts, and the z-loss of routers.
AUXILIARY_TERMS = ("balance", "router_z")


def normalise(
    stream: Stream,
    weights: Weights,
    name: str,
    model: ModelConfig,
    operators: LayerOperators[Input],
) -> tuple[torch.Tensor, Input]:
    """The value of ``stream``, and its norm ``name``."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    x, residual = stream.x, None
    if stream.update is not None:
        x, residual = stream.update, stream.x
    return operators.norm(x, residual, weight, bias, model.norm, model.norm_epsilon, stream.biases)


def projections(
    stream: Stream,
    kind: str,
    core: Callable[..., Input],
    context: Context[Input],
    weights: Weights,
    model: ModelConfig,
    sharding: LayerSharding[Input],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm, column-parallel GEMM, ``core`` with the GEMM's bias, row-parallel GEMM.

    ``kind`` begins the names of the weights, as in megascale_job.blocks.parts.projections.

    Returns:
        The value of ``stream``, and what is to be added to it.
    """
    x, normed = normalise(stream, weights, f"{kind}norm", model, context.operators)
    inputs = sharding.column_parallel(normed, weights[f"{kind}in.weight"])
    function = partial(core, bias=weights.get(f"{kind}in.bias"))
    return x, sharding.row_parallel(inner(function, inputs, context), weights[f"{kind}out.weight"])


def biases(weights: Weights, *names: str) -> list[Weight]:
    """The named biases that the model has."""
    return [bias for name in names if (bias := weights.get(f"{name}.bias")) is not None]


def inner(
    function: Callable[[torch.Tensor], Output], inputs: torch.Tensor, context: Context[Any]
) -> Output:
    """``function`` (attention, activation or both) of ``inputs``; recomputed in backward if set."""
    if not context.recompute_inner:
        return function(inputs)
    recomputed: Output = checkpoint(function, inputs, use_reentrant=False, preserve_rng_state=False)
    return recomputed

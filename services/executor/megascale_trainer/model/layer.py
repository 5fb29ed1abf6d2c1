"""One transformer layer: a function of its input, the micro-batch's context and its weights.

Parallel block (MegaScale section 3.1): y = x + Attention(LN(x)) + MLP(LN(x)) with one norm, one
merged input GEMM and
one merged output GEMM. Serial block: y = x + Attention(LN(x)), then y + MLP(LN(y)). Hidden states
are [S / tp, B, H]: sequence first, so that gathering a sequence is a concatenation of contiguous
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from megascale_common.job.config import JobConfig, ModelConfig
from megascale_kernels.attention import AttentionMask, attention_mask
from megascale_kernels.operators import Operators
from megascale_kernels.rotary import Heads, RotaryTable, rotary_table
from megascale_trainer.batch import MicroBatch
from megascale_trainer.parallel.tensor.linear import column_parallel, row_parallel
from megascale_trainer.parallel.tensor.matmul import TensorParallel
from megascale_trainer.weights import Weight, Weights


@dataclass(frozen=True)
class Context:
    """What layers of one window share for one micro-batch.

    ``rotary`` is None with learned positions. ``recompute_core`` drops what lies between a layer's
    input and output GEMMs after forward and computes it again in backward (recompute: selective).
    """

    operators: Operators
    mask: AttentionMask
    rotary: RotaryTable | None
    recompute_core: bool


def batch_context(
    batch: MicroBatch, config: JobConfig, window: int, operators: Operators
) -> Context:
    """The context of one micro-batch for the layers with this sliding ``window`` (0: full causal
    attention).
    """
    model = config.model
    mask = attention_mask(
        batch.tokens.shape[1],
        window=window,
        documents=batch.documents if config.data.document_attention else None,
        device=batch.tokens.device,
    )
    rotary = None
    if model.positions == "rope":
        rotary = rotary_table(batch.position, model.head_size, model.rope_theta)
    return Context(operators, mask, rotary, config.parallelism.recompute == "selective")


def layer(
    x: torch.Tensor, context: Context, weights: Weights, model: ModelConfig, tp: TensorParallel
) -> torch.Tensor:
    """[S / tp, B, H] to [S / tp, B, H]; ``weights`` are the layer's own, by their names inside the
    layer.
    """
    operators = context.operators
    attend = partial(
        operators.block_inner,
        heads=_local_heads(model, tp),
        rotary=context.rotary,
        mask=context.mask,
        activation=None,
    )
    if model.block == "parallel":
        x, normed = normalise(x, None, weights, "norm", model, operators)
        inputs = _input(normed, weights, "", tp)
        joined = _core(
            partial(attend, bias=weights.get("in.bias"), activation=model.mlp), inputs, context
        )
        biases = _biases(weights, "attention_out", "ffn_out")
        return operators.add(x, _output(joined, weights, "", tp), biases)
    x, normed = normalise(x, None, weights, "attention_norm", model, operators)
    inputs = _input(normed, weights, "attention_", tp)
    attended = _core(partial(attend, bias=weights.get("attention_in.bias")), inputs, context)
    attended, biases = (
        _output(attended, weights, "attention_", tp),
        _biases(weights, "attention_out"),
    )
    x, normed = normalise(attended, x, weights, "ffn_norm", model, operators, biases)
    inputs = _input(normed, weights, "ffn_", tp)
    activate = partial(operators.activate, bias=weights.get("ffn_in.bias"), activation=model.mlp)
    expanded = _output(_core(activate, inputs, context), weights, "ffn_", tp)
    return operators.add(x, expanded, _biases(weights, "ffn_out"))


def normalise(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weights: Weights,
    name: str,
    model: ModelConfig,
    operators: Operators,
    added: Sequence[Weight] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` + its biases ``added`` + ``residual`` (None: ``x``), and the norm ``name`` of the
    model's kind of it.
    """
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    return operators.norm(x, residual, weight, bias, model.norm, model.norm_epsilon, added)


def _local_heads(model: ModelConfig, tp: TensorParallel) -> Heads:
    return Heads(model.heads // tp.size, model.key_value_heads // tp.size, model.head_size)


def _input(x: torch.Tensor, weights: Weights, kind: str, tp: TensorParallel) -> torch.Tensor:
    """Column-parallel projection: [S / tp, B, H] to this rank's columns for the whole sequence, [S,
    B, width].
    """
    return column_parallel(x, weights[f"{kind}in.weight"], tp)  # what reads it adds the bias


def _output(x: torch.Tensor, weights: Weights, kind: str, tp: TensorParallel) -> torch.Tensor:
    """Row-parallel projection: [S, B, width] to [S / tp, B, H], summed over tp; what adds it adds
    its biases, once.
    """
    return row_parallel(x, weights[f"{kind}out.weight"], tp)


def _biases(weights: Weights, *names: str) -> list[Weight]:
    """Those of the named biases that the model has."""
    return [bias for name in names if (bias := weights.get(f"{name}.bias")) is not None]


def _core(
    function: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, context: Context
) -> torch.Tensor:
    """``function`` of the input GEMM's result: attention, activation or both; kept or recomputed in
    backward.
    """
    if not context.recompute_core:
        return function(inputs)
    recomputed: torch.Tensor = checkpoint(
        function, inputs, use_reentrant=False, preserve_rng_state=False
    )
    return recomputed

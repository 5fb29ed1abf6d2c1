"""One transformer layer: a function of its input, the micro-batch's context and its weights.

Parallel block (MegaScale section 3.1): y = x + Attention(LN(x)) + MLP(LN(x)) with one norm, one merged input GEMM and
one merged output GEMM. Serial block: y = x + Attention(LN(x)), then y + MLP(LN(y)). Hidden states are [S / tp, B, H]:
sequence first, so that gathering a sequence is a concatenation of contiguous memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from megascale_common.job_config import JobConfig, ModelConfig
from megascale_executor.trainer.batch import MicroBatch
from megascale_executor.trainer.model.linear import column_parallel, row_parallel
from megascale_executor.trainer.model.weights import Weights
from megascale_executor.trainer.parallel.tensor.products import TensorParallel
from megascale_kernels.activation import gelu, swiglu
from megascale_kernels.attention import AttentionMask, attention, attention_mask
from megascale_kernels.norm import layer_norm, rms_norm
from megascale_kernels.rotary import RotaryTable, apply_rotary, rotary_table


@dataclass(frozen=True)
class Context:
    """What layers of one window share for one micro-batch.

    ``rotary`` is None with learned positions. ``recompute_core`` drops what lies between a layer's input and output
    GEMMs after forward and computes it again in backward (recompute: selective).
    """

    mask: AttentionMask
    rotary: RotaryTable | None
    recompute_core: bool


def batch_context(batch: MicroBatch, config: JobConfig, window: int) -> Context:
    """The context of one micro-batch for the layers with this sliding ``window`` (0: full causal attention)."""
    model = config.model
    mask = attention_mask(
        batch.tokens.shape[1],
        window=window,
        document_start=batch.document_start if config.data.document_attention else None,
        device=batch.tokens.device,
    )
    rotary = None
    if model.positions == "rope":
        rotary = rotary_table(batch.position, model.head_size, model.rope_theta)
    return Context(mask, rotary, config.parallelism.recompute == "selective")


def layer(x: torch.Tensor, context: Context, weights: Weights, model: ModelConfig, tp: TensorParallel) -> torch.Tensor:
    """[S / tp, B, H] to [S / tp, B, H]; ``weights`` are the layer's own, by their names inside the layer."""
    if model.block == "parallel":
        inputs = _input(normalise(x, weights, "norm", model), weights, "", tp)
        attention_width = (model.heads + 2 * model.key_value_heads) * model.head_size // tp.size
        joined = _core(partial(_attend_and_activate, attention_width, context, model), inputs, context)
        return x + _output(joined, weights, "", ("attention_out", "ffn_out"), tp)
    heads = _input(normalise(x, weights, "attention_norm", model), weights, "attention_", tp)
    attended = _core(partial(_attend, context, model), heads, context)
    x = x + _output(attended, weights, "attention_", ("attention_out",), tp)
    ffn = _input(normalise(x, weights, "ffn_norm", model), weights, "ffn_", tp)
    return x + _output(_core(partial(_activate, model), ffn, context), weights, "ffn_", ("ffn_out",), tp)


def normalise(x: torch.Tensor, weights: Weights, name: str, model: ModelConfig) -> torch.Tensor:
    """The norm ``name`` of the model's kind over the last dimension."""
    weight = weights[f"{name}.weight"].tracked()
    if model.norm == "rmsnorm":
        return rms_norm(x, weight, model.norm_epsilon)
    bias = weights.get(f"{name}.bias")
    return layer_norm(x, weight, bias.tracked() if bias is not None else None, model.norm_epsilon)


def _input(x: torch.Tensor, weights: Weights, kind: str, tp: TensorParallel) -> torch.Tensor:
    """Column-parallel projection: [S / tp, B, H] to this rank's columns for the whole sequence, [S, B, width]."""
    y = column_parallel(x, weights[f"{kind}in.weight"], tp)
    bias = weights.get(f"{kind}in.bias")
    return y if bias is None else y + bias.tracked()


def _output(x: torch.Tensor, weights: Weights, kind: str, biases: tuple[str, ...], tp: TensorParallel) -> torch.Tensor:
    """Row-parallel projection: [S, B, width] to [S / tp, B, H], summed over tp; then the biases, once."""
    y = row_parallel(x, weights[f"{kind}out.weight"], tp)
    for name in biases:
        if (bias := weights.get(f"{name}.bias")) is not None:
            y = y + bias.tracked()
    return y


def _core(function: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, context: Context) -> torch.Tensor:
    """``function`` of the input GEMM's result: attention, activation or both; kept or recomputed in backward."""
    if not context.recompute_core:
        return function(inputs)
    recomputed: torch.Tensor = checkpoint(function, inputs, use_reentrant=False, preserve_rng_state=False)
    return recomputed


def _attend_and_activate(
    attention_width: int, context: Context, model: ModelConfig, inputs: torch.Tensor
) -> torch.Tensor:
    """The parallel block's core: attention of the first columns beside the activation of the others."""
    heads, ffn = inputs.tensor_split((attention_width,), dim=-1)
    return torch.cat((_attend(context, model, heads), _activate(model, ffn)), dim=-1)


def _attend(context: Context, model: ModelConfig, inputs: torch.Tensor) -> torch.Tensor:
    """Attention of this rank's heads: [S, B, (heads + 2 kv heads) d / tp], q then k then v, to [S, B, heads d / tp]."""
    d = model.head_size
    total = inputs.shape[-1] // d
    kv = total * model.key_value_heads // (model.heads + 2 * model.key_value_heads)
    heads = inputs.reshape(*inputs.shape[:2], total, d)
    query, key, value = heads.tensor_split((total - 2 * kv, total - kv), dim=2)
    if context.rotary is not None:
        query, key = apply_rotary(query, context.rotary), apply_rotary(key, context.rotary)
    return attention(query, key, value, context.mask)


def _activate(model: ModelConfig, inputs: torch.Tensor) -> torch.Tensor:
    """The feed-forward activation; for swiglu ``inputs`` holds gate then up."""
    if model.mlp == "swiglu":
        gate, up = inputs.chunk(2, dim=-1)
        return swiglu(gate, up)
    return gelu(inputs)

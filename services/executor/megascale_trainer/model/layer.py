"""One transformer layer: a function of its input, the micro-batch's context and its weights.

Parallel block (MegaScale section 3.1): y = x + Attention(LN(x)) + MLP(LN(x)) with one norm, one
merged input GEMM and one merged output GEMM. Serial block: y = x + Attention(LN(x)), then y +
MLP(LN(y)). Hidden states are [S / tp, B, H]: sequence first, so that gathering a sequence is a
concatenation of contiguous memory. Biases are added by the operator that reads a GEMM's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from megascale_job.config import JobConfig, ModelConfig
from megascale_kernels.attention import AttentionMask, attention_mask, chosen_backend
from megascale_kernels.block_inner import AttentionContext
from megascale_kernels.documents import Documents
from megascale_kernels.operators import LayerOperators
from megascale_kernels.rotary import (
    HeadNorms,
    Heads,
    RotaryTable,
    llama3_frequencies,
    rotary_frequencies,
    rotary_table,
)
from megascale_trainer.batch import MicroBatch
from megascale_trainer.model.sharding import LayerSharding
from megascale_trainer.weights import Weight, Weights

Input = TypeVar("Input")  # what linear operators read: a tensor, or an activation in FP8


@dataclass(frozen=True)
class Context(Generic[Input]):
    """What layers of one window share for one micro-batch.

    ``rotary`` is None with learned positions. ``recompute_inner`` drops what lies between a layer's
    input and output GEMMs after forward and computes it again in backward (recompute: selective).
    """

    operators: LayerOperators[Input]
    mask: AttentionMask
    rotary: RotaryTable | None
    recompute_inner: bool


def batch_context(
    batch: MicroBatch, config: JobConfig, window: int, operators: LayerOperators[Input]
) -> Context[Input]:
    """The context of one micro-batch for layers with this sliding ``window`` (0: full causal)."""
    model = config.model
    mask = attention_mask(
        batch.tokens.shape[1],
        window=window,
        documents=batch.documents if config.data.document_attention else None,
        device=batch.tokens.device,
    )
    rotary = None
    if model.positions == "rope":
        rotary = rotary_table(batch.position, _frequencies(model, batch.position.device))
    return Context(operators, mask, rotary, config.parallelism.recompute == "selective")


def attention_backends(config: JobConfig, device: torch.device) -> str:
    """What computes attention here, for the log: "flash_attn_4 (documents), torch (window 1024)".

    It depends on the packages of the node. "torch" is torch's own choice.
    """
    model, training, tp = config.model, config.training, config.parallelism.tp
    shape = (training.micro_batch_size, model.heads // tp, model.sequence_length, model.head_size)
    dtype = torch.float32 if training.precision == "fp32" else torch.bfloat16
    query = torch.empty((1, 1, 1, 1), dtype=dtype, device=device).expand(shape)
    batch, sequence = shape[0], shape[2]
    documents = None
    if config.data.document_attention:
        bounds = torch.empty(0, dtype=torch.int32, device=device)
        documents = Documents(bounds, (batch, sequence), batch + 1, sequence)
    found = []
    for window in sorted({model.window_of(layer) for layer in range(model.layers)}):
        mask = attention_mask(sequence, window=window, documents=documents, device=device)
        kinds = ["documents"] if mask.documents else []
        kinds += [f"window {mask.window}"] if mask.window else []
        name = chosen_backend(query, mask) or "torch"
        found.append(f"{name} ({', '.join(kinds) or 'causal'})")
    return ", ".join(found)


def _frequencies(model: ModelConfig, device: torch.device) -> torch.Tensor:
    """Rotary frequencies, float64 [d/2], changed as the model asks for it."""
    frequencies = rotary_frequencies(model.head_size, model.rope_theta, device)
    scaling = model.rope_scaling
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        return llama3_frequencies(
            frequencies,
            scaling.factor,
            scaling.low_frequency_factor,
            scaling.high_frequency_factor,
            scaling.original_sequence_length,
        )
    return frequencies


def layer(
    x: torch.Tensor,
    context: Context[Input],
    weights: Weights,
    model: ModelConfig,
    sharding: LayerSharding[Input],
) -> torch.Tensor:
    """[S / tp, B, H] to [S / tp, B, H]; ``weights`` by their names inside the layer."""
    block = _parallel_block if model.block == "parallel" else _serial_block
    return block(x, context, weights, model, sharding)


def _parallel_block(
    x: torch.Tensor,
    context: Context[Input],
    weights: Weights,
    model: ModelConfig,
    sharding: LayerSharding[Input],
) -> torch.Tensor:
    operators = context.operators
    x, normed = normalise(x, None, weights, "norm", model, operators)
    inputs = sharding.column_parallel(normed, weights["in.weight"])
    core = partial(
        operators.block_inner,
        bias=weights.get("in.bias"),
        context=_attention(context, weights, model, sharding),
        activation=model.mlp,
    )
    joined = sharding.row_parallel(_inner(core, inputs, context), weights["out.weight"])
    return operators.add(x, joined, _biases(weights, "attention_out", "ffn_out"))


def _serial_block(
    x: torch.Tensor,
    context: Context[Input],
    weights: Weights,
    model: ModelConfig,
    sharding: LayerSharding[Input],
) -> torch.Tensor:
    operators = context.operators
    x, normed = normalise(x, None, weights, "attention_norm", model, operators)
    inputs = sharding.column_parallel(normed, weights["attention_in.weight"])
    core = partial(
        operators.block_inner,
        bias=weights.get("attention_in.bias"),
        context=_attention(context, weights, model, sharding),
        activation=None,
    )
    attended = sharding.row_parallel(_inner(core, inputs, context), weights["attention_out.weight"])
    # The norm adds the residual and the biases of the projection before it, in one operator.
    biases = _biases(weights, "attention_out")
    x, normed = normalise(attended, x, weights, "ffn_norm", model, operators, biases)
    inputs = sharding.column_parallel(normed, weights["ffn_in.weight"])
    activate = partial(operators.activate, bias=weights.get("ffn_in.bias"), activation=model.mlp)
    expanded = sharding.row_parallel(_inner(activate, inputs, context), weights["ffn_out.weight"])
    return operators.add(x, expanded, _biases(weights, "ffn_out"))


def normalise(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weights: Weights,
    name: str,
    model: ModelConfig,
    operators: LayerOperators[Input],
    added: Sequence[Weight] = (),
) -> tuple[torch.Tensor, Input]:
    """``x`` + its biases ``added`` + ``residual`` (None: ``x`` alone), and its norm ``name``."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    return operators.norm(x, residual, weight, bias, model.norm, model.norm_epsilon, added)


def _attention(
    context: Context[Input], weights: Weights, model: ModelConfig, sharding: LayerSharding[Input]
) -> AttentionContext:
    """What attention of a layer is computed with, for this rank's heads."""
    tp = sharding.size
    heads = Heads(model.heads // tp, model.key_value_heads // tp, model.head_size)
    norms = None
    if model.qk_norm:
        norms = HeadNorms(weights["q_norm.weight"], weights["k_norm.weight"], model.norm_epsilon)
    return AttentionContext(heads, context.rotary, context.mask, norms)


def _biases(weights: Weights, *names: str) -> list[Weight]:
    """Those of the named biases that the model has."""
    return [bias for name in names if (bias := weights.get(f"{name}.bias")) is not None]


def _inner(
    function: Callable[[torch.Tensor], Input], inputs: torch.Tensor, context: Context[Input]
) -> Input:
    """``function`` (attention, activation or both) of the input GEMM's result; maybe recomputed."""
    if not context.recompute_inner:
        return function(inputs)
    recomputed: Input = checkpoint(function, inputs, use_reentrant=False, preserve_rng_state=False)
    return recomputed

"""The context that layers read for one micro-batch: attention mask, rotary table, operators."""

from __future__ import annotations

import torch

from megascale_job.config import JobConfig, ModelConfig
from megascale_kernels.attention import attention_mask, chosen_backend
from megascale_kernels.block_inner import Attend
from megascale_kernels.documents import Documents
from megascale_kernels.operators import LayerOperators
from megascale_kernels.rotary import (
    llama3_frequencies,
    rotary_frequencies,
    rotary_table,
    yarn_frequencies,
)
from megascale_trainer.batch import MicroBatch
from megascale_trainer.model.blocks.parts import Context, Input, MoeContext


def batch_context(
    batch: MicroBatch,
    position: torch.Tensor,
    config: JobConfig,
    window: int,
    operators: LayerOperators[Input],
    attend: Attend,
    moe: MoeContext | None = None,
) -> Context[Input]:
    """The context of one micro-batch for layers with this sliding ``window`` (0: full causal).

    ``position`` [B, S / cp] is that of this rank's part of the sequence.
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
        frequencies = _frequencies(model, position.device)
        rotary = rotary_table(position, frequencies, model.rope_scaling.rotated_scale)
    selective = config.parallelism.recompute == "selective"
    return Context(operators, mask, rotary, selective, attend, moe)


def attention_backends(config: JobConfig, device: torch.device) -> str:
    """The attention backends, for the log: "flash_attn_4 (documents), torch (window 1024)".

    They depend on the packages of the node. "torch" means that torch chooses among its own.
    """
    model, training, parallel = config.model, config.training, config.parallelism
    heads = model.heads // (parallel.tp * parallel.cp)
    shape = (training.micro_batch_size, heads, model.sequence_length, model.head_size)
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
    """The model's rotary frequencies, float64 [d/2], with its scaling."""
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
    if scaling.kind == "yarn":
        return yarn_frequencies(
            frequencies,
            model.rope_theta,
            scaling.factor,
            scaling.beta_fast,
            scaling.beta_slow,
            scaling.original_sequence_length,
        )
    return frequencies

"""Export to Megatron-core: ``iter_0000010/mp_rank_00/model_optim_rng.pt`` for one layout.

This is Megatron's checkpoint format ``torch``, which its training loads (``--ckpt-format torch``)
and the only one that its converters read and write. A file holds one rank's part of the model and
the arguments that describe it, but no optimizer state and no random state (``--no-load-optim
--no-load-rng``, or ``--finetune``). The format is a pickle: it is written here and never read.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megascale_checkpoint.export.architectures import check_model
from megascale_checkpoint.export.megatron_layout import (
    VOCABULARY_MULTIPLE,
    Cut,
    check,
    padded_vocabulary,
    stage_tensors,
)
from megascale_checkpoint.export.output import Report, new_folder
from megascale_checkpoint.export.stored import ParameterReader
from megascale_job.config import ModelConfig

FILE, TRACKER = "model_optim_rng.pt", "latest_checkpointed_iteration.txt"
CHECKPOINT_VERSION = 3.0  # since 2020: rows of linear_qkv by group
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def export_megatron(
    stored: ParameterReader,
    model: ModelConfig,
    to: Path,
    dtype: str,
    cut: Cut,
    progress: Report,
) -> int:
    """Write the float32 parameters of a checkpoint in ``dtype`` (bf16, fp32) into folder ``to``.

    Memory holds one pipeline stage at a time, and each stage reads a parameter once. Returns the
    bytes of the tensors.

    Raises:
        RequestError: Megatron-core has no such model, or the layout does not divide it.
        ExistsError: ``to`` is taken.
        DamagedError: a file of the checkpoint is missing, cut short or changed.
        OSError: a file cannot be read or written.
    """
    check(model, cut)
    check_model(stored.shapes, model)
    step = stored.manifest.step
    # Megatron takes iteration 0 for "no checkpoint" and calls a model without a step a release.
    name = f"iter_{step:07d}" if step else "release"
    arguments = megatron_arguments(stored, model, dtype, cut)
    stages = [list(stage_tensors(model, cut, stage, stored.shapes)) for stage in range(cut.pp)]
    done = size = 0
    total = 4 * sum(
        math.prod(stored.shapes[name])
        for tensors in stages
        for tensor in tensors
        for name in tensor.logical
    )
    with new_folder(to) as folder:
        for stage, wanted in enumerate(stages):
            ranks: list[dict[str, torch.Tensor]] = [{} for _ in range(cut.tp)]
            for tensor in wanted:
                values = [stored.read(logical) for logical in tensor.logical]
                done += sum(each.nbytes for each in values)
                for rank, part in enumerate(tensor.parts(values)):
                    # Contiguous, because torch.save would store the whole array behind a view.
                    kept = torch.from_numpy(np.ascontiguousarray(part)).to(DTYPES[dtype])
                    ranks[rank][tensor.name] = kept
                    size += kept.nbytes
                progress(done, total)
            for rank, tensors in enumerate(ranks):
                path = folder / name / _rank_folder(cut, rank, stage) / FILE
                path.parent.mkdir(parents=True)
                torch.save(
                    {
                        "args": arguments,
                        "checkpoint_version": CHECKPOINT_VERSION,
                        "iteration": step,
                        "model": tensors,
                    },
                    path,
                )
        # Read by --load, which otherwise finds no checkpoint.
        (folder / TRACKER).write_text(str(step) if step else name)
    return size


def megatron_arguments(
    stored: ParameterReader, model: ModelConfig, dtype: str, cut: Cut
) -> argparse.Namespace:
    """Megatron's arguments that describe the model, as ``--use-checkpoint-args`` reads them."""
    state = stored.manifest.small_state
    values: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_width,
        "num_attention_heads": model.heads,
        "group_query_attention": model.key_value_heads != model.heads,
        "num_query_groups": model.key_value_heads,
        "kv_channels": model.head_size,
        "seq_length": model.sequence_length,
        "max_position_embeddings": model.sequence_length,
        "position_embedding_type": "rope",
        "add_position_embedding": False,
        "use_rotary_position_embeddings": True,
        "rotary_base": int(model.rope_theta) if model.rope_theta % 1 == 0 else model.rope_theta,
        "rotary_percent": 1.0,
        "use_rope_scaling": model.rope_scaling.kind == "llama3",
        "rope_scaling_factor": model.rope_scaling.factor,
        "rotary_interleaved": False,
        "add_bias_linear": model.bias,
        "add_qkv_bias": model.bias or model.attention_bias,
        "qk_layernorm": model.qk_norm,
        "disable_bias_linear": not model.bias,
        "swiglu": model.mlp == "swiglu",
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "norm_epsilon": model.norm_epsilon,
        "layernorm_epsilon": model.norm_epsilon,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": padded_vocabulary(model, cut.tp),
        "make_vocab_size_divisible_by": VOCABULARY_MULTIPLE,
        "tokenizer_type": "NullTokenizer",
        "tokenizer_model": None,
        "init_method_std": model.initializer_std,
        "num_experts": None,
        "bert_binary_head": False,
        "params_dtype": DTYPES[dtype],
        "bf16": dtype == "bf16",
        "fp16": False,
        "tensor_model_parallel_size": cut.tp,
        "pipeline_model_parallel_size": cut.pp,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "world_size": cut.tp * cut.pp,
        "transformer_impl": "transformer_engine",
        "ckpt_format": "torch",
        "iteration": stored.manifest.step,
        "consumed_train_samples": int(state.get("consumed_samples", 0)),
        "consumed_valid_samples": 0,
    }
    return argparse.Namespace(**values)


def _rank_folder(cut: Cut, rank: int, stage: int) -> str:
    """Folder of a tensor-parallel rank; Megatron names the stage only if there are several."""
    return f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if cut.pp > 1 else "")

"""Checkpoints of models with random weights, and the logits that the trainer computes from one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from tests.harness.checkpoint_files import image_of, stored_plan, write_images
from tests.harness.training import start, tiny_job
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import init_device_mesh

from megascale_checkpoint.restore import stored_checkpoint as restore
from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_job.sizes.parameter_table import parameter_table, shard_layout
from megascale_trainer.batch import MicroBatch
from megascale_trainer.process.bootstrap import destroy_groups
from megascale_trainer.trainer import Trainer

STEP = 7
# Odd sizes, which every layout above pads; two heads share a key and a value.
SIZES = {
    "layers": 3,
    "hidden_size": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn_size": 90,
    "vocab_size": 101,
    "sequence_length": 24,
    "bias": False,
}
LLAMA = {**SIZES, "block": "serial", "mlp": "swiglu", "norm": "rmsnorm"}
PARALLEL = {**SIZES, "block": "parallel", "norm": "layernorm"}
OVER_PROJECTION = {"qk_norm": True, "qk_norm_over": "projection"}
# By name: (the architecture that it is exported as, fields of trainer.model).
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**LLAMA, "rope_theta": 5e5, "norm_epsilon": 1e-6}),
    "llama-biases": ("LlamaForCausalLM", {**LLAMA, "bias": True, "kv_heads": 4}),
    "llama3": (
        "LlamaForCausalLM",
        {
            **LLAMA,
            "rope_theta": 5e5,
            "head_dim": 20,
            "rope_scaling": {
                "kind": "llama3",
                "factor": 8.0,
                "low_frequency_factor": 1.0,
                "high_frequency_factor": 4.0,
                "original_sequence_length": 16,
            },
        },
    ),
    "llama-linear": (
        "LlamaForCausalLM",
        {**LLAMA, "rope_scaling": {"kind": "linear", "factor": 4.0}},
    ),
    "llama-yarn": (
        "LlamaForCausalLM",
        {
            **LLAMA,
            "rope_theta": 50.0,
            "rope_scaling": {
                "kind": "yarn",
                "factor": 4.0,
                "original_sequence_length": 16,
                "beta_fast": 2.0,
                "beta_slow": 0.5,
                "attention_factor": 1.5,
            },
        },
    ),
    "llama-tied": ("LlamaForCausalLM", {**LLAMA, "tie_embeddings": True}),
    "qwen2": ("Qwen2ForCausalLM", {**LLAMA, "attention_bias": True, "norm_epsilon": 1e-6}),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "qk_norm": True, "head_dim": 24, "rope_theta": 1e6}),
    "qwen3-yarn": (
        "Qwen3ForCausalLM",
        {
            **LLAMA,
            "qk_norm": True,
            "rope_theta": 200.0,
            "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_sequence_length": 256},
        },
    ),
    "mistral-yarn": (
        "MistralForCausalLM",
        {
            **LLAMA,
            "window": 5,
            "rope_theta": 50.0,
            "rope_scaling": {
                "kind": "yarn",
                "factor": 2.0,
                "original_sequence_length": 12,
                "beta_fast": 1.5,
                "attention_factor": 0.8,
            },
        },
    ),
    "mistral": ("MistralForCausalLM", {**LLAMA, "window": 5}),
    "ministral": ("MinistralForCausalLM", {**LLAMA, "layer_windows": [5, 0, 5]}),
    "mixtral": (
        "MixtralForCausalLM",
        {**LLAMA, "rope_theta": 1e6, "window": 7, "experts": {"count": 6}},
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        {
            **LLAMA,
            "qk_norm": True,
            "head_dim": 24,
            "experts": {"count": 8, "top_k": 3, "ffn_size": 40, "dense_layers": 1},
        },
    ),
    "qwen3-moe-not-normalised": (
        "Qwen3MoeForCausalLM",
        {**LLAMA, "qk_norm": True, "experts": {"count": 4, "ffn_size": 24, "normalise": False}},
    ),
    "olmoe": (
        "OlmoeForCausalLM",
        {**LLAMA, **OVER_PROJECTION, "experts": {"count": 6, "top_k": 3, "normalise": False}},
    ),
    "olmoe-normalised": (
        "OlmoeForCausalLM",
        {
            **LLAMA,
            **OVER_PROJECTION,
            "kv_heads": 4,
            "rope_scaling": {"kind": "linear", "factor": 4.0},
            "experts": {"count": 4},
        },
    ),
    "cohere": ("CohereForCausalLM", {**PARALLEL, "mlp": "swiglu", "norm_bias": False}),
    "stablelm": ("StableLmForCausalLM", {**PARALLEL, "mlp": "swiglu"}),
    "phi": ("PhiForCausalLM", {**PARALLEL, "mlp": "gelu", "bias": True}),
    "phi-without-biases": ("PhiForCausalLM", {**PARALLEL, "mlp": "gelu", "norm_bias": False}),
    "starcoder2": (
        "Starcoder2ForCausalLM",
        {**SIZES, "block": "serial", "mlp": "gelu", "norm": "layernorm", "bias": True, "window": 6},
    ),
}


def job_of(model: dict[str, Any], parallelism: dict[str, Any] | None = None) -> JobConfig:
    """A job of ``model``."""
    return from_accepted(tiny_job(model=model, parallelism=parallelism or {}))


def with_ep(fields: dict[str, Any], **sizes: int) -> dict[str, Any]:
    """A layout of ``sizes`` for a model of ``fields``, over which its experts are split as well.

    A model with one norm over all heads has more of dp instead of tp.
    """
    if fields.get("qk_norm_over") == "projection":
        sizes = {**sizes, "tp": 1, "dp": sizes.get("tp", 1) * sizes.get("dp", 1)}
    return {**sizes, "ep": 2} if "experts" in fields else sizes


def random_values(config: JobConfig) -> dict[str, NDArray[np.float32]]:
    """Random whole parameters of a job's model, of a size at which its logits are near 1."""
    random = np.random.default_rng(5)
    one = parameter_table(job_of(asdict(config.model)), 0)
    values = {}
    for piece in one.slices:
        noise = random.standard_normal(piece.global_shape, np.float32) * np.float32(0.12)
        is_norm = "norm" in piece.name and piece.name.endswith("weight")
        values[piece.name] = noise + np.float32(1.0 if is_norm else 0.0)
    return values


def write_model(folder: Path, config: JobConfig, *, described: bool = True) -> str:
    """A committed checkpoint of random values in the job's layout; returns the manifest's URI."""
    ranks = range(config.layout.world_size)
    layouts = [shard_layout(parameter_table(config, rank)) for rank in ranks]
    values = random_values(config)
    small_state: dict[str, Any] = {"skipped_updates": 0, "consumed_samples": 8 * STEP}
    if described:
        small_state["model"] = asdict(config.model)
    images = [image_of(layout, values) for layout in layouts]
    states = [small_state for _ in ranks]
    return write_images(folder, layouts, images, step=STEP, small_states=states)


def tokens_of(config: JobConfig, batch: int = 2) -> torch.Tensor:
    """Random tokens, int64 [batch, S]."""
    generator = torch.Generator().manual_seed(3)
    shape = (batch, config.model.sequence_length)
    return torch.randint(config.model.vocab_size, shape, generator=generator)


def trainer_logits(
    config: JobConfig, manifest_uri: str, step: int, tokens: torch.Tensor, folder: Path
) -> torch.Tensor:
    """Logits [B, S, V] of ``tokens`` by a trainer of one rank that has loaded a checkpoint."""
    folder.mkdir(exist_ok=True)
    trainer = start(config, 0, 1, folder)
    try:
        layout = trainer.state.shard_layout()
        image = bytearray(layout.slot_bytes)
        restore.fill(stored_plan(manifest_uri, step), 0, layout, memoryview(image))
        trainer.state.load_from(torch.frombuffer(image, dtype=torch.uint8))
        trainer.finish_load(step)
        return _logits(trainer, tokens)
    finally:
        destroy_groups()


def _logits(trainer: Trainer, tokens: torch.Tensor) -> torch.Tensor:
    zeros = np.zeros(tokens.shape, np.int64)
    arrays = {
        "tokens": tokens.numpy(),
        "targets": zeros,
        "loss_weight": zeros.astype(np.float32),
        "position": np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape),
        "document_start": zeros,
    }
    return trainer.logits(MicroBatch.from_numpy(arrays))


def load_dcp_shards(
    rank: int, world_size: int, folder: Path, *, export: str, names: list[str]
) -> dict[str, bool]:
    """Program of one rank: load parts of an export with torch's loader, by rows and by columns.

    Returns by name whether rows and columns hold what a rank that loads all of it has.
    """
    # Not above: every process of `make test` imports this module when it collects the tests, and
    # these take longer than torch itself.
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.tensor import Replicate, Shard, zeros

    store = FileStore(str(folder / "dcp"), world_size)
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=store)
    try:
        mesh = init_device_mesh("cpu", (world_size,))
        found = {}
        for name in names:
            shape = FileSystemReader(export).read_metadata().state_dict_metadata[f"model.{name}"]
            parts = []
            for placement in (Replicate(), Shard(0), Shard(1)):
                tensor = zeros(*shape.size, device_mesh=mesh, placements=[placement])
                load({"model": {name: tensor}}, checkpoint_id=export)
                parts.append(tensor)
            whole = parts[0].to_local()
            assert parts[1].to_local().shape[0] < whole.shape[0]
            found[name] = all(torch.equal(part.full_tensor(), whole) for part in parts[1:])
            found[name] &= bool(whole.any())
        return found
    finally:
        dist.destroy_process_group()

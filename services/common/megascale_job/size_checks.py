"""Checks of the model's sizes, the layout and the batch; a part of what validation finds."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megascale_job.config import JobConfig
from megascale_job.problems import JobProblem

# Far above what is trained today, and far below what would exhaust the memory of the driver or the
# CLI when they compute with it.
_LIMITS = {
    "trainer.model.layers": 4096,
    "trainer.model.hidden_size": 2**20,
    "trainer.model.heads": 2**16,
    "trainer.model.kv_heads": 2**16,
    "trainer.model.head_dim": 2**16,
    "trainer.model.ffn_size": 2**20,
    "trainer.model.vocab_size": 2**24,
    "trainer.model.sequence_length": 2**24,
    "trainer.model.window": 2**24,
    "trainer.parallelism.virtual_stages": 4096,
    "trainer.training.steps": 2**40,
    "trainer.training.global_batch_size": 2**24,
    "trainer.training.micro_batch_size": 2**24,
    "trainer.training.bucket_mib": 65_536,
    "trainer.evaluation.interval_steps": 2**40,
    "trainer.evaluation.batches": 10**6,
    "checkpoint.interval_steps": 2**40,
    "recovery.max_restarts": 10**6,
    "recovery.max_restarts_without_progress": 10**6,
    "recovery.spare_nodes": 10**4,
    "recovery.divergence_steps": 10**6,
}
MAX_WORLD_SIZE = 2**17  # ranks of a job: above the largest that anybody has reported


def sizes(config: JobConfig) -> Iterator[JobProblem]:
    """Sizes that are not positive."""
    model, parallel, training = config.model, config.parallelism, config.training
    positive = {
        "trainer.model.layers": model.layers,
        "trainer.model.hidden_size": model.hidden_size,
        "trainer.model.heads": model.heads,
        "trainer.model.vocab_size": model.vocab_size,
        "trainer.model.sequence_length": model.sequence_length,
        "trainer.parallelism.tp": parallel.tp,
        "trainer.parallelism.cp": parallel.cp,
        "trainer.parallelism.dp": parallel.dp,
        "trainer.parallelism.pp": parallel.pp,
        "trainer.parallelism.ep": parallel.ep,
        "trainer.parallelism.virtual_stages": parallel.virtual_stages,
        "trainer.training.steps": training.steps,
        "trainer.training.global_batch_size": training.global_batch_size,
        "trainer.training.micro_batch_size": training.micro_batch_size,
        "trainer.training.bucket_mib": training.bucket_mib,
    }
    for name, value in positive.items():
        if value < 1:
            yield JobProblem(name, f"{value} is not positive", "give at least 1")
    for name, value in {
        "trainer.model.ffn_size": model.ffn_size,
        "trainer.model.kv_heads": model.kv_heads,
        "trainer.model.head_dim": model.head_dim,
    }.items():
        if value < 0:
            yield JobProblem(
                name, f"{value} is negative", "give a positive number, or leave it out"
            )
    if model.window < 0:
        yield JobProblem(
            "trainer.model.window",
            f"{model.window} is negative",
            "give a width in tokens, or 0 for none",
        )
    if model.layer_windows and (
        len(model.layer_windows) != model.layers or min(model.layer_windows) < 0
    ):
        windows, layers = len(model.layer_windows), model.layers
        yield JobProblem(
            "trainer.model.layer_windows",
            f"{'1 window' if windows == 1 else f'{windows} windows'} for "
            f"{'1 layer' if layers == 1 else f'{layers} layers'}, the smallest is "
            f"{min(model.layer_windows)}",
            "give one width in tokens per layer, 0 for none, or leave the list out and set "
            "trainer.model.window",
        )


def limits(config: JobConfig) -> Iterator[JobProblem]:
    """Sizes that are too large for the driver to compute with."""
    for path, limit in _LIMITS.items():
        section, _, name = path.removeprefix("trainer.").partition(".")
        value = getattr(getattr(config, section), name)
        if value > limit:
            yield JobProblem(path, f"{value} is out of range", f"give at most {limit}")
    sizes = config.parallelism
    if sizes.tp * sizes.cp * sizes.dp * sizes.pp > MAX_WORLD_SIZE or sizes.ep > MAX_WORLD_SIZE:
        yield JobProblem(
            "trainer.parallelism",
            f"tp * cp * dp * pp is above {MAX_WORLD_SIZE} ranks",
            "use fewer ranks",
        )
    if len(sizes.stage_layers) > _LIMITS["trainer.model.layers"]:
        yield JobProblem(
            "trainer.parallelism.stage_layers",
            f"{len(sizes.stage_layers)} entries",
            "give one per stage",
        )


def model(config: JobConfig) -> Iterator[JobProblem]:
    """Relations between the model's sizes."""
    model = config.model
    if model.hidden_size % model.heads and not model.head_dim:
        multiple = model.hidden_size // model.heads * model.heads or model.heads
        yield JobProblem(
            "trainer.model.hidden_size",
            f"{model.hidden_size} is not a multiple of trainer.model.heads = {model.heads}",
            f"use {multiple} or another multiple, or give trainer.model.head_dim",
        )
    elif model.positions == "rope" and model.head_dim % 2:
        yield JobProblem(
            "trainer.model.head_dim", f"{model.head_dim} is odd; rope rotates pairs", "make it even"
        )
    elif model.positions == "rope" and model.head_size % 2:
        yield JobProblem(
            "trainer.model.heads",
            f"the head size {model.hidden_size}/{model.heads} = {model.head_size} is odd; "
            "rope rotates pairs",
            "choose heads so that hidden_size/heads is even, or positions: learned",
        )
    if model.heads % model.key_value_heads:
        yield JobProblem(
            "trainer.model.kv_heads",
            f"trainer.model.heads = {model.heads} is not a multiple of {model.key_value_heads}",
            "use a divisor of trainer.model.heads",
        )
    for name, value in {
        "norm_epsilon": model.norm_epsilon,
        "initializer_std": model.initializer_std,
    }.items():
        if not 0 < value < 1:
            yield JobProblem(
                f"trainer.model.{name}", f"{value} is out of range", "give a number between 0 and 1"
            )
    if model.attention_bias and not model.bias and model.block == "parallel":
        yield JobProblem(
            "trainer.model.attention_bias",
            "the parallel block has one bias for q, k, v and the feed-forward layer",
            "set trainer.model.bias: true, or trainer.model.block: serial",
        )
    yield from _rotation(config)


def _rotation(config: JobConfig) -> Iterator[JobProblem]:
    """Angles of rotary embedding."""
    model = config.model
    if not (math.isfinite(model.rope_theta) and model.rope_theta > 1):
        yield JobProblem(
            "trainer.model.rope_theta",
            f"{model.rope_theta} is out of range",
            "give a number above 1",
        )
    scaling, path = model.rope_scaling, "trainer.model.rope_scaling"
    if scaling.kind == "none":
        return
    if model.positions != "rope":
        yield JobProblem(
            f"{path}.kind",
            f"{scaling.kind} with positions: {model.positions}",
            "leave rope_scaling out, or set trainer.model.positions: rope",
        )
    if not (math.isfinite(scaling.factor) and scaling.factor >= 1):
        yield JobProblem(f"{path}.factor", f"{scaling.factor} is out of range", "give 1 or more")
    if scaling.kind != "llama3":
        return
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    if not (math.isfinite(high) and 0 < low < high):
        yield JobProblem(
            f"{path}.high_frequency_factor",
            f"{high} is not above low_frequency_factor = {low}, which is above 0",
            "give those of the model, such as 4 and 1",
        )
    if not 0 < scaling.original_sequence_length <= _LIMITS["trainer.model.sequence_length"]:
        yield JobProblem(
            f"{path}.original_sequence_length",
            f"{scaling.original_sequence_length} is out of range",
            "give the tokens of the sequences that the model was first trained on, such as 8192",
        )


def parallelism(config: JobConfig) -> Iterator[JobProblem]:
    """Layouts that cannot be cut that way."""
    model, parallel = config.model, config.parallelism
    divided = {
        "trainer.model.heads": model.heads,
        "trainer.model.kv_heads": model.kv_heads,  # 0: as many as heads, which are above
        "trainer.model.hidden_size": model.hidden_size,
        "trainer.model.sequence_length": model.sequence_length,
    }
    for name, value in divided.items():
        if value % parallel.tp:
            why = " (sequence parallelism splits it)" if name.endswith("sequence_length") else ""
            yield JobProblem(
                "trainer.parallelism.tp",
                f"{name} = {value} is not a multiple of tp = {parallel.tp}{why}",
                f"use a tp that divides {value}",
            )  # fmt: skip
    if parallel.virtual_stages > 1 and parallel.pp == 1:
        yield JobProblem(
            "trainer.parallelism.virtual_stages",
            f"{parallel.virtual_stages} at pp = 1: there is nothing to interleave",
            "use 1",
        )
    if parallel.pipeline_schedule != "1f1b" and parallel.pp == 1:
        yield JobProblem(
            "trainer.parallelism.pipeline_schedule",
            f"{parallel.pipeline_schedule} at pp = 1: there is no bubble to fill",
            "use 1f1b",
        )
    stages, virtual_stages = parallel.stage_layers, parallel.pp * parallel.virtual_stages
    if stages and len(stages) != virtual_stages:
        yield JobProblem(
            "trainer.parallelism.stage_layers",
            f"{'1 entry' if len(stages) == 1 else f'{len(stages)} entries'} for "
            f"pp * virtual_stages = {virtual_stages}",
            "give one per virtual stage, in the order of the model",
        )
    elif stages and (min(stages) < 1 or sum(stages) != model.layers):
        yield JobProblem(
            "trainer.parallelism.stage_layers",
            f"{list(stages)} adds up to {sum(stages)}, trainer.model.layers is {model.layers}",
            "give positive numbers that add up to trainer.model.layers",
        )
    elif not stages and model.layers < virtual_stages:
        yield JobProblem(
            "trainer.parallelism.virtual_stages"
            if model.layers >= parallel.pp
            else "trainer.parallelism.pp",
            f"trainer.model.layers = {model.layers} is too few for pp * virtual_stages = "
            f"{virtual_stages}",
            "use fewer stages: each holds at least one layer",
        )


def batch(config: JobConfig) -> Iterator[JobProblem]:
    """Batches that the layout cannot split."""
    global_batch_size = config.training.global_batch_size
    unit = config.training.micro_batch_size * config.parallelism.dp
    if global_batch_size % unit:
        yield JobProblem(
            "trainer.training.global_batch_size",
            f"{global_batch_size} is not a multiple of micro_batch_size * dp = {unit}",
            f"use {-(-global_batch_size // unit) * unit}",
        )
    elif config.parallelism.virtual_stages > 1 and config.micro_batches % config.parallelism.pp:
        unit *= config.parallelism.pp
        several = config.micro_batches != 1
        yield JobProblem(
            "trainer.training.global_batch_size",
            f"gives {config.micro_batches} micro-batch{'es' if several else ''} per replica; "
            "interleaving requires a multiple of pp",
            f"use {-(-global_batch_size // unit) * unit}, or trainer.parallelism.virtual_stages: 1",
        )


def not_built(config: JobConfig) -> Iterator[JobProblem]:
    """What the specification can express and nothing runs yet."""
    parallel = config.parallelism
    for name in ("cp", "ep"):
        value = getattr(parallel, name)
        if value > 1:
            yield JobProblem(f"trainer.parallelism.{name}", f"{value} is not built yet", "use 1")

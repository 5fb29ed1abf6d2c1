"""A job's sections ``training``, ``schedule``, ``loss`` and ``telemetry``, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megascale_job.problems import JobProblem
from megascale_job.sections.fields import ADDED, WIDE, bounds
from megascale_job.sections.model import ModelConfig
from megascale_job.sections.parallelism import ParallelismConfig

# FP8 matrix products need rows, columns and depths in multiples of this, on every tensor-parallel
# rank.
FP8_MULTIPLE = 16

Precision = Literal["bf16", "fp32", "fp8"]
Fp8Format = Literal["hybrid", "e4m3"]
ParameterGather = Literal["bf16", "fp8"]
FastAccumulation = Literal[
    "forward", "all", "none", "input_projections", "all_but_output_projections"
]
Kernels = Literal["torch", "triton", "auto"]
Spans = Literal["none", "phases", "micro_batches"]
Decay = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Config:
    """Recipe of ``precision: fp8``; current scaling, as in Megatron's recipe "tensorwise".

    ``format`` hybrid: gradients in e5m2 with one scale per tensor; e4m3: gradients in e4m3 with one
    scale per token. Everything else is in e4m3 with one scale per tensor. ``parameter_gather``: the
    format in which weights are gathered over dp after an update; the numbers are the same.
    ``fast_accumulation``: products that a GPU may sum with fewer bits; no effect on CPUs.
    """

    format: Fp8Format = "hybrid"
    layers_at_start_in_bf16: int = 0
    layers_at_end_in_bf16: int = 0
    parameter_gather: ParameterGather = field(default="bf16", metadata=ADDED)
    fast_accumulation: FastAccumulation = field(
        default="all_but_output_projections", metadata=ADDED
    )

    def layers_of(self, layers: int) -> range:
        """The layers, of ``layers`` in all, whose matrix products are in FP8."""
        return range(self.layers_at_start_in_bf16, layers - self.layers_at_end_in_bf16)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Length, batch, precision and kernels of a run.

    ``bucket_mib`` limits a gradient bucket in MiB; a bucket has whole layers, at least one. With
    ``cuda_graphs`` the kernels of a layer are launched together; no effect on CPUs. With
    ``forced_balance`` tokens go to the experts by turn, for benchmarks: the model learns nothing.
    """

    steps: int = field(metadata=bounds(1, 2**40, bits=64))
    global_batch_size: int = field(metadata=bounds(1, 2**24))
    micro_batch_size: int = field(default=1, metadata=bounds(1, 2**24))
    seed: int = field(default=1234, metadata=WIDE)
    precision: Precision = "bf16"
    deterministic: bool = False
    bucket_mib: int = field(default=64, metadata=bounds(1, 65_536))
    kernels: Kernels = "auto"
    fp8: Fp8Config = field(default_factory=Fp8Config)
    # Builds in which the default was false train without graphs, with the same numbers.
    cuda_graphs: bool = field(default=True, metadata=ADDED)
    forced_balance: bool = field(default=False, metadata=ADDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate: linear warm-up, then ``decay`` to ``min_ratio`` of the peak at the end."""

    warmup_steps: int = field(default=0, metadata=WIDE)
    decay: Decay = "cosine"
    min_ratio: float = field(default=0.1, metadata=bounds(0, 1, remedy="give 0 to 1"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Token cross entropy plus ``z_loss`` * log(Z)^2, and terms of the layers with experts.

    Each is a coefficient, but ``chunk_rows``: tokens whose logits exist at once (0: those of a
    whole micro-batch). ``sequence_balance`` and ``global_balance``: shares of an expert in the
    choices times its mean score, over a sequence and over the global batch. ``router_z_loss``:
    log(Z)^2 of the router (arXiv 2202.08906).
    """

    z_loss: float = field(default=0.0, metadata=bounds(0, remedy="give 0 (off) or more"))
    sequence_balance: float = field(
        default=0.0, metadata=bounds(0, remedy="give 0 (off) or more", added=True)
    )
    global_balance: float = field(
        default=0.0, metadata=bounds(0, remedy="give 0 (off) or more", added=True)
    )
    router_z_loss: float = field(
        default=0.0, metadata=bounds(0, remedy="give 0 (off) or more", added=True)
    )
    chunk_rows: int = field(
        default=0, metadata=bounds(0, 2**30, remedy="give 0 (whole) or more", added=True)
    )

    def chunk_steps(self, steps: int, sequences: int, tp: int) -> int:
        """Positions of each tp rank in one chunk, of ``steps`` that it has of each sequence."""
        return min(steps, self.chunk_rows // (sequences * tp)) if self.chunk_rows else steps


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetryConfig:
    """Trackers that get the step records, in the job's folder on rank 0's node, and timers.

    ``spans``: each rank measures the phases of a step with its first two micro-batches, or all
    micro-batches.
    """

    tensorboard: bool = False
    wandb: bool = field(default=False, metadata=ADDED)
    mlflow: bool = field(default=False, metadata=ADDED)
    spans: Spans = field(default="phases", metadata=ADDED)


def batch_problems(training: TrainingConfig, parallel: ParallelismConfig) -> Iterator[JobProblem]:
    """Batches that the layout cannot split."""
    global_batch_size = training.global_batch_size
    unit = training.micro_batch_size * parallel.dp
    micro_batches = global_batch_size // unit
    if global_batch_size % unit:
        yield JobProblem(
            "trainer.training.global_batch_size",
            f"{global_batch_size} is not a multiple of micro_batch_size * dp = {unit}",
            f"use {-(-global_batch_size // unit) * unit}",
        )
    elif parallel.virtual_stages > 1 and micro_batches % parallel.pp:
        unit *= parallel.pp
        several = micro_batches != 1
        yield JobProblem(
            "trainer.training.global_batch_size",
            f"gives {micro_batches} micro-batch{'es' if several else ''} per replica; "
            "interleaving requires a multiple of pp",
            f"use {-(-global_batch_size // unit) * unit}, or trainer.parallelism.virtual_stages: 1",
        )


def chunk_problems(
    training: TrainingConfig, loss: LossConfig, parallel: ParallelismConfig
) -> Iterator[JobProblem]:
    """Chunks of the loss that have no token of each rank and sequence."""
    least = training.micro_batch_size * parallel.tp
    if 0 < loss.chunk_rows < least:
        yield JobProblem(
            "trainer.loss.chunk_rows",
            f"{loss.chunk_rows} is less than one token of each sequence and tensor-parallel rank, "
            f"micro_batch_size * tp = {least}",
            f"use {least} or more, or 0 for the whole micro-batch",
        )


def router_problems(
    model: ModelConfig, training: TrainingConfig, loss: LossConfig
) -> Iterator[JobProblem]:
    """Fields for a router in a job whose model has none."""
    if model.experts.count > 0:
        return
    remedy = "leave it out, or give trainer.model.experts.count"
    if training.forced_balance:
        problem = "true, and the model has no experts"
        yield JobProblem("trainer.training.forced_balance", problem, remedy)
    for name in ("sequence_balance", "global_balance", "router_z_loss"):
        coefficient = getattr(loss, name)
        if coefficient > 0:
            problem = f"{coefficient:g}, and the model has no experts"
            yield JobProblem(f"trainer.loss.{name}", problem, remedy)


def schedule_problems(schedule: ScheduleConfig, steps: int) -> Iterator[JobProblem]:
    """A warm-up that is longer than the run."""
    if not 0 <= schedule.warmup_steps <= max(steps, 0):
        yield JobProblem(
            "trainer.schedule.warmup_steps",
            f"{schedule.warmup_steps} is outside 0 to trainer.training.steps = {steps}",
            "warm up within the run",
        )


def fp8_problems(training: TrainingConfig, model: ModelConfig, tp: int) -> Iterator[JobProblem]:
    """Problems of FP8 in a job whose sizes fit its layout; none for other precisions."""
    if training.precision != "fp8":
        return
    yield from _fp8_layers(training.fp8, model.layers)
    yield from _fp8_widths(model, tp)
    sequence_part = model.sequence_length // tp
    tokens = sequence_part * training.micro_batch_size
    if tokens % FP8_MULTIPLE:
        yield JobProblem(
            "trainer.training.micro_batch_size",
            f"a micro-batch has sequence_length / tp * {training.micro_batch_size} = "
            f"{'1 token' if tokens == 1 else f'{tokens} tokens'} on each rank; "
            f"precision fp8 requires a multiple of {FP8_MULTIPLE}",
            f"use trainer.model.sequence_length: {_next(model.sequence_length, tp)}, or "
            "trainer.training.precision: bf16",
        )


def _fp8_layers(recipe: Fp8Config, layers: int) -> Iterator[JobProblem]:
    for name in ("layers_at_start_in_bf16", "layers_at_end_in_bf16"):
        value = getattr(recipe, name)
        if not 0 <= value <= layers:
            yield JobProblem(
                f"trainer.training.fp8.{name}",
                f"{value} is outside 0 to trainer.model.layers = {layers}",
                "give a number of layers",
            )
            return
    if not recipe.layers_of(layers):
        yield JobProblem(
            "trainer.training.fp8",
            f"no layer of trainer.model.layers = {layers} is left in FP8",
            "keep fewer layers in bf16, or use precision: bf16",
        )


def _fp8_widths(model: ModelConfig, tp: int) -> Iterator[JobProblem]:
    """Widths in the merged projections of a rank that FP8 cannot use."""
    if model.hidden_size % (FP8_MULTIPLE * tp):
        yield JobProblem(
            "trainer.model.hidden_size",
            f"{model.hidden_size} is not a multiple of {FP8_MULTIPLE} * tp = {FP8_MULTIPLE * tp}, "
            "as precision fp8 requires",
            f"use {_next(model.hidden_size, tp)}, or precision: bf16",
        )
    keys = model.key_value_heads * model.head_size
    if keys % (FP8_MULTIPLE * tp):
        yield JobProblem(
            "trainer.model.kv_heads",
            f"keys are {keys} wide, not a multiple of {FP8_MULTIPLE} * tp = {FP8_MULTIPLE * tp}, "
            "as precision fp8 requires",
            "use more key/value heads or wider heads, or precision: bf16",
        )
    experts = model.experts
    if not experts.count or experts.dense_layers:
        yield from _fp8_ffn("ffn_size", model.ffn_width, tp)
    if experts.count:  # experts are not cut by tp
        name = "experts.ffn_size" if experts.ffn_size else "ffn_size"
        yield from _fp8_ffn(name, model.expert_width, None)
        yield from _fp8_ffn("experts.shared_ffn_size", experts.shared_ffn_size, tp)


def _fp8_ffn(name: str, width: int, tp: int | None) -> Iterator[JobProblem]:
    """A width that FP8 cannot use; ``tp`` None: no rank has a part of it."""
    multiple = FP8_MULTIPLE * (tp or 1)
    if width % multiple:
        unit = f"{FP8_MULTIPLE}" if tp is None else f"{FP8_MULTIPLE} * tp = {multiple}"
        yield JobProblem(
            f"trainer.model.{name}",
            f"{width} is not a multiple of {unit}, as precision fp8 requires",
            f"use {_next(width, tp or 1)}, or precision: bf16",
        )


def _next(value: int, tp: int) -> int:
    """The smallest size from ``value`` on that FP8 can use on ``tp`` ranks."""
    return -(-value // (FP8_MULTIPLE * tp)) * FP8_MULTIPLE * tp

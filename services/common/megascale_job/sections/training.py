"""A job's sections about its run: batch, precision, schedule, loss and telemetry; their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megascale_job.problems import JobProblem
from megascale_job.sections.fields import ADDED, WIDE, bounds
from megascale_job.sections.model import ModelConfig
from megascale_job.sections.parallelism import ParallelismConfig

# FP8 matrix products take rows, columns and depths in multiples of it, on every tensor-parallel
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
    """What ``precision: fp8`` does; current scaling, as Megatron's recipe "tensorwise".

    ``format`` hybrid: gradients in e5m2 with one scale for each tensor; e4m3: gradients in e4m3
    with one for each token. All else is in e4m3 with one for each tensor. ``parameter_gather``: in
    which format weights travel over dp after an update, with the same numbers.
    ``fast_accumulation``: which products a GPU may sum with fewer bits; without effect on CPUs.
    """

    format: Fp8Format = "hybrid"
    layers_at_start_in_bf16: int = 0
    layers_at_end_in_bf16: int = 0
    parameter_gather: ParameterGather = field(default="bf16", metadata=ADDED)
    fast_accumulation: FastAccumulation = field(
        default="all_but_output_projections", metadata=ADDED
    )

    def layers_of(self, layers: int) -> range:
        """Those of so many layers whose matrix products are in FP8."""
        return range(self.layers_at_start_in_bf16, layers - self.layers_at_end_in_bf16)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Length, batch, precision and kernels of a run.

    ``bucket_mib`` bounds a gradient bucket in MiB; a bucket holds whole layers, at least one. With
    ``cuda_graphs`` the kernels of a layer are launched together, without effect on CPUs.
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
    # Builds that know it without this default train without graphs, with the same numbers.
    cuda_graphs: bool = field(default=True, metadata=ADDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate: linear warm-up, then ``decay`` to ``min_ratio`` of the peak at the last."""

    warmup_steps: int = field(default=0, metadata=WIDE)
    decay: Decay = "cosine"
    min_ratio: float = field(default=0.1, metadata=bounds(0, 1, remedy="give 0 to 1"))


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """Token cross entropy plus ``z_loss`` * log(Z)^2."""

    z_loss: float = field(default=0.0, metadata=bounds(0, remedy="give 0 (off) or more"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TelemetryConfig:
    """Trackers that get the step records, in the job's folder where rank 0 runs, and timers.

    ``spans`` is what each rank measures of a step: its phases with the first two micro-batches, or
    all of them.
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


def schedule_problems(schedule: ScheduleConfig, steps: int) -> Iterator[JobProblem]:
    """A warm-up that is longer than the run."""
    if not 0 <= schedule.warmup_steps <= max(steps, 0):
        yield JobProblem(
            "trainer.schedule.warmup_steps",
            f"{schedule.warmup_steps} is outside 0 to trainer.training.steps = {steps}",
            "warm up within the run",
        )


def fp8_problems(training: TrainingConfig, model: ModelConfig, tp: int) -> Iterator[JobProblem]:
    """What of a job, whose sizes fit its layout, cannot run in FP8; nothing without FP8."""
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
    """The widths that the merged projections of a rank consist of."""
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
    if model.ffn_width % (FP8_MULTIPLE * tp):
        yield JobProblem(
            "trainer.model.ffn_size",
            f"{model.ffn_width} is not a multiple of {FP8_MULTIPLE} * tp = {FP8_MULTIPLE * tp}, "
            "as precision fp8 requires",
            f"use {_next(model.ffn_width, tp)}, or precision: bf16",
        )


def _next(value: int, tp: int) -> int:
    """The smallest multiple from ``value`` on that FP8 takes on ``tp`` ranks."""
    return -(-value // (FP8_MULTIPLE * tp)) * FP8_MULTIPLE * tp

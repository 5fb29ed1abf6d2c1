"""Checks of ``precision: fp8``: the formats' limits on shapes, each with its remedy.

FP8 matrix products take rows, columns and depths in multiples of 16, on every tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator

from megascale_job.config import JobConfig
from megascale_job.problems import JobProblem

FP8_MULTIPLE = 16


def fp8_problems(config: JobConfig) -> Iterator[JobProblem]:
    """What of ``config``, whose sizes fit its layout, cannot run in FP8; nothing without FP8."""
    if config.training.precision != "fp8":
        return
    yield from _layers(config)
    yield from _widths(config)
    training, tp = config.training, config.parallelism.tp
    sequence_part = config.model.sequence_length // tp
    tokens = sequence_part * training.micro_batch_size
    if tokens % FP8_MULTIPLE:
        yield JobProblem(
            "trainer.training.micro_batch_size",
            f"a micro-batch has sequence_length / tp * {training.micro_batch_size} = "
            f"{'1 token' if tokens == 1 else f'{tokens} tokens'} on each rank; "
            f"precision fp8 requires a multiple of {FP8_MULTIPLE}",
            f"use trainer.model.sequence_length: {_next(config.model.sequence_length, tp)}, or "
            "trainer.training.precision: bf16",
        )


def _layers(config: JobConfig) -> Iterator[JobProblem]:
    recipe, layers = config.training.fp8, config.model.layers
    for name in ("layers_at_start_in_bf16", "layers_at_end_in_bf16"):
        value = getattr(recipe, name)
        if not 0 <= value <= layers:
            yield JobProblem(
                f"trainer.training.fp8.{name}",
                f"{value} is outside 0 to trainer.model.layers = {layers}",
                "give a number of layers",
            )
            return
    if not config.fp8_layers:
        yield JobProblem(
            "trainer.training.fp8",
            f"no layer of trainer.model.layers = {layers} is left in FP8",
            "keep fewer layers in bf16, or use precision: bf16",
        )


def _widths(config: JobConfig) -> Iterator[JobProblem]:
    """The widths that the merged projections of a rank consist of."""
    model, tp = config.model, config.parallelism.tp
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

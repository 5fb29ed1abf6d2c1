"""Checks a job's sections about data, for :mod:`megascale_job.validation`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megascale_job.data_config import DataConfig, DataSource, EvaluationConfig
from megascale_job.problems import JobProblem

_MAX_PATH = 4096  # the kernel's own limit
_MAX_SOURCES = 1024
_SHA256_DIGITS = 64
_MAX_SKIPS = 1024
_MAX_SKIPPED_STEPS = 10**9
NO_SOURCES = JobProblem(
    "trainer.data.sources",
    "no source given",
    "give at least one .bin/.idx prefix (`megascale data tokenize` makes one)",
)


def data_problems(data: DataConfig) -> Iterator[JobProblem]:
    """What is wrong with a job's section ``trainer.data``."""
    if not data.sources:
        yield NO_SOURCES
    yield from _sources("trainer.data.sources", data.sources)
    yield from _skips(data)
    tokenizer = data.tokenizer
    if len(tokenizer.path) > _MAX_PATH:
        yield JobProblem(
            "trainer.data.tokenizer.path", "too long", f"use at most {_MAX_PATH} characters"
        )
    if tokenizer.kind == "bpe" and not tokenizer.path:
        yield JobProblem(
            "trainer.data.tokenizer.path", "missing for kind bpe", "give the tokenizer file"
        )
    digits = tokenizer.sha256.lower()
    if digits and (len(digits) != _SHA256_DIGITS or set(digits) - set("0123456789abcdef")):
        yield JobProblem(
            "trainer.data.tokenizer.sha256",
            "not a SHA-256",
            f"give {_SHA256_DIGITS} hexadecimal digits",
        )


def _skips(data: DataConfig) -> Iterator[JobProblem]:
    field = "trainer.data.skips"
    if len(data.skips) > _MAX_SKIPS:
        yield JobProblem(field, f"{len(data.skips)} skips", f"use at most {_MAX_SKIPS}")
    for number, skip in enumerate(data.skips[:_MAX_SKIPS]):
        for name, least in (("after_step", 0), ("steps", 1)):
            value = getattr(skip, name)
            if not least <= value <= _MAX_SKIPPED_STEPS:
                yield JobProblem(
                    f"{field}[{number}].{name}",
                    f"{value} is out of range",
                    f"give {least} to {_MAX_SKIPPED_STEPS}",
                )


def _sources(field: str, sources: tuple[DataSource, ...]) -> Iterator[JobProblem]:
    if len(sources) > _MAX_SOURCES:
        yield JobProblem(field, f"{len(sources)} sources", f"use at most {_MAX_SOURCES}")
    for index, source in enumerate(sources[:_MAX_SOURCES]):
        where = f"{field}[{index}]"
        if not source.prefix:
            yield JobProblem(f"{where}.prefix", "empty", "give the path without .bin/.idx")
        elif len(source.prefix) > _MAX_PATH:
            yield JobProblem(f"{where}.prefix", "too long", f"use at most {_MAX_PATH} characters")
        elif not source.prefix.startswith("/"):
            yield JobProblem(
                f"{where}.prefix",
                f"{source.prefix!r} is relative",
                "give an absolute path on the nodes",
            )
        if not (math.isfinite(source.weight) and source.weight > 0):
            yield JobProblem(
                f"{where}.weight", f"{source.weight} is not positive", "give a share above 0"
            )


def evaluation_problems(evaluation: EvaluationConfig) -> Iterator[JobProblem]:
    """What is wrong with a job's section ``trainer.evaluation``."""
    yield from _sources("trainer.evaluation.sources", evaluation.sources)
    if evaluation.interval_steps < 0:
        yield JobProblem(
            "trainer.evaluation.interval_steps",
            f"{evaluation.interval_steps} is negative",
            "give 0 (off) or more",
        )
    if evaluation.interval_steps > 0 and not evaluation.sources:
        yield JobProblem(
            "trainer.evaluation.sources",
            "no source given although trainer.evaluation.interval_steps is set",
            "give at least one held-out .bin/.idx prefix, or use interval 0",
        )
    if evaluation.batches < 1:
        yield JobProblem(
            "trainer.evaluation.batches", f"{evaluation.batches} is not positive", "give at least 1"
        )

"""A job's sections ``trainer.data`` and ``trainer.evaluation``, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megascale_job.problems import JobProblem
from megascale_job.sections.fields import ADDED, MAX_PATH, WIDE, bounds

_MAX_SKIPPED_STEPS = 10**9
_MAX_SOURCES = 1024
_SHA256_DIGITS = 64
_MAX_SKIPS = 1024
NO_SOURCES = JobProblem(
    "trainer.data.sources",
    "no source given",
    "give at least one .bin/.idx prefix (`megascale data tokenize` makes one)",
)

TokenizerKind = Literal["bytes", "bpe"]
Shuffle = Literal["documents", "samples"]
BlendRule = Literal["weights", "tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """One tokenised corpus: path prefix of a ``.bin``/``.idx`` pair, and its share of the blend."""

    prefix: str
    weight: float = field(
        default=1.0, metadata=bounds(above=0, words="not positive", remedy="give a share above 0")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """The tokenizer of the sources; ``path`` and ``sha256`` are of its file (for bpe)."""

    kind: TokenizerKind = "bytes"
    path: str = ""
    sha256: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSkip:
    """Data that is left out: ``steps`` global batches between ``after_step`` and the next step."""

    steps: int = field(
        metadata=bounds(1, _MAX_SKIPPED_STEPS, remedy=f"give 1 to {_MAX_SKIPPED_STEPS}", bits=64)
    )
    after_step: int = field(
        default=0,
        metadata=bounds(0, _MAX_SKIPPED_STEPS, remedy=f"give 0 to {_MAX_SKIPPED_STEPS}", bits=64),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Sources, and how documents are packed into sequences.

    ``document_attention`` limits attention to the tokens of the same document. ``shuffle`` is the
    unit that each epoch reorders. With ``blend`` tokens the weights are epochs of each source per
    epoch of the blend, not shares of its samples. ``skips`` are global batches that are left out;
    the driver adds one when it rolls a run back (recovery.on_non_finite, on_loss_rise).
    """

    sources: tuple[DataSource, ...] = ()
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    seed: int = field(default=1234, metadata=WIDE)
    document_attention: bool = True
    shuffle: Shuffle = field(default="documents", metadata=ADDED)
    blend: BlendRule = field(default="weights", metadata=ADDED)
    skips: tuple[DataSkip, ...] = field(default=(), metadata=ADDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Evaluation on held-out data, after every ``interval_steps`` steps and after the last step.

    There is none if ``interval_steps`` is 0 or ``sources`` is empty.
    """

    sources: tuple[DataSource, ...] = ()
    interval_steps: int = field(
        default=0, metadata=bounds(0, 2**40, low="give 0 (off) or more", bits=64)
    )
    batches: int = field(default=1, metadata=bounds(1, 10**6))


def skipping(skips: tuple[DataSkip, ...], back_to: int, seen: int) -> tuple[DataSkip, ...]:
    """``skips`` of a run that returns to step ``back_to`` and leaves out the data up to ``seen``.

    Skips between the two belong to steps that are given up; the new skip includes their data.
    """
    given_up = [skip for skip in skips if back_to < skip.after_step < seen]
    steps = seen - back_to + sum(skip.steps for skip in given_up)
    kept = tuple(skip for skip in skips if skip not in given_up)
    return (*kept, DataSkip(after_step=back_to, steps=steps))


def data_problems(data: DataConfig) -> Iterator[JobProblem]:
    """Problems of a job's section ``trainer.data``."""
    if not data.sources:
        yield NO_SOURCES
    yield from _sources("trainer.data.sources", data.sources)
    if len(data.skips) > _MAX_SKIPS:
        yield JobProblem(
            "trainer.data.skips", f"{len(data.skips)} skips", f"use at most {_MAX_SKIPS}"
        )
    tokenizer = data.tokenizer
    if len(tokenizer.path) > MAX_PATH:
        yield JobProblem(
            "trainer.data.tokenizer.path", "too long", f"use at most {MAX_PATH} characters"
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


def evaluation_problems(evaluation: EvaluationConfig) -> Iterator[JobProblem]:
    """Problems of a job's section ``trainer.evaluation``."""
    yield from _sources("trainer.evaluation.sources", evaluation.sources)
    if evaluation.interval_steps > 0 and not evaluation.sources:
        yield JobProblem(
            "trainer.evaluation.sources",
            "no source given although trainer.evaluation.interval_steps is set",
            "give at least one held-out .bin/.idx prefix, or use interval 0",
        )


def _sources(field: str, sources: tuple[DataSource, ...]) -> Iterator[JobProblem]:
    if len(sources) > _MAX_SOURCES:
        yield JobProblem(field, f"{len(sources)} sources", f"use at most {_MAX_SOURCES}")
    for index, source in enumerate(sources[:_MAX_SOURCES]):
        where = f"{field}[{index}]"
        if not source.prefix:
            yield JobProblem(f"{where}.prefix", "empty", "give the path without .bin/.idx")
        elif len(source.prefix) > MAX_PATH:
            yield JobProblem(f"{where}.prefix", "too long", f"use at most {MAX_PATH} characters")
        elif not source.prefix.startswith("/"):
            yield JobProblem(
                f"{where}.prefix",
                f"{source.prefix!r} is relative",
                "give an absolute path on the nodes",
            )

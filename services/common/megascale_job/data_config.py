"""The sections of a job about its data; :mod:`megascale_job.config` is the whole tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megascale_job.stored import ADDED, WIDE

TokenizerKind = Literal["bytes", "bpe"]
Shuffle = Literal["documents", "samples"]
BlendRule = Literal["weights", "tokens"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSource:
    """One tokenised corpus: path prefix of a ``.bin``/``.idx`` pair, and its share of the blend."""

    prefix: str
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerConfig:
    """How the sources were tokenised; ``path`` and ``sha256`` are of the tokenizer file (bpe)."""

    kind: TokenizerKind = "bytes"
    path: str = ""
    sha256: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSkip:
    """Data that is left out: step ``after_step`` + 1 goes on ``steps`` global batches further."""

    steps: int = field(metadata=WIDE)
    after_step: int = field(default=0, metadata=WIDE)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Sources, and how documents are packed into sequences.

    ``document_attention`` limits attention to the tokens of the same document. ``shuffle`` is what
    an epoch has in another order. With ``blend`` tokens the weights are epochs of each source in
    an epoch of the blend, and not shares of its samples. ``skips`` are global batches that are left
    out; the driver adds one when it rolls a run back (recovery.on_non_finite, on_loss_rise).
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
    """Loss on held-out data, after every ``interval_steps`` steps and after the last step.

    There is none if ``interval_steps`` is 0 or ``sources`` is empty.
    """

    sources: tuple[DataSource, ...] = ()
    interval_steps: int = field(default=0, metadata=WIDE)
    batches: int = 1


def skipping(skips: tuple[DataSkip, ...], back_to: int, seen: int) -> tuple[DataSkip, ...]:
    """``skips`` of a run that goes back to step ``back_to`` and leaves out the data up to ``seen``.

    Skips between the two are of steps that are given up: the new one has their data as well.
    """
    given_up = [skip for skip in skips if back_to < skip.after_step < seen]
    steps = seen - back_to + sum(skip.steps for skip in given_up)
    kept = tuple(skip for skip in skips if skip not in given_up)
    return (*kept, DataSkip(after_step=back_to, steps=steps))

"""The runs of each convergence study, and the job that one of them is.

A run with a larger batch takes its steps, learning rate and warm-up from the product's own rule
(:func:`megascale_job.sizes.flops.scaled_batch`): the same tokens, the rate times the
square root of the factor, as many steps of warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megascale_job.config import Fp8Config, JobConfig
from megascale_job.loading import from_accepted
from megascale_job.sizes.flops import scaled_batch

VOCABULARY = 257  # bytes, and the end of a file
_LARGER = 4


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What one run changes.

    Args:
        model, training, optimizer: fields of these sections of the job; the learning rate is that
            of the study's batch.
        batch: in multiples of the study's.
        micro_batches: of a step.
    """

    model: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    micro_batches: int = 1


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs by name; the first is what the others are compared with unless another is chosen.

    Args:
        noise: the run that differs from the first in nothing that matters.
        optimizer, data: fields of these sections of every run's job.
        warmup: share of the first run's steps.
    """

    runs: Mapping[str, Variant]
    noise: str
    optimizer: Mapping[str, Any] = field(default_factory=lambda: {"learning_rate": 1e-3})
    data: Mapping[str, Any] = field(default_factory=dict)
    warmup: float = 0.05


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a study's model and batch: ``sequence`` in tokens, ``batch`` in sequences a step.

    ``learning_rate``, where given, takes the place of the study's; variants may have their own.
    """

    steps: int
    layers: int
    hidden: int
    head_size: int
    sequence: int
    batch: int
    window: int = 128
    learning_rate: float | None = None


QUICK = {"layers": 3, "hidden": 64, "head_size": 16, "sequence": 32, "batch": 2, "window": 8}


def job_of(study: Study, variant: Variant, sizes: Sizes, seed: int, corpus: str) -> JobConfig:
    """The job of one run on the corpus with that prefix; one device."""
    model = {
        "layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "heads": sizes.hidden // sizes.head_size,
        "vocab_size": VOCABULARY,
        "sequence_length": sizes.sequence,
        "bias": True,
        **variant.model,
    }
    if "window" in model:
        model["window"] = sizes.window
    training = {
        "steps": sizes.steps,
        "global_batch_size": sizes.batch,
        "micro_batch_size": sizes.batch,
        "seed": seed,
        **variant.training,
    }
    sources = [{"prefix": corpus}]
    optimizer = {"name": "adamw", **study.optimizer}
    if sizes.learning_rate is not None:
        optimizer["learning_rate"] = sizes.learning_rate
    values: dict[str, Any] = {
        "name": "convergence",
        "model": model,
        "training": training,
        "optimizer": {**optimizer, **variant.optimizer},
        "schedule": {"warmup_steps": max(1, int(sizes.steps * study.warmup))},
        "data": {"seed": seed, "document_attention": False, "sources": sources, **study.data},
    }
    if variant.batch > 1:
        scaled = scaled_batch(from_accepted(values), variant.batch)
        training.update(steps=scaled.steps, global_batch_size=scaled.global_batch_size)
        values["optimizer"]["learning_rate"] = scaled.learning_rate
        values["schedule"]["warmup_steps"] = scaled.warmup_steps
    training["micro_batch_size"] = training["global_batch_size"] // variant.micro_batches
    return from_accepted(values)


def _adamw(rate: float, batch: int = 1) -> Variant:
    return Variant(optimizer={"learning_rate": rate}, batch=batch)


def _lamb(rate: float, batch: int = 1) -> Variant:
    # Weight decay and epsilon are those of arXiv 1904.00962 (section 4, and the authors' code).
    changed = {"name": "lamb", "learning_rate": rate, "epsilon": 1e-6, "weight_decay": 0.01}
    return Variant(optimizer=changed, batch=batch)


def _at_larger_batch(name: str, rate: float) -> str:
    return f"{name} {rate * math.sqrt(_LARGER):g}, {_LARGER} times the batch"


def _fp8(
    kind: str, *, first: int = 0, last: int = 0, fast: str = Fp8Config().fast_accumulation
) -> Variant:
    """``first`` and ``last``: layers in bf16."""
    fp8 = {
        "format": kind,
        "fast_accumulation": fast,
        "layers_at_start_in_bf16": first,
        "layers_at_end_in_bf16": last,
    }
    return Variant(training={"precision": "fp8", "fp8": fp8})


_ADAMW_RATE = 1e-3
_LAMB_RATES = (0.00125, 0.0025, 0.005)

STUDIES: Mapping[str, Study] = {
    "algorithm": Study(
        runs={
            "parallel block": Variant(),
            "parallel block, other sums": Variant(micro_batches=2),
            "serial block": Variant(model={"block": "serial"}),
            "sliding window": Variant(model={"window": 128}),
        },
        noise="parallel block, other sums",
    ),
    # Half the rate shows whether the first run's is a fair one; LAMB at the first run's batch tells
    # the optimizer from the batch. A millionth of the rate changes the rounding of every update
    # from the first on, which is noise without the launches of a second micro-batch. Samples, not
    # documents, are shuffled: a small batch would be a part of one file, and what a run learnt of
    # it would help with its next part, which a batch of 4 times the size holds in the same step.
    # beta2: at a thousand tokens a step 0.95 would average the squares of too few gradients.
    "lamb": Study(
        runs={
            f"AdamW {_ADAMW_RATE:g}": _adamw(_ADAMW_RATE),
            f"AdamW {_ADAMW_RATE:g}, other rounding": _adamw(_ADAMW_RATE * (1 + 1e-6)),
            f"AdamW {_ADAMW_RATE / 2:g}": _adamw(_ADAMW_RATE / 2),
            f"LAMB {_LAMB_RATES[1]:g}": _lamb(_LAMB_RATES[1]),
            **{
                _at_larger_batch("AdamW", rate): _adamw(rate, _LARGER)
                for rate in (_ADAMW_RATE / 2, _ADAMW_RATE)
            },
            **{_at_larger_batch("LAMB", rate): _lamb(rate, _LARGER) for rate in _LAMB_RATES},
        },
        noise=f"AdamW {_ADAMW_RATE:g}, other rounding",
        optimizer={"learning_rate": _ADAMW_RATE, "beta2": 0.99},
        data={"shuffle": "samples"},
        warmup=0.02,
    ),
    "fp8": Study(
        runs={
            "bf16": Variant(),
            "bf16, other sums": Variant(micro_batches=2),
            "fp8, hybrid": _fp8("hybrid"),
            "fp8, hybrid, all sums fast": _fp8("hybrid", fast="all"),
            "fp8, hybrid, forward sums fast": _fp8("hybrid", fast="forward"),
            "fp8, hybrid, input projections fast": _fp8("hybrid", fast="input_projections"),
            "fp8, hybrid, no sums fast": _fp8("hybrid", fast="none"),
            "fp8, e4m3": _fp8("e4m3"),
            "fp8, hybrid, ends in bf16": _fp8("hybrid", first=1, last=1),
            "fp8, hybrid, first layer in bf16": _fp8("hybrid", first=1),
            "fp8, hybrid, last layer in bf16": _fp8("hybrid", last=1),
        },
        noise="bf16, other sums",
        data={"shuffle": "samples"},  # as above: files would raise the noise
    ),
}

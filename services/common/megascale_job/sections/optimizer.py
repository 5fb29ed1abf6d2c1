"""A job's section ``trainer.optimizer``, and its checks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megascale_job.names import is_dns_label
from megascale_job.problems import JobProblem
from megascale_job.sections.fields import ADDED, bounds

# The built-in optimizers; they take no options.
BUILT_IN = ("adamw", "lamb")
_MAX_WEIGHT_NORM = 1e9
_MAX_OPTIONS = 64
_MAX_OPTION_NAME = 63


@dataclass(frozen=True, kw_only=True, slots=True)
class LambConfig:
    """Bounds of a parameter's norm in its trust ratio (the function phi of arXiv 1904.00962).

    ``max_weight_norm`` 0 means no upper bound. With both at 0 the ratio uses the norm itself.
    """

    min_weight_norm: float = field(
        default=0.0,
        metadata=bounds(0, _MAX_WEIGHT_NORM, remedy=f"give 0 (no bound) to {_MAX_WEIGHT_NORM:g}"),
    )
    max_weight_norm: float = field(
        default=0.0,
        metadata=bounds(0, _MAX_WEIGHT_NORM, remedy=f"give 0 (no bound) to {_MAX_WEIGHT_NORM:g}"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """The optimizer by name; ``beta1``, ``beta2`` and ``epsilon`` are AdamW's and LAMB's.

    Weight decay is not applied to norms and biases. ``clip_norm`` 0 turns clipping off. An update
    whose gradient norm before clipping is above ``skip_norm`` is skipped; 0: never. ``options`` are
    numbers for an optimizer of an installed package; ``lamb`` is only for LAMB.
    """

    name: str = "adamw"
    options: Mapping[str, float] = field(default_factory=dict)
    learning_rate: float = field(
        default=3e-4, metadata=bounds(above=0, most=10, remedy="give 0 < lr <= 10")
    )
    beta1: float = field(default=0.9, metadata=bounds(0, below=1, remedy="give 0 <= beta < 1"))
    beta2: float = field(default=0.95, metadata=bounds(0, below=1, remedy="give 0 <= beta < 1"))
    epsilon: float = field(
        default=1e-8, metadata=bounds(above=0, below=1, remedy="give a small positive number")
    )
    weight_decay: float = field(default=0.1, metadata=bounds(0, 10, remedy="give 0 to 10"))
    clip_norm: float = field(default=1.0, metadata=bounds(0, remedy="give 0 (off) or more"))
    lamb: LambConfig = field(default_factory=LambConfig, metadata=ADDED)
    skip_norm: float = field(
        default=0.0, metadata=bounds(0, remedy="give 0 (off) or more", added=True)
    )


def optimizer_problems(optimizer: OptimizerConfig) -> Iterator[JobProblem]:
    """Problems of a job's section ``trainer.optimizer``."""
    if not is_dns_label(optimizer.name):
        yield JobProblem(
            "trainer.optimizer.name",
            f"{optimizer.name!r} is not a DNS-1123 label",
            "use the name under which its package registers it: a-z, 0-9 and '-'",
        )
    yield from _optimizer_options(optimizer)
    if 0 < optimizer.skip_norm <= optimizer.clip_norm:
        yield JobProblem(
            "trainer.optimizer.skip_norm",
            f"{optimizer.skip_norm:g} is not above trainer.optimizer.clip_norm = "
            f"{optimizer.clip_norm:g}, so updates would be skipped that clipping is for",
            "give several times clip_norm, or 0 (off)",
        )
    yield from _lamb(optimizer)


def _optimizer_options(optimizer: OptimizerConfig) -> Iterator[JobProblem]:
    field, options = "trainer.optimizer.options", optimizer.options
    if options and optimizer.name in BUILT_IN:
        yield JobProblem(
            field,
            f"{optimizer.name} takes no options",
            "set the other fields of trainer.optimizer, or set trainer.optimizer.name to one that "
            "takes options",
        )
    if len(options) > _MAX_OPTIONS:
        yield JobProblem(field, f"{len(options)} options", f"use at most {_MAX_OPTIONS}")
    for name, value in list(options.items())[:_MAX_OPTIONS]:
        if not name.isidentifier() or len(name) > _MAX_OPTION_NAME:
            yield JobProblem(
                field,
                f"{name[:_MAX_OPTION_NAME]!r} is not an option's name",
                f"use letters, digits and '_', at most {_MAX_OPTION_NAME} characters",
            )
        elif not math.isfinite(value):
            yield JobProblem(f"{field}.{name}", f"{value} is not finite", "give a number")


def _lamb(optimizer: OptimizerConfig) -> Iterator[JobProblem]:
    field, lamb = "trainer.optimizer.lamb", optimizer.lamb
    if optimizer.name != "lamb" and lamb != LambConfig():
        yield JobProblem(
            field,
            f"is given, and trainer.optimizer.name is {optimizer.name!r}",
            "set the name to lamb, or leave these fields out",
        )
    if 0 < lamb.max_weight_norm < lamb.min_weight_norm:
        yield JobProblem(
            f"{field}.max_weight_norm",
            f"{lamb.max_weight_norm:g} is below {field}.min_weight_norm = {lamb.min_weight_norm:g}",
            "give more than that, or 0 for no bound",
        )

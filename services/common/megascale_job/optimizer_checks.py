"""Checks the section ``trainer.optimizer`` of a job, for :mod:`megascale_job.validation`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megascale_job.names import is_dns_label
from megascale_job.optimizer_config import BUILT_IN, LambConfig, OptimizerConfig
from megascale_job.problems import JobProblem

_MAX_OPTIONS, _MAX_OPTION_NAME = 64, 63
_MAX_WEIGHT_NORM = 1e9


def optimizer_problems(optimizer: OptimizerConfig) -> Iterator[JobProblem]:
    """What is wrong with a job's section ``trainer.optimizer``."""
    if not is_dns_label(optimizer.name):
        yield JobProblem(
            "trainer.optimizer.name",
            f"{optimizer.name!r} is not a DNS-1123 label",
            "use the name under which its package registers it: a-z, 0-9 and '-'",
        )
    yield from _optimizer_options(optimizer)
    if not (math.isfinite(optimizer.learning_rate) and 0 < optimizer.learning_rate <= 10):
        yield JobProblem(
            "trainer.optimizer.learning_rate",
            f"{optimizer.learning_rate} is out of range",
            "give 0 < lr <= 10",
        )
    for name in ("beta1", "beta2"):
        value = getattr(optimizer, name)
        if not 0 <= value < 1:
            yield JobProblem(
                f"trainer.optimizer.{name}", f"{value} is out of range", "give 0 <= beta < 1"
            )
    if not 0 < optimizer.epsilon < 1:
        yield JobProblem(
            "trainer.optimizer.epsilon",
            f"{optimizer.epsilon} is out of range",
            "give a small positive number",
        )
    if not 0 <= optimizer.weight_decay <= 10:
        yield JobProblem(
            "trainer.optimizer.weight_decay",
            f"{optimizer.weight_decay} is out of range",
            "give 0 to 10",
        )
    if not (math.isfinite(optimizer.clip_norm) and optimizer.clip_norm >= 0):
        yield JobProblem(
            "trainer.optimizer.clip_norm",
            f"{optimizer.clip_norm} is out of range",
            "give 0 (off) or more",
        )
    if not (math.isfinite(optimizer.skip_norm) and optimizer.skip_norm >= 0):
        yield JobProblem(
            "trainer.optimizer.skip_norm",
            f"{optimizer.skip_norm} is out of range",
            "give 0 (off) or more",
        )
    elif 0 < optimizer.skip_norm <= optimizer.clip_norm:
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
    for name in ("min_weight_norm", "max_weight_norm"):
        value = getattr(lamb, name)
        if not 0 <= value <= _MAX_WEIGHT_NORM:
            yield JobProblem(
                f"{field}.{name}",
                f"{value} is out of range",
                f"give 0 (no bound) to {_MAX_WEIGHT_NORM:g}",
            )
    if 0 < lamb.max_weight_norm < lamb.min_weight_norm:
        yield JobProblem(
            f"{field}.max_weight_norm",
            f"{lamb.max_weight_norm:g} is below {field}.min_weight_norm = {lamb.min_weight_norm:g}",
            "give more than that, or 0 for no bound",
        )

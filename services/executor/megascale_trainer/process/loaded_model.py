"""Checks that a loaded checkpoint belongs to the job's model, data and schedule. Pure.

Parameters of 4 heads and of 8 can have the same shapes, and a model that reads one as the other
computes nonsense without an error. So snapshots carry trainer.model. The data position is a number
of samples, which means other data under another order or over other corpora. So snapshots also
carry the fields that give it its meaning, and the schedule of the learning rate.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from megascale_job.config import (
    DataConfig,
    ExpertsConfig,
    JobConfig,
    ModelConfig,
    model_values,
    shown_scaling,
)
from megascale_trainer.optimizer.step_control import learning_rate

# Fields that give the parameters their meaning. Others can be changed on purpose, as rope_theta and
# windows are for longer sequences; such a change is printed.
SAME = (
    "heads",
    "kv_heads",
    "head_dim",
    "block",
    "mlp",
    "norm",
    "positions",
    "qk_norm_over",
    "experts.score",
    "experts.normalise",
    "experts.scale",
    "experts.groups",
)
_SCHEDULE = "trainer.schedule."
# Fields without an effect on what the model computes from its parameters.
IGNORED = ("initializer_std", "sequence_length")


def model_fields(model: ModelConfig) -> dict[str, Any]:
    """trainer.model as a snapshot carries it, without later fields that are at their defaults."""
    values = model_values(model)
    # As builds without these fields have written it.
    if not model.experts.count:
        del values["experts"]
    if model.qk_norm_over == "heads":
        del values["qk_norm_over"]
    return values


def differences(
    loaded: Mapping[str, Any] | None, model: ModelConfig
) -> tuple[list[str], list[str]]:
    """Differences in fields of trainer.model that must be equal, and in fields that can differ.

    Both lists are empty if ``loaded`` is None: an earlier version wrote the checkpoint.
    """
    if loaded is None:
        return [], []
    here = _resolved(asdict(model))
    there = _resolved({**asdict(model), "experts": {}, "qk_norm_over": "heads", **loaded})
    refused: list[str] = []
    changed: list[str] = []
    for name, value in here.items():
        if value == there[name] or name in IGNORED:
            continue
        text = f"trainer.model.{name}: {value} here and {there[name]} in the checkpoint"
        (refused if name in SAME else changed).append(text)
    return refused, changed


# Fields that decide the order of samples. A checkpoint of an earlier version may lack them; it was
# written under the defaults.
ORDER = ("shuffle", "blend")
MOST_NAMED = 4  # sources that a message names
MOST_LISTED_SOURCES = 64  # for more sources a checkpoint has only one digest of all


def position_of(
    config: JobConfig, identities: Sequence[str], blend_scheme: int = 1
) -> dict[str, Any]:
    """The meaning of the data position, as a snapshot carries it.

    ``identities`` are those of the corpora in ``trainer.data.sources``, in their order.
    """
    data = config.data
    sources = [
        [found, source.weight] for found, source in zip(identities, data.sources, strict=True)
    ]
    digest = hashlib.sha256(json.dumps(sources).encode()).hexdigest()
    return {
        **{name: str(getattr(data, name)) for name in ORDER},
        "seed": data.seed,
        "sequence_length": config.model.sequence_length,
        "blend_scheme": blend_scheme,
        "source_count": len(sources),
        "sources_sha256": digest,
        "sources": sources if len(sources) <= MOST_LISTED_SOURCES else [],
    }


def other_data(
    stored: Mapping[str, Any] | None, here: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Differences under which the position means other data, and differences to report only."""
    there = {**{name: str(getattr(DataConfig(), name)) for name in ORDER}, **(stored or {})}
    fields = {
        **{name: f"trainer.data.{name}" for name in (*ORDER, "seed")},
        "sequence_length": "trainer.model.sequence_length",
    }
    refused = [
        f"{field}: {here[name]} here and {there[name]} in the checkpoint, whose position counts "
        "other samples"
        for name, field in fields.items()
        if there.get(name, here[name]) != here[name]
    ]
    if there.get("sources_sha256", here["sources_sha256"]) != here["sources_sha256"]:
        refused += _other_sources(there, here)
    changed = []
    # Absent: written when there was only the first scheme.
    if stored is not None and there.get("blend_scheme", 1) != here["blend_scheme"]:
        changed.append(
            "trainer.data.sources: this version follows the weights more closely than the one that "
            "wrote the checkpoint, so the order of the sources is another one from here on: some "
            "samples are read again or left out"
        )
    return refused, changed


def _other_sources(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    count, before = here["source_count"], there.get("source_count", 0)
    if count != before:
        return [f"trainer.data.sources: {count} here and {before} in the checkpoint"]
    pairs = enumerate(zip(here["sources"], there.get("sources", ()), strict=False))
    found = []
    for number, (ours, theirs) in pairs:
        field = f"trainer.data.sources[{number}]"
        if ours[0] != theirs[0]:
            found.append(f"{field}.prefix: another corpus than in the checkpoint, or it has grown")
        elif ours[1] != theirs[1]:
            found.append(f"{field}.weight: {ours[1]:g} here and {theirs[1]:g} in the checkpoint")
    return found[:MOST_NAMED] or [
        f"trainer.data.sources: some of the {count} corpora or weights are others than in the "
        "checkpoint"
    ]


def schedule_of(config: JobConfig) -> dict[str, Any]:
    """The fields that decide each step's learning rate, as a snapshot carries them."""
    return {
        "trainer.optimizer.learning_rate": config.optimizer.learning_rate,
        "trainer.training.steps": config.training.steps,
        **{f"{_SCHEDULE}{name}": value for name, value in asdict(config.schedule).items()},
    }


def other_schedule(stored: Mapping[str, Any] | None, config: JobConfig, step: int) -> list[str]:
    """A sentence if the learning rate after ``step`` differs from the checkpoint's schedule.

    Empty if the checkpoint has no schedule, because an earlier version wrote it.
    """
    here = schedule_of(config)
    if not isinstance(stored, Mapping) or not set(here) <= set(stored):
        return []
    before = replace(
        config,
        optimizer=replace(
            config.optimizer, learning_rate=stored["trainer.optimizer.learning_rate"]
        ),
        training=replace(config.training, steps=stored["trainer.training.steps"]),
        schedule=replace(
            config.schedule,
            **{field: stored[f"{_SCHEDULE}{field}"] for field in asdict(config.schedule)},
        ),
    )
    # ``old`` is the rate of the last step, from which the schedule jumps: the checkpoint's run may
    # have been at its end, where the old schedule has no next step.
    old, new = learning_rate(before, step - 1), learning_rate(config, step)
    continued = learning_rate(before, step)
    if math.isclose(continued, new, rel_tol=1e-9):
        return []
    changes = ", ".join(
        f"{field} {stored[field]} in the checkpoint and {value} here"
        for field, value in here.items()
        if value != stored[field]
    )
    return [
        f"the learning-rate schedule is another one: {changes}; the learning rate of step {step} "
        f"was {old:.6g} and that of step {step + 1} is {new:.6g} (it would have been "
        f"{continued:.6g})"
    ]


def _resolved(values: dict[str, Any]) -> dict[str, Any]:
    """The fields with defaults filled in, so that equal models have equal values."""
    windows = values["layer_windows"] or [values["window"]] * values["layers"]
    experts = {**asdict(ExpertsConfig()), **values["experts"]}
    return {
        **{name: value for name, value in values.items() if name not in ("window", "experts")},
        **{f"experts.{name}": value for name, value in experts.items()},
        "experts.ffn_size": experts["ffn_size"] or values["ffn_size"] or 4 * values["hidden_size"],
        "rope_scaling": shown_scaling(values["rope_scaling"]),
        "kv_heads": values["kv_heads"] or values["heads"],
        "ffn_size": values["ffn_size"] or 4 * values["hidden_size"],
        "layer_windows": list(windows),
        "head_dim": values["head_dim"] or values["hidden_size"] // values["heads"],
        "norm_bias": values["norm"] == "layernorm" and values["norm_bias"],
    }

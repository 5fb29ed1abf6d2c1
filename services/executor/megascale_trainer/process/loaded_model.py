"""Whether a loaded checkpoint is of the job's model and data, where nothing else shows it. Pure.

The parameters of 4 heads and of 8 have the same shapes, and a model that reads them as the other
computes nonsense without an error. Snapshots therefore carry trainer.model. The data position is a
number of samples, which is of other data under another rule: snapshots carry these rules too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from megascale_common.job.config import DataConfig, ModelConfig

# What gives the parameters their meaning. The rest may be changed on purpose, as rope_theta and
# windows are for longer sequences: that is printed.
SAME = ("heads", "kv_heads", "head_dim", "block", "mlp", "norm", "positions")
# No part of what the model computes from its parameters.
IGNORED = ("initializer_std", "sequence_length")


def differences(
    loaded: Mapping[str, Any] | None, model: ModelConfig
) -> tuple[list[str], list[str]]:
    """Sentences on fields of trainer.model that must be the same, and on those that may differ.

    Both are empty where ``loaded`` is None: an earlier version wrote the checkpoint.
    """
    here = _resolved(asdict(model))
    there = _resolved({**asdict(model), **(loaded or {})})
    refused: list[str] = []
    changed: list[str] = []
    for name, value in here.items():
        if value == there[name] or name in IGNORED:
            continue
        text = f"trainer.model.{name}: {value} here and {there[name]} in the checkpoint"
        (refused if name in SAME else changed).append(text)
    return refused, changed


# What the position in the data counts.
ORDER = ("shuffle", "blend")


def order_of(data: DataConfig) -> dict[str, str]:
    """The rules that a snapshot carries beside the position."""
    return {name: str(getattr(data, name)) for name in ORDER}


def other_order(loaded: Mapping[str, Any] | None, data: DataConfig) -> list[str]:
    """Sentences on fields of trainer.data under which the position means other data.

    A checkpoint of an earlier version carries none: it was written under the defaults.
    """
    there = {**order_of(DataConfig()), **(loaded or {})}
    return [
        f"trainer.data.{name}: {value} here and {there[name]} in the checkpoint, whose position "
        "counts other samples"
        for name, value in order_of(data).items()
        if value != there[name]
    ]


def _resolved(values: dict[str, Any]) -> dict[str, Any]:
    """Fields that mean the same get the same value."""
    windows = values["layer_windows"] or [values["window"]] * values["layers"]
    return {
        **{name: value for name, value in values.items() if name != "window"},
        "kv_heads": values["kv_heads"] or values["heads"],
        "ffn_size": values["ffn_size"] or 4 * values["hidden_size"],
        "layer_windows": list(windows),
        "head_dim": values["head_dim"] or values["hidden_size"] // values["heads"],
        "norm_bias": values["norm"] == "layernorm" and values["norm_bias"],
    }

"""The text that `megascale init` writes: a job file with every field, its comment and its default.

The fields of a model (:mod:`megascale_job.presets`) are filled in. A line that starts
with ``#`` and a field's name is that field at its default: remove the ``#`` to change it.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import yaml

from megascale_job.config import JobConfig, ParallelismConfig
from megascale_job.loading import from_accepted
from megascale_job.names import is_dns_label
from megascale_job.presets import MODELS, imported_model
from megascale_job.sizes.parameter_table import parameter_table
from megascale_job.visible import counted
from megascale_job.wire.fields import REQUIRED, Field, MessageFields, job_fields

_WIDTH = 118
_INDENT = "  "


def job_template(
    model: str, name: str, imported: Mapping[str, Any] | None = None, ranks: int | None = None
) -> str:
    """The text of a file for a job named ``name`` that trains ``model``.

    Args:
        ranks: number of ranks to start on; None: that of the model's own layout.
        imported: in place of a model by name: ``model`` and, with experts, ``loss`` (fields of
            trainer.model and trainer.loss), ``load_uri``, ``tokenizer`` (path) and
            ``architecture`` of one that was imported.

    Raises:
        KeyError: no such model.
        ValueError: ``name`` is not a valid name of a job, or ``ranks`` do not fit the model.
    """
    if not is_dns_label(name):
        raise ValueError(
            f"{name!r} is not a DNS-1123 label: use 1 to 63 of a-z, 0-9 and '-', no '-' at the ends"
        )
    checkpoint: dict[str, Any] = {"uri": f"checkpoints/{name}"}  # a folder holds one job's
    if imported is None:
        chosen = MODELS[model]
    else:
        loss = imported.get("loss", {})
        chosen = imported_model(imported["model"], imported["tokenizer"], loss)
        model = imported["architecture"]
        checkpoint["load_uri"] = imported["load_uri"]
    if ranks is not None:
        chosen = chosen.on(ranks)
    config = from_accepted({"name": "model", "trainer": chosen.sections})
    values = {
        "name": name,
        "trainer": chosen.sections,
        "checkpoint": {**checkpoint, "interval_steps": chosen.checkpoint_steps},
        "recovery": {"spare_nodes": 1},
    }
    head = [
        f"A job: {_summary(model, config, chosen.device)}.",
        "`megascale plan FILE` prints what it needs; `megascale submit FILE --watch` runs it on a "
        "cluster,",
        f"and without one `{_by_hand(config.layout.world_size)} FILE`.",
        f"First, next to this file: `{chosen.tokenize}`.",
        "Every field is here. A line `#field: value` is a field at its default: "
        "remove the # to change it.",
        "Relative paths start at the folder of this file.",
    ]
    return (
        "\n".join([*(f"# {line}" for line in head), "", *_message(job_fields(), values, 0)]) + "\n"
    )


def _summary(model: str, config: JobConfig, device: str) -> str:
    """Size of the model, and the devices that it starts on."""
    alone = replace(config, parallelism=ParallelismConfig())
    sizes = {
        piece.name: math.prod(piece.global_shape)
        for piece in parameter_table(alone, 0).slices
        if not piece.name.endswith(".router.load")  # counts of choices
    }
    parameters, ranks = sum(sizes.values()), config.layout.world_size
    size = (
        f"{parameters / 1e9:.2f} billion" if parameters > 1e9 else f"{parameters / 1e6:.2f} million"
    )
    devices = f"{counted(ranks, 'rank')}, {'each ' if ranks > 1 else ''}{device}"
    return f"{model}, {size} parameters on {devices}"


def _by_hand(ranks: int) -> str:
    """The command that starts ``ranks`` ranks on one host."""
    if ranks == 1:
        return "python -m megascale_trainer"
    return f"torchrun --nproc-per-node {ranks} -m megascale_trainer"


def _message(message: MessageFields, values: Mapping[str, Any], depth: int) -> Iterator[str]:
    for field in message.fields:
        if depth == 0 and field.message is not None:
            yield ""
        yield from _comment(field, depth)
        yield from _field(field, values.get(field.name), depth)


def _field(field: Field, value: Any, depth: int) -> Iterator[str]:
    pad = _INDENT * depth
    if field.message is None or (field.repeated and value is None):
        shown = field.default if value is None else value
        if shown is REQUIRED:
            raise ValueError(f"{field.name} has no default and the model does not set it")
        yield f"{pad}{'#' if value is None else ''}{field.name}: {_yaml(shown)}"
        return
    yield f"{pad}{field.name}:"
    if not field.repeated:
        yield from _message(field.message, value or {}, depth + 1)
        return
    for item in value:
        lines = list(_message(field.message, item, depth + 2))
        first = next(index for index, line in enumerate(lines) if not line.lstrip().startswith("#"))
        lines[first] = f"{pad}{_INDENT}- {lines[first].lstrip()}"
        yield from lines


def _comment(field: Field, depth: int) -> Iterator[str]:
    pad = _INDENT * depth
    text = field.comment
    if field.choices:
        text = f"{text} ({' | '.join(choice.name for choice in field.choices)})"
    if field.repeated and field.message is not None:
        text = f"{text} Items: {', '.join(inner.name for inner in field.message.fields)}."
    for line in textwrap.wrap(text, _WIDTH - len(pad) - 2, break_on_hyphens=False):
        yield f"{pad}# {line}"


def _yaml(value: Any) -> str:
    """A plain value on one line, as YAML reads it back."""
    if isinstance(value, str) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value)

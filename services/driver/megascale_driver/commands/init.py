"""The text that `megascale init` writes: a job file with every field, its comment and its default.

The fields of a preset are filled in. A line that starts with ``#`` and a field's name is that field
at its default: remove the ``#`` to change it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from megascale_common.job.names import is_dns_label
from megascale_common.job.wire.fields import REQUIRED, Field, MessageFields, job_fields

_WIDTH = 118
_INDENT = "  "

_SOURCES = [{"prefix": "corpus"}]
_BYTES = {"sources": _SOURCES, "tokenizer": {"kind": "bytes"}}
_BPE = {"sources": _SOURCES, "tokenizer": {"kind": "bpe", "path": "corpus.tokenizer.json"}}
_TOKENIZE_BPE = (
    "megascale data tokenize YOUR_TEXT --tokenizer bpe --vocab-size 32000 --output corpus"
)
_CHECKPOINT = {"uri": "checkpoints", "interval_steps": 100}
_LARGE: dict[str, Any] = {
    "block": "serial",
    "mlp": "swiglu",
    "norm": "rmsnorm",
    "vocab_size": 32_000,
    "sequence_length": 2048,
}

# Each is a complete job except for its corpus; the sizes in the summaries are those of
# `megascale plan`.
_PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "summary": "0.85 million parameters on 8 CPU ranks: "
        "`megascale up --nodes 3 --devices-per-node 4 --device cpu`",
        "tokenize": "megascale data tokenize YOUR_TEXT --output corpus",
        "data": _BYTES,
        "model": {
            "layers": 4,
            "hidden_size": 128,
            "heads": 4,
            "vocab_size": 257,
            "sequence_length": 128,
        },
        "parallelism": {"tp": 2, "dp": 2, "pp": 2},
        "training": {
            "steps": 200,
            "global_batch_size": 16,
            "micro_batch_size": 2,
            "precision": "fp32",
        },
        "optimizer": {"learning_rate": 2e-3},
        "schedule": {"warmup_steps": 10},
        "checkpoint": {"uri": "checkpoints", "interval_steps": 20},
    },
    "1b": {
        "summary": "1.36 billion parameters on 8 GPUs: four nodes of 2, or one of 8",
        "tokenize": _TOKENIZE_BPE,
        "data": _BPE,
        "model": {**_LARGE, "layers": 24, "hidden_size": 2048, "heads": 16, "ffn_size": 5632},
        "parallelism": {"tp": 2, "dp": 2, "pp": 2},
        "training": {
            "steps": 10_000,
            "global_batch_size": 128,
            "micro_batch_size": 4,
            "precision": "bf16",
        },
        "optimizer": {"learning_rate": 3e-4},
        "schedule": {"warmup_steps": 500},
        "checkpoint": _CHECKPOINT,
    },
    "7b": {
        "summary": "6.74 billion parameters on 16 GPUs: two nodes of 8",
        "tokenize": _TOKENIZE_BPE,
        "data": _BPE,
        "model": {**_LARGE, "layers": 32, "hidden_size": 4096, "heads": 32, "ffn_size": 11008},
        "parallelism": {"tp": 4, "dp": 2, "pp": 2},
        "training": {
            "steps": 100_000,
            "global_batch_size": 512,
            "micro_batch_size": 2,
            "precision": "bf16",
        },
        "optimizer": {"learning_rate": 3e-4},
        "schedule": {"warmup_steps": 2000},
        "checkpoint": _CHECKPOINT,
    },
}
PRESETS = tuple(_PRESETS)


def job_template(preset: str, name: str) -> str:
    """The text of a file for a job named ``name``.

    Raises:
        KeyError: no such preset.
        ValueError: ``name`` is not a valid name of a job.
    """
    if not is_dns_label(name):
        raise ValueError(
            f"{name!r} is not a DNS-1123 label: use 1 to 63 of a-z, 0-9 and '-', no '-' at the ends"
        )
    chosen = _PRESETS[preset]
    trainer = {
        key: value
        for key, value in chosen.items()
        if key not in ("summary", "tokenize", "checkpoint")
    }
    values = {
        "name": name,
        "trainer": trainer,
        "checkpoint": chosen["checkpoint"],
        "recovery": {"spare_nodes": 1},
    }
    head = [
        f"A job: {chosen['summary']}.",
        "`megascale plan FILE` prints what it needs; `megascale submit FILE --watch` runs it.",
        f"First, beside this file: `{chosen['tokenize']}`.",
        "Every field is here. A line `#field: value` is a field at its default: "
        "remove the # to change it.",
        "Relative paths start at the folder of this file.",
    ]
    return (
        "\n".join([*(f"# {line}" for line in head), "", *_message(job_fields(), values, 0)]) + "\n"
    )


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
            raise ValueError(f"{field.name} has no default and the preset does not set it")
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

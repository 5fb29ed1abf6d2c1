"""A job file as JSON Schema (draft 2020-12), with which editors complete and check it.

A schema does not express relations between fields; `megascale plan` checks those.
"""

from __future__ import annotations

from typing import Any

from megascale_job.sections.fields import Bounds
from megascale_job.wire.fields import REQUIRED, Field, MessageFields, job_fields

# YAML 1.1 reads 3e-4 (without a point) as text, and a job file can have such numbers.
_NUMBER = {"type": ["number", "string", "null"], "pattern": r"^[+-]?\d+(\.\d*)?[eE][+-]?\d+$"}
_SCALARS: dict[str, dict[str, Any]] = {
    "integer": {"type": ["integer", "null"]},
    "number": _NUMBER,
    "true or false": {"type": ["boolean", "null"]},
    "text": {"type": ["string", "null"]},
}
_NAME = "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"  # a DNS-1123 label
_PATTERNS = {"name": _NAME, "tenant": _NAME}


def job_schema() -> dict[str, Any]:
    """The schema of a whole job file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A MegaScale job",
        **_mapping(job_fields(), root=True),
    }


def _mapping(message: MessageFields, *, root: bool = False) -> dict[str, Any]:
    properties = {}
    for field in message.fields:
        properties[field.name] = _field(field)
        if root and field.name in _PATTERNS:
            properties[field.name]["pattern"] = _PATTERNS[field.name]
    required = [field.name for field in message.fields if _required(field)]
    return {
        "type": "object" if required else ["object", "null"],
        "description": message.comment,
        "properties": properties,
        "additionalProperties": False,
        **({"required": required} if required else {}),
    }


def _required(field: Field) -> bool:
    """Whether a file must set the field, or a field in it."""
    if field.message is not None and not field.repeated:
        return any(_required(inner) for inner in field.message.fields)
    return field.default is REQUIRED


def _field(field: Field) -> dict[str, Any]:
    facts: dict[str, Any] = {"description": field.comment}
    if field.message is None and field.default not in (REQUIRED, "", (), {}):
        facts["default"] = field.default
    return {**_type(field), **facts}


def _type(field: Field) -> dict[str, Any]:
    if field.message is not None:
        inner = _mapping(field.message)
        return {"type": ["array", "null"], "items": inner} if field.repeated else inner
    if field.choices:
        return {"enum": [*(choice.name for choice in field.choices), None]}
    if field.type.startswith("mapping of text to "):
        kind = field.type.removeprefix("mapping of text to ")
        texts = {"type": ["string", "number", "boolean", "null"]}
        items = texts if kind == "text" else _SCALARS[kind]
        return {"type": ["object", "null"], "additionalProperties": items}
    if field.repeated:
        item = _SCALARS[field.type.removeprefix("list of ").removesuffix("s")]
        return {"type": ["array", "null"], "items": item}
    return _bounded(_SCALARS[field.type], field.bounds)


def _bounded(kind: dict[str, Any], bounds: Bounds | None) -> dict[str, Any]:
    if bounds is None:
        return dict(kind)
    limits = {
        "minimum": bounds.least,
        "maximum": bounds.most,
        "exclusiveMinimum": bounds.above,
        "exclusiveMaximum": bounds.below,
    }
    ends = {name: end for name, end in limits.items() if end is not None}
    return {**kind, "anyOf": [{"const": 0}, ends]} if bounds.or_zero else {**kind, **ends}

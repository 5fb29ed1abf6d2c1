"""Every field of a job with its comment, type, choices and default, for people.

Each fact is read from its declaration: names, types and order from the descriptor of
``megascale.v1.JobSpec``, comments from job.proto (generated code has none), defaults and bounds
from :mod:`megascale_job.config`. docs/job-spec.md, the file that `megascale init` writes and the
JSON Schema are made from these, so that all agree with the code.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from dataclasses import dataclass
from importlib import resources
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from megascale.v1 import job_pb2
from megascale_job.config import JobConfig
from megascale_job.sections.fields import Bounds, bounds_of

REQUIRED = dataclasses.MISSING

_SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: "integer",
    FieldDescriptor.CPPTYPE_INT64: "integer",
    FieldDescriptor.CPPTYPE_DOUBLE: "number",
    FieldDescriptor.CPPTYPE_BOOL: "true or false",
    FieldDescriptor.CPPTYPE_STRING: "text",
}
_DECLARATION = re.compile(r"(?:message|enum) (\w+) \{")
_FIELD = re.compile(r"(?:optional |repeated )?(?:map<\w+, \w+>|[\w.]+) (\w+) = \d+;")
_VALUE = re.compile(r"([A-Z][A-Z0-9_]*) = \d+;")


@dataclass(frozen=True, slots=True)
class Choice:
    """One value of an enum by its short name, as a job file writes it."""

    name: str
    comment: str


@dataclass(frozen=True, slots=True)
class Field:
    """One field.

    ``default`` is REQUIRED if there is none; ``message`` has the fields of a nested message.
    """

    name: str
    type: str
    comment: str
    default: Any
    repeated: bool
    choices: tuple[Choice, ...]
    message: MessageFields | None
    bounds: Bounds | None


@dataclass(frozen=True, slots=True)
class MessageFields:
    """One message and its fields, in the order of the proto."""

    name: str
    comment: str
    fields: tuple[Field, ...]


def job_fields() -> MessageFields:
    """The whole job, from its root."""
    comments = proto_comments(
        resources.files("megascale.v1").joinpath("job.proto").read_text(encoding="utf-8")
    )
    return _message(job_pb2.JobSpec.DESCRIPTOR, JobConfig, comments)


def proto_comments(text: str) -> dict[str, str]:
    """Comments of a proto file, each on one line.

    Keys are ``Message``, ``Message.field``, ``Enum`` and ``Enum.VALUE``.
    """
    found: dict[str, str] = {}
    pending: list[str] = []
    owner = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("//"):
            pending.append(line.removeprefix("//").strip())
            continue
        if declared := _DECLARATION.match(line):
            owner = declared[1]
            found[owner] = " ".join(pending)
        elif named := _FIELD.match(line) or _VALUE.match(line):
            found[f"{owner}.{named[1]}"] = " ".join(pending)
        pending = []
    return found


def _message(descriptor: Descriptor, config: type[Any], comments: dict[str, str]) -> MessageFields:
    hints = typing.get_type_hints(config)
    declared = {field.name: field for field in dataclasses.fields(config)}
    fields = []
    for field in descriptor.fields:
        # The sections of `trainer` are at the root of the configuration.
        hint = hints.get(field.name, config)
        fields.append(_field(field, hint, declared.get(field.name), comments))
    return MessageFields(descriptor.name, comments[descriptor.name], tuple(fields))


def _field(
    field: FieldDescriptor,
    hint: Any,
    declared: dataclasses.Field[Any] | None,
    comments: dict[str, str],
) -> Field:
    default = REQUIRED if declared is None else _default(declared)
    bounds = None if declared is None else bounds_of(declared)
    repeated = isinstance(default, tuple)
    message: MessageFields | None = None
    choices: tuple[Choice, ...] = ()
    if _is_map(field):
        assert field.message_type is not None
        kind = f"mapping of text to {_SCALARS[field.message_type.fields_by_name['value'].cpp_type]}"
    elif field.message_type is not None:
        config = typing.get_args(hint)[0] if repeated else hint
        message = _message(field.message_type, config, comments)
        kind = f"list of {message.name}" if repeated else message.name
    elif field.enum_type is not None:
        choices = _choices(field.enum_type, comments)
        kind = " or ".join(choice.name for choice in choices)
    else:
        kind = f"list of {_SCALARS[field.cpp_type]}s" if repeated else _SCALARS[field.cpp_type]
    assert field.containing_type is not None
    comment = comments[f"{field.containing_type.name}.{field.name}"]
    return Field(field.name, kind, comment, default, repeated, choices, message, bounds)


def _default(field: dataclasses.Field[Any]) -> Any:
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _choices(enum: EnumDescriptor, comments: dict[str, str]) -> tuple[Choice, ...]:
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return tuple(
        Choice(value.name.removeprefix(prefix).lower(), comments[f"{enum.name}.{value.name}"])
        for value in enum.values
        if value.number
    )

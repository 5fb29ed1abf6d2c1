"""A job back to plain values and to the text of a job file; the inverse of :mod:`spec`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from megascale.v1 import job_pb2
from megascale_client.errors import FieldProblem, InvalidRequest
from megascale_client.spec import short_names

_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def job_values(spec: job_pb2.JobSpec, *, all_fields: bool = False) -> dict[str, Any]:
    """What is set in a job as plain values, as a job file has them and ``parse_job`` reads them.

    ``all_fields`` adds empty texts and lists and zeros.
    """
    return _values(spec, all_fields)


def dump_job(spec: job_pb2.JobSpec, *, all_fields: bool = False) -> str:
    """The text of a job file (YAML)."""
    values = job_values(spec, all_fields=all_fields)
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    if all(map(str.isprintable, text.splitlines())):
        return text
    # Marks that turn the direction of text would make the file look like another.
    return str(yaml.safe_dump(values, sort_keys=False, width=100))


def set_value(values: dict[str, Any], setting: str) -> None:
    """Set one field of a job's plain values from ``PATH=VALUE``, the value written as in YAML.

    Raises:
        InvalidRequest: no such form, or a path through something that has no fields.
    """
    path, equals, text = setting.partition("=")
    parts = [name or int(index) for name, index in _PART.findall(path)]
    if not equals or "".join(_written(parts)) != path or not parts:
        raise _refused(path, f"{setting!r} is not PATH=VALUE", "write trainer.training.steps=500")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise _refused(path, f"the value is not YAML: {problem}", "put it in quotes") from None
    target: Any = values
    for part in parts[:-1]:
        if isinstance(target, dict) and isinstance(part, str):
            target.setdefault(part, {})
        _require(target, part, path)
        target = target[part]
    if not isinstance(target, dict) or not isinstance(parts[-1], str):
        _require(target, parts[-1], path)
    target[parts[-1]] = value


def _require(target: Any, part: str | int, path: str) -> None:
    if isinstance(part, str):
        there = isinstance(target, dict) and part in target
    else:
        there = isinstance(target, list) and part < len(target)
    if not there:
        raise _refused(path, f"the job has no {part!r} there", "`megascale config show` prints it")


def flattened(values: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a job by its dotted path."""
    if isinstance(values, Mapping) and values:
        for key, value in values.items():
            yield from flattened(value, f"{path}.{key}" if path else str(key))
    elif isinstance(values, list) and values:
        for index, value in enumerate(values):
            yield from flattened(value, f"{path}[{index}]")
    else:
        yield path, values


def _written(parts: list[str | int]) -> Iterator[str]:
    for index, part in enumerate(parts):
        if isinstance(part, int):
            yield f"[{part}]"
        else:
            yield f".{part}" if index else part


def _refused(path: str, problem: str, remedy: str) -> InvalidRequest:
    return InvalidRequest(
        str(FieldProblem(path, problem, remedy)),
        problems=[FieldProblem(path, problem, remedy)],
        reason="BAD_SETTING",
    )


def _values(message: Message, all_fields: bool) -> dict[str, Any]:
    found = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        present = message.HasField(field.name) if field.has_presence else bool(value) or all_fields
        # The number 0 of an enum stands for the default.
        if present and not (field.enum_type is not None and value == 0):
            found[field.name] = _plain(field, value, all_fields)
    return found


def _plain(field: Any, value: Any, all_fields: bool) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Message):
        return _values(value, all_fields)
    if field.enum_type is not None:
        enum: EnumDescriptor = field.enum_type
        names = {number: name for name, number in short_names(enum).items()}
        return names.get(value, value)
    if hasattr(value, "extend"):  # releases of protobuf differ in how a descriptor shows it
        return [_values(each, all_fields) if isinstance(each, Message) else each for each in value]
    return value

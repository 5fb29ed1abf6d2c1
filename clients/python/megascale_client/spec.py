"""A job from plain values: a walk along the descriptor of ``megascale.v1.JobSpec``.

A job file (:mod:`megascale_client.job_file`) is the message, in YAML: the same field names, nested
the same way, enum values by their short name (``bf16`` for PRECISION_BF16). So a field that is
added to the proto can be set at once. All problems are found in one pass, each with its dotted
path; whether the values fit together is checked by the driver. The services' reader
(``megascale_job/reading.py``) reports the same mistakes in the same words: change both
together.
"""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from megascale.v1 import job_pb2
from megascale_client.errors import FieldProblem, InvalidJob

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_SHOWN_CHARS = 60
# Bounded, because aliases in YAML make small files stand for huge values.
_repr = reprlib.Repr()
_repr.maxlevel = 3
_repr.maxstring = _repr.maxother = _repr.maxlong = 2 * _SHOWN_CHARS
_repr.maxlist = _repr.maxtuple = _repr.maxdict = _repr.maxset = _SHOWN_CHARS
# YAML 1.1 reads 3e-4 (no point) as text; whoever writes it means the number.
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


def parse_job(values: Any) -> job_pb2.JobSpec:
    """The job in plain values (as YAML or JSON gives them).

    Raises:
        InvalidJob: unknown fields, with a suggestion, and values of the wrong type, by dotted path.
    """
    spec = job_pb2.JobSpec()
    problems: list[FieldProblem] = []
    _fill(spec, values, "", problems)
    if problems:
        raise InvalidJob(problems)
    return spec


def short_names(enum: EnumDescriptor) -> dict[str, int]:
    """Values of an enum by short name: PRECISION_BF16 is ``bf16``; UNSPECIFIED is left out."""
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
    return {v.name.removeprefix(prefix).lower(): v.number for v in enum.values if v.number != 0}


def _fill(message: Message, values: Any, path: str, problems: list[FieldProblem]) -> None:
    fields: Mapping[str, Any] = message.DESCRIPTOR.fields_by_name
    if not isinstance(values, Mapping):
        _report(
            problems, path or "job", f"expected a mapping; got {_shown(values)}", _names(fields)
        )
        return
    for key, value in values.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in fields:
            _report(problems, where, "unknown field", _suggestion(str(key), fields))
        elif value is not None:  # `labels:` with nothing behind it is a field that is not set
            _set(message, fields[key], value, where, problems)


def _set(
    message: Message, field: FieldDescriptor, value: Any, where: str, problems: list[FieldProblem]
) -> None:
    target = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _set_map(target, field.message_type.fields_by_name["value"], value, where, problems)
    elif hasattr(target, "extend"):  # releases of protobuf differ in how a descriptor shows it
        if not isinstance(value, list | tuple):
            problem = f"expected a list; got {_shown(value)}"
            _report(problems, where, problem, "write it as [a, b]")
            return
        for index, item in enumerate(value):
            _append(target, field, item, f"{where}[{index}]", problems)
    elif field.message_type is not None:
        target.SetInParent()
        _fill(target, value, where, problems)
    elif (scalar := _scalar(field, value, where, problems)) is not None:
        setattr(message, field.name, scalar)


def _set_map(
    target: Any, field: FieldDescriptor, values: Any, where: str, problems: list[FieldProblem]
) -> None:
    """Set the entries of a map, whose values are those of ``field``; any value is text for text."""
    if not isinstance(values, Mapping):
        problem = f"expected a mapping; got {_shown(values)}"
        _report(problems, where, problem, "write it as {a: b}")
        return
    for key, item in values.items():
        if field.cpp_type == FieldDescriptor.CPPTYPE_STRING and not isinstance(item, list | dict):
            target[str(key)] = str(item)
        elif (scalar := _scalar(field, item, f"{where}.{key}", problems)) is not None:
            target[str(key)] = scalar


def _append(
    items: Any, field: FieldDescriptor, value: Any, where: str, problems: list[FieldProblem]
) -> None:
    if field.message_type is not None:
        _fill(items.add(), value, where, problems)
    elif (scalar := _scalar(field, value, where, problems)) is not None:
        items.append(scalar)


def _scalar(field: FieldDescriptor, value: Any, where: str, problems: list[FieldProblem]) -> Any:
    """The value as the field takes it, or None after its problem was added to ``problems``."""
    if field.enum_type is not None:
        names = short_names(field.enum_type)
        if isinstance(value, str) and value in names:
            return names[value]
        problem = f"{_shown(value)} is not one of {', '.join(names)}"
        _report(problems, where, problem, _suggestion(_short(value), names))
    elif field.cpp_type in _INTEGERS:
        return _integer(_INTEGERS[field.cpp_type], value, where, problems)
    elif field.cpp_type in _FLOATS:
        number = _float(value)
        if number is not None and math.isfinite(number):
            return number
        if number is None:
            problem = f"expected a number; got {_shown(value)}"
            _report(problems, where, problem, "write it as 0.5 or 3e-4")
        else:
            _report(problems, where, f"{number} is not finite", "give a number")
    elif field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        if isinstance(value, bool):
            return value
        problem = f"expected true or false; got {_shown(value)}"
        _report(problems, where, problem, "write it without quotes")
    elif not isinstance(value, str):
        _report(problems, where, f"expected text; got {_shown(value)}", "put it in quotes")
    elif not value.isascii() and not _is_unicode(value):
        problem = f"{_shown(value)} has half of a character"
        _report(problems, where, problem, "write the character itself, in UTF-8")
    else:
        return value
    return None


def _integer(
    bounds: tuple[int, int], value: Any, where: str, problems: list[FieldProblem]
) -> int | None:
    low, high = bounds
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, bool) or not isinstance(number, int):
        _report(problems, where, f"expected a whole number; got {_shown(value)}", "write it as 4")
    elif low <= number <= high:
        return number
    else:
        _report(problems, where, f"{_shown(number)} is out of range", f"give {low} to {high}")
    return None


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or (isinstance(value, str) and not _EXPONENT.fullmatch(value)):
        return None
    try:
        return float(value)
    except (TypeError, OverflowError):
        return None


def _is_unicode(text: str) -> bool:
    # YAML can write half of a surrogate pair as an escape, which no wire carries.
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _report(problems: list[FieldProblem], where: str, problem: str, remedy: str) -> None:
    problems.append(FieldProblem(where, problem, remedy))


def _suggestion(word: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else _names(names)


def _short(value: Any) -> str:
    """The short name that was meant by an enum value such as PRECISION_BF16."""
    return str(value).lower().rsplit("_", 1)[-1]


def _names(known: Iterable[str]) -> str:
    return f"known here: {', '.join(known)}"


def _shown(value: Any) -> str:
    try:
        text = _repr.repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def anchor_paths(spec: job_pb2.JobSpec, folder: Path) -> None:
    """Make the job's paths absolute, as the driver and the nodes run in other folders."""
    for source in (*spec.trainer.data.sources, *spec.trainer.evaluation.sources):
        source.prefix = _anchored(source.prefix, folder)
    if spec.trainer.data.HasField("tokenizer"):
        tokenizer = spec.trainer.data.tokenizer
        tokenizer.path = _anchored(tokenizer.path, folder)
    if spec.HasField("checkpoint"):
        spec.checkpoint.uri = _anchored(spec.checkpoint.uri, folder)
        spec.checkpoint.load_uri = _anchored(spec.checkpoint.load_uri, folder)


def _anchored(path: str, folder: Path) -> str:
    if not path or "://" in path:
        return path
    return str(folder / Path(path).expanduser())

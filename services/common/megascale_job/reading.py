"""Plain values to a tree of dataclasses, by the types of their fields; every problem in one pass.

:mod:`megascale_job.config` is the tree. Values come from YAML, JSON or protobuf: a list is a
tuple, a whole number may stand for a float, None is a field that is not set. The client's reader of
job files (``megascale_client/spec.py``) reports the same mistakes in the same words: change both
together.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import typing
from collections.abc import Collection, Hashable, Iterable, Mapping
from typing import Any, Literal

from megascale_job.problems import JobProblem

_SHOWN_CHARS = 60
# YAML 1.1 reads 3e-4 (no point) as text; whoever writes it means the number.
_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


def read_fields(
    cls: type[Any],
    names: Collection[str],
    values: Mapping[str, Any],
    path: str,
    problems: list[JobProblem],
    suggested: Collection[str] = (),
) -> dict[str, Any]:
    """The fields ``names`` of the dataclass ``cls`` from ``values``, which stand at ``path``.

    What is unknown, missing or of the wrong type is added to ``problems``; ``suggested`` are the
    names that an unknown one may have meant, by default ``names``.
    """
    known = {field.name: field for field in dataclasses.fields(cls) if field.name in names}
    hints = _hints(typing.cast(Hashable, cls))
    built: dict[str, Any] = {}
    for key, value in values.items():
        where = _join(path, str(key))
        if key not in known:
            _report(problems, where, "unknown field", _suggestion(str(key), suggested or known))
        elif value is not None:
            built[key] = _value(hints[key], value, where, problems)
    for name, field in known.items():
        no_default = field.default is field.default_factory is dataclasses.MISSING
        if not no_default or name in built:
            continue
        if dataclasses.is_dataclass(hints[name]):  # report the fields that it needs, not itself
            _value(hints[name], {}, _join(path, name), problems)
        else:
            # On the wire a number that is 0 is absent; no number without a default may be 0.
            whole = hints[name] is int
            _report(
                problems,
                _join(path, name),
                "missing or 0" if whole else "missing",
                f"set it{' to at least 1' if whole else ''}: this field has no default",
            )
    return built


def not_a_mapping(where: str, values: Any, names: Iterable[str]) -> JobProblem:
    """The problem of ``values`` at ``where`` that is not a mapping with the fields ``names``."""
    return JobProblem(where, f"expected a mapping; got {_shown(values)}", _names(names))


@functools.cache
def _hints(cls: Any) -> Mapping[str, Any]:
    """The types of the fields, which Python compiles from their text at every other call."""
    return typing.get_type_hints(cls)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _tree(cls: type[Any], values: Any, path: str, problems: list[JobProblem]) -> Any:
    names = [field.name for field in dataclasses.fields(cls)]
    if not isinstance(values, Mapping):
        problems.append(not_a_mapping(path, values, names))
        return None
    before = len(problems)
    built = read_fields(cls, names, values, path, problems)
    return cls(**built) if len(problems) == before else None


def _value(hint: Any, value: Any, where: str, problems: list[JobProblem]) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return _tree(typing.cast(type[Any], hint), value, where, problems)
    if origin is Literal:
        if value not in arguments:
            problem = f"{_shown(value)} is not one of {', '.join(map(str, arguments))}"
            _report(problems, where, problem, _suggestion(_short(value), arguments))
        return value
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            _report(problems, where, f"expected a list; got {_shown(value)}", "write it as [a, b]")
            return ()
        item = arguments[0]
        return tuple(_value(item, v, f"{where}[{i}]", problems) for i, v in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            _report(
                problems, where, f"expected a mapping; got {_shown(value)}", "write it as {a: b}"
            )
            return {}
        if arguments[1] is str:
            return {str(key): str(item) for key, item in value.items()}
        return {
            str(key): _value(arguments[1], item, f"{where}.{key}", problems)
            for key, item in value.items()
        }
    return _scalar(hint, value, where, problems)


def _scalar(hint: Any, value: Any, where: str, problems: list[JobProblem]) -> Any:
    if hint is float:
        number = _float(value)
        if number is None:
            problem = f"expected a number; got {_shown(value)}"
            _report(problems, where, problem, "write it as 0.5 or 3e-4")
        return number
    if hint is int:
        number = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(number, bool) or not isinstance(number, int):
            problem = f"expected a whole number; got {_shown(value)}"
            _report(problems, where, problem, "write it as 4")
        return number
    if hint is bool:
        if not isinstance(value, bool):
            problem = f"expected true or false; got {_shown(value)}"
            _report(problems, where, problem, "write it without quotes")
        return value
    if hint is not str:
        raise TypeError(f"{where}: the tree has a field of type {hint}, which has no reader")
    if not isinstance(value, str):
        _report(problems, where, f"expected text; got {_shown(value)}", "put it in quotes")
    return value


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or (isinstance(value, str) and not _EXPONENT.fullmatch(value)):
        return None
    try:
        return float(value)
    except (TypeError, OverflowError):
        return None


def _report(problems: list[JobProblem], where: str, problem: str, remedy: str) -> None:
    problems.append(JobProblem(where, problem, remedy))


def _suggestion(word: str, known: Iterable[Any]) -> str:
    names = [str(name) for name in known]
    close = difflib.get_close_matches(word, names, n=1)
    return f"did you mean {close[0]!r}?" if close else _names(names)


def _short(value: Any) -> str:
    """The short name that was meant by an enum value such as PRECISION_BF16."""
    return str(value).lower().rsplit("_", 1)[-1]


def _names(known: Iterable[str]) -> str:
    return f"known here: {', '.join(known)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."

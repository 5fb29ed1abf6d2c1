"""The core's values as JSON for etcd and back, by the types of their fields.

Volatile fields, and those that have keys of their own, are left out. Other builds may have written
a value: an absent field takes its default, an unknown one is ignored; a wrong type is an error that
names the field.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from megascale_common.service.errors import CodecError
from megascale_driver.core.storing import key_of, stored_fields

T = TypeVar("T")
SCHEMA_VERSION = 1


def dump(value: Any, **extra: Any) -> bytes:
    """The JSON of a dataclass, with ``extra`` beside its fields."""
    return json.dumps({**_plain(value), **extra}, separators=(",", ":"), sort_keys=True).encode()


def load(kind: type[T], data: bytes, **separate: Any) -> T:
    """The inverse of :func:`dump`; ``separate`` supplies fields that are stored elsewhere.

    Raises:
        CodecError: not JSON, or a field of the wrong type.
    """
    try:
        values = json.loads(data)
    except ValueError as error:
        raise CodecError(f"{kind.__name__}: not JSON: {error}") from error
    built = _build(kind, values, kind.__name__, separate)
    assert isinstance(built, kind)
    return built


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        stored: dict[str, Any] = {}
        for field in stored_fields(type(value)):
            plain = _plain(getattr(value, field.name))
            stored.update(plain if "inline" in field.metadata else {key_of(field): plain})
        return stored
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _build(
    kind: type[Any], values: Any, where: str, separate: Mapping[str, Any] | None = None
) -> Any:
    if not isinstance(values, Mapping):
        raise CodecError(f"{where}: expected an object, got {type(values).__name__}")
    hints = _hints(kind)
    built: dict[str, Any] = dict(separate or {})
    for field in stored_fields(kind):
        name, key = field.name, key_of(field)
        if name in built:
            continue
        if "inline" in field.metadata:
            built[name] = _build(hints[name], values, where)
        elif key in values:
            built[name] = _convert(hints[name], values[key], f"{where}.{key}")
    try:
        return kind(**built)
    except TypeError as error:
        raise CodecError(f"{where}: {error}") from error


_HINTS: dict[type[Any], dict[str, Any]] = {}


def _hints(kind: type[Any]) -> dict[str, Any]:
    if kind not in _HINTS:
        _HINTS[kind] = typing.get_type_hints(kind)
    return _HINTS[kind]


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = next(a for a in arguments if a is not type(None))
        return None if value is None else _convert(inner, value, where)
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type[Any], hint), value, where)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(value)
        except ValueError as error:
            raise CodecError(f"{where}: {error}") from error
    if origin is tuple:
        return _sequence(arguments, value, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise CodecError(f"{where}: expected an object, got {type(value).__name__}")
        return {key: _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if hint is float and isinstance(value, int):
        return float(value)
    if not isinstance(value, hint):
        raise CodecError(f"{where}: expected {hint.__name__}, got {value!r}")
    return value


def _sequence(arguments: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise CodecError(f"{where}: expected a list, got {type(value).__name__}")
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(_convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    return tuple(_convert(a, item, where) for a, item in zip(arguments, value, strict=True))

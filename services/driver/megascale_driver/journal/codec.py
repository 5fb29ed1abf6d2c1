"""The core's values as JSON for etcd and back, by the types of their fields.

Volatile fields, and those that have keys of their own, are left out. Another build may have written
a value: an absent field takes its default, and an unknown one is ignored; a wrong type is an error
that names the field.

The fields of a type are looked up once per type, not per value: a new leader reads a row for each
of ten thousand nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from megascale_common.service.errors import CodecError
from megascale_driver.core.values.stored_fields import added_to, key_of, per_type, stored_fields
from megascale_job.visible import counted

T = TypeVar("T")
Loader = Callable[[Any], Any]
# Versions of the stored forms. Every build since 0.1.0 reads BASIC. PARTS adds large values in
# parts, records of many lines, and intents; SCHEMA adds coalesced forms of these. ``meta`` names
# the highest version in use, so that an earlier build refuses to read what it would misread.
BASIC_VERSION = 1
PARTS_VERSION = 2
SCHEMA_VERSION = 3
# suffix of the key for the true value of a field that earlier builds read another value in
BESIDE = "_added"


class _WrongError(Exception):
    """A value cannot be read; ``path`` is collected on the way up, the innermost part first."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.path: list[str] = []


def dump(value: Any, **extra: Any) -> bytes:
    """The JSON of a dataclass; ``extra``: more keys next to its fields."""
    return text({**plain(value), **extra})


def text(value: Any) -> bytes:
    """Plain values as JSON, in one canonical form."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def load(kind: type[T], data: bytes, **separate: Any) -> T:
    """The inverse of :func:`dump`; ``separate``: fields that are stored elsewhere.

    Raises:
        CodecError: not JSON, or a field of the wrong type.
    """
    return build(kind, parse(data, kind.__name__), **separate)


def parse(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CodecError: it is something else.
    """
    values = _json(data, where)
    if not isinstance(values, dict):
        raise CodecError(f"{where}: expected an object, got {type(values).__name__}")
    return values


def parse_list(data: bytes, where: str) -> list[Any]:
    """A JSON list.

    Raises:
        CodecError: it is something else.
    """
    values = _json(data, where)
    if not isinstance(values, list):
        raise CodecError(f"{where}: expected a list, got {type(values).__name__}")
    return values


def _json(data: bytes, where: str) -> object:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"{where}: not JSON: {error}") from error


def build(kind: type[T], values: Any, **separate: Any) -> T:
    """Build a value from plain JSON values.

    Raises:
        CodecError: a field of the wrong type.
    """
    try:
        found = _loader(kind)(values) if not separate else _with_separate(kind, values, separate)
    except _WrongError as error:
        path = ".".join([kind.__name__, *reversed(error.path)]).replace(".[", "[")
        raise CodecError(f"{path}: {error}") from error
    assert isinstance(found, kind)
    return found


def plain(value: Any) -> Any:
    """A value in the types of JSON: objects, lists, numbers, texts."""
    kind = type(value)
    if kind in (str, int, float, bool, type(None)):
        return value
    if dataclasses.is_dataclass(kind):
        stored: dict[str, Any] = {}
        for name, key, inline in names(kind):
            found = plain(getattr(value, name))
            if inline:
                stored.update(found)
            else:
                stored[key] = found
        return {**stored, **in_earlier_form(value)} if _added(kind) else stored
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def in_earlier_form(value: Any) -> dict[str, str]:
    """For each member unknown to earlier builds: the fallback they read, and the true value."""
    stored: dict[str, str] = {}
    for name, key, forms, _ in _added(type(value)):
        member = getattr(value, name)
        if member in forms:
            stored |= {key: forms[member].value, key + BESIDE: member.value}
    return stored


@per_type
def names(kind: Any) -> tuple[tuple[str, str, bool], ...]:
    """Name and key of each stored field, and whether its own fields take its place."""
    return tuple(
        (field.name, key_of(field), "inline" in field.metadata) for field in stored_fields(kind)
    )


@per_type
def keys(kind: Any) -> frozenset[str]:
    """The keys under which fields of a value are stored."""
    hints = typing.get_type_hints(kind)
    own = {key for _, key, inline in names(kind) if not inline}
    own |= {key + BESIDE for _, key, _, _ in _added(kind)}
    return frozenset(own).union(*(keys(hints[name]) for name, _, inline in names(kind) if inline))


@per_type
def _fields(kind: Any) -> tuple[tuple[str, str, bool, Loader], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((name, key, inline, _loader(hints[name])) for name, key, inline in names(kind))


@per_type
def _added(kind: Any) -> tuple[tuple[str, str, Mapping[Any, Any], Loader], ...]:
    """The fields with members that earlier builds do not know."""
    fields = [field for field in stored_fields(kind) if added_to(field)]
    hints = typing.get_type_hints(kind) if fields else {}
    return tuple(
        (field.name, key_of(field), added_to(field), _loader(hints[field.name])) for field in fields
    )


def _with_separate(kind: type[Any], values: Any, separate: Mapping[str, Any]) -> Any:
    built = {k: v for k, v in _read_fields(kind, values).items() if k not in separate}
    return _make(kind, {**built, **separate})


def _read_fields(kind: type[Any], values: Any) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise _WrongError(f"expected an object, got {type(values).__name__}")
    built: dict[str, Any] = {}
    for name, key, inline, loader in _fields(kind):
        if inline:
            built[name] = loader(values)
        elif key in values:
            try:
                built[name] = loader(values[key])
            except _WrongError as error:
                error.path.append(key)
                raise
    for name, key, _, loader in _added(kind):
        # A member that only a later build knows stays in its earlier form.
        with contextlib.suppress(_WrongError):
            if key + BESIDE in values:
                built[name] = loader(values[key + BESIDE])
    return built


def _make(kind: type[Any], built: dict[str, Any]) -> Any:
    try:
        return kind(**built)
    except (TypeError, ValueError) as error:
        raise _WrongError(str(error)) from error


@per_type
def _loader(hint: Any) -> Loader:
    """The function that reads a plain value as a value of the type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = _loader(next(a for a in arguments if a is not type(None)))
        return lambda value: None if value is None else inner(value)
    if dataclasses.is_dataclass(hint):
        kind = typing.cast(type[Any], hint)
        # Its fields are looked up only with the first value: a type may contain itself.
        return lambda value: _make(kind, _read_fields(kind, value))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum_loader(hint)
    if origin is tuple:
        return _tuple_loader(arguments)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_loader(_loader(arguments[1]))
    return _scalar_loader(hint)


def _enum_loader(kind: type[enum.Enum]) -> Loader:
    known = {member.value: member for member in kind}

    def read(value: Any) -> Any:
        try:
            found = known.get(value)
            return found if found is not None else kind(value)
        except (ValueError, TypeError) as error:
            raise _WrongError(str(error)) from error

    return read


def _scalar_loader(kind: type[Any]) -> Loader:
    def read(value: Any) -> Any:
        if type(value) is kind:
            return value
        if kind is float and isinstance(value, int):
            return float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _WrongError(f"expected {kind.__name__}, got {value!r}")
        return value

    return read


def _mapping_loader(inner: Loader) -> Loader:
    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise _WrongError(f"expected an object, got {type(value).__name__}")
        return {key: _item(inner, item, str(key)) for key, item in value.items()}

    return read


def _tuple_loader(arguments: tuple[Any, ...]) -> Loader:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        inner = _loader(arguments[0])

        def read_all(value: Any) -> Any:
            if not isinstance(value, list):
                raise _WrongError(f"expected a list, got {type(value).__name__}")
            return tuple([_item(inner, item, f"[{i}]") for i, item in enumerate(value)])

        return read_all
    loaders = tuple(_loader(argument) for argument in arguments)

    def read_each(value: Any) -> Any:
        if not isinstance(value, list):
            raise _WrongError(f"expected a list, got {type(value).__name__}")
        if len(value) != len(loaders):
            raise _WrongError(f"expected {counted(len(loaders), 'value')}, got {len(value)}")
        return tuple(loader(item) for loader, item in zip(loaders, value, strict=True))

    return read_each


def _item(loader: Loader, value: Any, where: str) -> Any:
    try:
        return loader(value)
    except _WrongError as error:
        error.path.append(where)
        raise

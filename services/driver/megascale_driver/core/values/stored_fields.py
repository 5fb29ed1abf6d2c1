"""Stored fields of the state, and the changes that cause a write.

The metadata of a field decides. A field without metadata is stored, and a change of it causes a
write.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

# Not stored: a new leader rebuilds it from hellos and heartbeats.
VOLATILE: Mapping[str, bool] = {"volatile": True}
# Stored whenever another field of the same value is; causes no write by itself.
RIDES: Mapping[str, bool] = {"rides": True}
# Stored under a key of its own.
SEPARATE: Mapping[str, bool] = {"separate": True}
# A value whose fields are stored among those of its owner, where older builds read them.
INLINE: Mapping[str, bool] = {"inline": True}

Field = dataclasses.Field[Any]
R = TypeVar("R")


def per_type(function: Callable[[Any], R]) -> Callable[[Any], R]:
    """Call ``function`` once per type: functools.cache, which mypy does not let take a type."""
    return functools.cache(function)


def added_members(forms: Mapping[Any, Any]) -> Mapping[str, Any]:
    """The field has members that earlier builds do not know: each is stored as one that they do.

    The true value is stored next to it, under a key that earlier builds ignore. So they can read
    the row of a job that they would otherwise refuse as a whole, and can lead it.
    """
    return {"added": forms}


def added_to(field: Field) -> Mapping[Any, Any]:
    """The members of the field that earlier builds do not know, each with its stored form."""
    found: Mapping[Any, Any] = field.metadata.get("added", {})
    return found


def stored_as(key: str) -> Mapping[str, str]:
    """The field is stored under ``key``, its name in older builds."""
    return {"key": key}


def key_of(field: Field) -> str:
    """The name under which the field is stored."""
    return str(field.metadata.get("key", field.name))


@per_type
def stored_fields(kind: type[Any]) -> tuple[Field, ...]:
    """The fields that are stored with the value itself; an INLINE value is one field."""
    left_out = ("volatile", "separate")
    return tuple(
        f for f in dataclasses.fields(kind) if not any(name in f.metadata for name in left_out)
    )


@per_type
def _deciding(kind: type[Any]) -> tuple[tuple[str, bool], ...]:
    """The fields whose change causes a write, each with whether it is INLINE."""
    return tuple(
        (f.name, "inline" in f.metadata) for f in stored_fields(kind) if "rides" not in f.metadata
    )


def differs(old: Any, new: Any) -> bool:
    """True if ``new`` must be stored after ``old`` (of the same type, or None).

    A change of RIDES fields alone does not count.
    """
    if old is new:
        return False
    if old is None:
        return True
    for name, inline in _deciding(type(new)):
        before, after = getattr(old, name), getattr(new, name)
        if before is not after and (differs(before, after) if inline else before != after):
            return True
    return False

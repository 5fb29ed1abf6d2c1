"""Which fields of a job are stored: all but unused ones that earlier builds do not know.

A build refuses fields that it does not know, so that none is dropped in silence. Two builds lead in
turn during an update: what the newer one stores, the earlier one has to read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Marks a field that earlier builds do not know. It is stored only where it is not at its default. A
# stored job takes the default of the build that reads it: that of such a field changes only where
# the numbers of a run do not change with it.
ADDED: Mapping[str, bool] = {"added": True}


def stored_values(section: Any) -> dict[str, Any]:
    """The plain values of a job or a section of one, as they are stored."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if item.metadata.get("added") and value == _default(item):
            continue
        is_section = dataclasses.is_dataclass(value)
        found[item.name] = stored_values(value) if is_section else _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [stored_values(item) if dataclasses.is_dataclass(item) else item for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default

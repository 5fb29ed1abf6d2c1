"""How a job's configuration is stored: plain values, without what earlier builds cannot read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Marks a field that earlier builds do not know. It is stored only where it is not at its default,
# so that such a build, which refuses unknown fields, can read the jobs that do not use it. A stored
# job takes the default of the build that reads it: that of such a field stays as it is.
ADDED: Mapping[str, bool] = {"added": True}


def plain_values(section: Any) -> dict[str, Any]:
    """The plain values of a dataclass, as they are stored."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if item.metadata.get("added") and value == _default(item):
            continue
        found[item.name] = plain_values(value) if dataclasses.is_dataclass(value) else _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [plain_values(item) if dataclasses.is_dataclass(item) else item for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default

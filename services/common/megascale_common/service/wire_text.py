"""Makes text from outside (paths, output of programs) fit for protobuf, and names enum values."""

from __future__ import annotations

from typing import Any


def encodable(text: str) -> str:
    """The text with a question mark for each lone surrogate.

    Python reads bytes that are not UTF-8, for instance in file names, as lone surrogates, for which
    protobuf raises.
    """
    return text.encode(errors="replace").decode()


def enum_name(kind: Any, number: int, prefix: str) -> str:
    """The name of an enum's value without ``prefix``; for a newer build's value that of value 0.

    ``kind`` is the enum of the generated code, whose own ``Name`` raises for unknown values.
    """
    # Not `in kind.values()`, which makes a list each time, and a hello has a value per device.
    known = kind.DESCRIPTOR.values_by_number
    name: str = known[number if number in known else 0].name
    return name.removeprefix(prefix)

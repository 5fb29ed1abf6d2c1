"""Text from outside (paths, output of programs) on its way into a protobuf message, and names out.

A message may come from a newer build, whose enums have more values than ours.
"""

from __future__ import annotations

from typing import Any


def encodable(text: str) -> str:
    """The text as protobuf takes it: what is not UTF-8 becomes a question mark.

    Python reads such bytes, of a file name for instance, as lone surrogates, and protobuf raises.
    """
    return text.encode(errors="replace").decode()


def enum_name(kind: Any, number: int, prefix: str) -> str:
    """The name of an enum's value without ``prefix``; that of value 0 for one of a newer build.

    ``kind`` is the enum of the generated code. Its own ``Name`` raises for such a value.
    """
    # Not `in kind.values()`, which makes a list of them: a hello has a value for each device.
    known = kind.DESCRIPTOR.values_by_number
    name: str = known[number if number in known else 0].name
    return name.removeprefix(prefix)

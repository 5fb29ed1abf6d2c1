"""Text from outside (paths, output of programs) on its way into a protobuf message."""

from __future__ import annotations


def encodable(text: str) -> str:
    """The text as protobuf takes it: what is not UTF-8 becomes a question mark.

    Python reads such bytes, of a file name for instance, as lone surrogates, and protobuf raises.
    """
    return text.encode(errors="replace").decode()

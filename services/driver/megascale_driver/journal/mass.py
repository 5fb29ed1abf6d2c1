"""The rows that a mass event changes, as one piece of an intent: their names, and what changes.

A row of a node is 1.5 KB, of which a quarantine changes three fields: the same in all rows but for
the name of the node.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from megascale_driver.journal import coalesced, codec
from megascale_driver.journal.rows import Change, Piece, pieces

PATCHES = b'{"patches":'
MOST = 20_000  # rows in one piece


def packed(changes: Sequence[Change], most_bytes: int) -> list[Piece]:
    """The pieces, of ``most_bytes`` each; one, if the rows change alike."""
    if not changes:
        return []
    texts = [codec.text([change.key, json.loads(change.patch)]).decode() for change in changes]
    names = [change.key.rpartition("/")[2] for change in changes]
    record = coalesced.packed(texts, names)
    value = codec.text({"patches": record})
    if record is not None and len(value) <= most_bytes:
        return [Piece(value, tuple(change.key for change in changes))]
    plain = [Change(change.key, text.encode()) for change, text in zip(changes, texts, strict=True)]
    return [
        Piece(
            codec.text({"patches": [json.loads(item.value or b"") for item in piece]}),
            tuple(item.key for item in piece),
        )
        for piece in pieces(plain, MOST, most_bytes)
    ]


def is_patches(value: bytes) -> bool:
    """Whether a piece is of this kind."""
    return value.startswith(PATCHES)


def unpacked(value: bytes, where: str) -> list[tuple[str, dict[str, Any]]]:
    """(key, the fields that change) of each row.

    Raises:
        CodecError: it cannot be read.
    """
    found = codec.parse(value, where)["patches"]
    rows = found if isinstance(found, list) else coalesced.unpacked(found, where)
    return [(key, patch) for key, patch in rows]

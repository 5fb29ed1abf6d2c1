"""Many values that differ in little as one record: what they have in common once, then the rest.

A mass event (a switch, all nodes of an attempt) is one fact about many nodes. Its faults and its
lines of the log differ in the name of the node and in numbers: a rank, a time, an address. So
their texts are cut at these, equal remainders are kept once, and what was cut out becomes columns,
the first of which has the names of the nodes. 12,500 lines of 1 KB each become 300 KB.

Nothing is lost: a text is put together again byte for byte, whatever the values mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from megascale_common.service.errors import CodecError

LEAST_ITEMS = 8  # fewer are not coalesced
LEAST_GAIN = 3  # nor those of which the record would be more than this part of their texts
SHAPES = "shapes"  # the key by which such a record is known
_NODE = "\0"  # stands for the name of the node; no JSON text has it
_CUT = re.compile(r"(\d+|\0)")
_SEPARATOR = ","


class _Shape:
    """Items that are alike but for their columns; ``places`` are theirs among all items."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.rows: list[list[str]] = []


def packed(texts: Sequence[str], names: Sequence[str]) -> dict[str, Any] | None:
    """The record of JSON texts; None if it would not be much smaller.

    ``names`` has for each text the name of its node, "" without one.
    """
    if len(texts) < LEAST_ITEMS:
        return None
    shapes: dict[tuple[str, ...], _Shape] = {}
    for place, (text, name) in enumerate(zip(texts, names, strict=True)):
        pieces = _CUT.split(text.replace(name, _NODE) if name else text)
        cut = [name if piece == _NODE else piece for piece in pieces[1::2]]
        # Whether a name or a number was cut out belongs to the shape.
        kinds = "".join("n" if piece == _NODE else "d" for piece in pieces[1::2])
        shape = shapes.setdefault((kinds, *pieces[0::2]), _Shape())
        shape.places.append(place)
        shape.rows.append(cut)
    if len(shapes) * LEAST_GAIN > len(texts):
        return None
    return {SHAPES: [_record(key[1:], shape) for key, shape in shapes.items()]}


def unpacked(record: Any, where: str) -> list[Any]:
    """The values of a record, in their order.

    Raises:
        CodecError: it is none.
    """
    try:
        found: dict[int, Any] = {}
        for shape in record[SHAPES]:
            columns = [column.split(_SEPARATOR) for column in shape["columns"]]
            for row, place in enumerate(_places(shape["places"])):
                text = "".join(
                    columns[piece][row] if isinstance(piece, int) else piece
                    for piece in shape["text"]
                )
                found[place] = json.loads(text)
        return [found[place] for place in range(len(found))]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise CodecError(f"{where}: not a record of many values: {error!r}") from error


def _record(literals: Sequence[str], shape: _Shape) -> dict[str, Any]:
    """One shape: its text, in which numbers stand for columns, and these, each once."""
    text: list[str | int] = [literals[0]]
    columns: dict[str, int] = {}
    for values, literal in zip(zip(*shape.rows, strict=True), literals[1:], strict=True):
        if all(value == values[0] for value in values):
            text[-1:] = _joined(text[-1], values[0] + literal)
            continue
        number = columns.setdefault(_SEPARATOR.join(values), len(columns))
        text += [number, literal]
    return {"text": text, "columns": list(columns), "places": _ranges(shape.places)}


def _joined(last: str | int, more: str) -> list[str | int]:
    return [last + more] if isinstance(last, str) else [last, more]


def _ranges(places: Iterable[int]) -> list[list[int]]:
    """Ascending numbers as ranges, each its first and the one behind its last."""
    found: list[list[int]] = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1][1] = place + 1
        else:
            found.append([place, place + 1])
    return found


def _places(ranges: Iterable[Sequence[int]]) -> Iterable[int]:
    for first, behind in ranges:
        yield from range(first, behind)

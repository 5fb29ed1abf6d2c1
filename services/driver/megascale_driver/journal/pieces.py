"""Large transactions: the forms that a decision about ten thousand nodes takes in etcd.

    Batch of a decision
    ├── changes   key -> row                    a few KB each
    │   └── chunks   parts/DIGEST -> items      large fields of a row, written before it
    └── pieces    the changes once more, if there are too many for one transaction:
                  an intent that is carried out in batches (journal.fenced)
                  ├── whole rows
                  └── patches: only the fields that change

See Note [Fenced write] in :mod:`megascale_driver.journal.fenced`.

A mass event (a switch, all nodes of an attempt) is one fact about many nodes: the texts of its
faults, patches and log lines differ in the name of the node and in numbers. Chunks, pieces and the
log (:mod:`megascale_driver.journal.records`) therefore store such texts as one record.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megascale_common.service.errors import CodecError
from megascale_driver.journal import codec

KEY_OVERHEAD_BYTES = 96  # the cluster's prefix, revisions, tags and lengths


@dataclass(frozen=True, slots=True)
class Change:
    """A new value for a key; None: the key is deleted.

    With ``prefix``, all keys that begin with it are deleted; with ``end``, all keys from it to
    before ``end``. ``patch``: the fields in which the value differs from the stored one, if that is
    known.
    """

    key: str
    value: bytes | None = None
    prefix: bool = False
    end: str = ""
    patch: bytes = b""


@dataclass(frozen=True, slots=True)
class Piece:
    """A stored part of a decision that is too large for one transaction.

    ``rows``: the keys of the rows that it changes in some fields, in its order; none: whole rows.
    """

    value: bytes
    rows: tuple[str, ...] = ()


def split(changes: list[Change], most: int, most_bytes: int) -> Iterator[list[Change]]:
    """The changes in order, in lists within the limits; a larger value is alone in its list."""
    piece: list[Change] = []
    size_bytes = 0
    for change in changes:
        more_bytes = size_of(change)
        if piece and (len(piece) == most or size_bytes + more_bytes > most_bytes):
            yield piece
            piece, size_bytes = [], 0
        piece.append(change)
        size_bytes += more_bytes
    if piece:
        yield piece


def size_of(change: Change) -> int:
    """Upper bound of the bytes of a change in a request; compare and read name the key, too."""
    return 3 * (len(change.key) + KEY_OVERHEAD_BYTES) + len(change.value or b"")


# Records: many values that differ only in details, with their common parts stored once.
#
# The texts of a mass event differ in the name of the node and in numbers: a rank, a time, an
# address. They are cut at these, equal remainders are kept once, and the parts that were cut out
# become columns, the first of which has the names of the nodes. 12,500 lines of 1 KB each become
# 300 KB.
#
# Nothing is lost: a text is put together again byte for byte, whatever its values mean.

LEAST_ITEMS = 8  # fewer items are not coalesced
LEAST_GAIN = 3  # and a record needs at least this many items per shape
SHAPES = "shapes"  # the key that identifies such a record
_NODE = "\0"  # placeholder for the name of the node; no JSON text contains it
_CUT = re.compile(r"(\d+|\0)")
_SEPARATOR = ","


class _Shape:
    """Items that differ only in their columns; ``places``: their indices among all items."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.rows: list[list[str]] = []


def record_of(texts: Sequence[str], names: Sequence[str]) -> dict[str, Any] | None:
    """The record of JSON texts; None if it would not be much smaller.

    ``names``: for each text the name of its node, "" without one.
    """
    if len(texts) < LEAST_ITEMS:
        return None
    shapes: dict[tuple[str, ...], _Shape] = {}
    for place, (text, name) in enumerate(zip(texts, names, strict=True)):
        pieces = _CUT.split(text.replace(name, _NODE) if name else text)
        cut = [name if piece == _NODE else piece for piece in pieces[1::2]]
        # Whether a name or a number was cut out is part of the shape.
        kinds = "".join("n" if piece == _NODE else "d" for piece in pieces[1::2])
        shape = shapes.setdefault((kinds, *pieces[0::2]), _Shape())
        shape.places.append(place)
        shape.rows.append(cut)
    if len(shapes) * LEAST_GAIN > len(texts):
        return None
    return {SHAPES: [_record(key[1:], shape) for key, shape in shapes.items()]}


def values_of(record: Any, where: str) -> list[Any]:
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
    """One shape: its text, in which numbers refer to columns, and each different column once."""
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
    """Ascending numbers as ranges of a first and an exclusive last number."""
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


# Large fields of a stored value in immutable chunks, so that the value itself stays a few KB.
#
# A job on ten thousand nodes has a placement, faults and spares of megabytes. Fields of many items
# leave the value: their items are stored in chunks that are named by their content and written
# once, before the transaction that names them in the value's ``parts``. Items of a mass event
# become one record. So a decision writes only what is new, and a list that only grows rewrites its
# last chunk alone. A chunk that no value names is garbage and does no harm.

INLINE_ITEMS = 8  # fields of fewer items stay in the value
INLINE_BYTES = 2048  # and so do fields with smaller JSON
CHUNK_BYTES = 128 << 10  # a chunk is closed at this size; its last item can exceed it
SLICE_ITEMS = 8192  # most items of a large field in one record
COALESCED_BYTES = 64 << 10  # only larger JSON becomes a record,
# and only if the record is not larger than this: it has to fit a transaction
MAX_RECORD_BYTES = 600 << 10
_LIST = b"["
PARTS = "parts"  # the key next to a value's fields


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value without its large fields, and their chunks by key."""

    values: dict[str, Any]
    chunks: dict[str, bytes]

    @property
    def version(self) -> int:
        """The schema version that reads it."""
        if any(not data.startswith(_LIST) for data in self.chunks.values()):
            return codec.SCHEMA_VERSION
        return codec.PARTS_VERSION if self.chunks else codec.BASIC_VERSION

    @property
    def keys(self) -> frozenset[str]:
        """The chunks that the value names."""
        return frozenset(self.chunks)


@dataclass(slots=True)
class _Known:
    """A field as last encoded: if unchanged it costs nothing, if longer only its new items."""

    value: Any
    items: list[bytes]
    inline: Any
    # The chunks of each slice of SLICE_ITEMS items.
    slices: list[dict[str, bytes]]
    keys: list[str] = field(init=False)
    chunks: dict[str, bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.chunks = {key: data for chunks in self.slices for key, data in chunks.items()}
        self.keys = list(self.chunks)


class PartEncoder:
    """Encodes values and remembers their large fields."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Known] = {}

    def encode(self, owner: str, folder_of: Callable[[str], str], value: Any) -> Encoded:
        """The value's plain form.

        ``owner``: unique name of the value; ``folder_of``: the folder for the chunks of a field.
        """
        parts: dict[str, list[str]] = {}
        chunks: dict[str, bytes] = {}
        values = self._walk(owner, folder_of, "", value, parts, chunks)
        if parts:
            values[PARTS] = parts
        return Encoded(values, chunks)

    def forget(self, prefix: str) -> None:
        """Forget values that are no longer stored, by the beginning of their names."""
        for key in [key for key in self._known if key[0].startswith(prefix)]:
            del self._known[key]

    def _walk(
        self,
        owner: str,
        folder_of: Callable[[str], str],
        path: str,
        value: Any,
        parts: dict[str, list[str]],
        chunks: dict[str, bytes],
    ) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, key, inline in codec.names(type(value)):
            item, where = getattr(value, name), f"{path}{key}"
            if inline:
                values.update(self._walk(owner, folder_of, path, item, parts, chunks))
            elif dataclasses.is_dataclass(item):
                values[key] = self._walk(owner, folder_of, f"{where}.", item, parts, chunks)
            elif isinstance(item, tuple | Mapping) and len(item) > INLINE_ITEMS:
                known = self._field(owner, folder_of(where), where, item)
                if not known.keys:
                    values[key] = known.inline
                else:
                    parts[where] = known.keys
                    chunks.update(known.chunks)
            else:
                self._known.pop((owner, where), None)
                values[key] = codec.plain(item)
        return values | codec.in_earlier_form(value)

    def _field(self, owner: str, folder: str, where: str, value: Any) -> _Known:
        before = self._known.get((owner, where))
        # Identity suffices, since values never change. The folder is compared as well: slots move
        # to a new one with each attempt.
        if before is not None and before.value is value and _all_in(before.keys, folder):
            return before
        kept = _kept(value, before)
        items = _items(value, before, kept)
        if sum(map(len, items)) <= INLINE_BYTES:
            found = _Known(value, items, codec.plain(value), [])
        else:
            # Full slices that have not changed are kept.
            same = kept // SLICE_ITEMS if before is not None and _all_in(before.keys, folder) else 0
            slices = before.slices[:same] if before is not None else []
            names = _names(value)
            for first in range(len(slices) * SLICE_ITEMS, len(items), SLICE_ITEMS):
                end = first + SLICE_ITEMS
                slices.append(dict(_chunks(folder, items[first:end], names[first:end])))
            found = _Known(value, items, None, slices)
        self._known[owner, where] = found
        return found


def joined(values: dict[str, Any], chunks: Mapping[str, bytes]) -> dict[str, Any]:
    """The value with its large fields back in their places.

    Raises:
        CodecError: a chunk is missing or damaged.
    """
    values = dict(values)
    for path, keys in values.pop(PARTS, {}).items():
        items: list[Any] = []
        for key in keys:
            data = chunks.get(key)
            if data is None or not key.endswith(_digest(data)):
                raise CodecError(f"{path}: the part {key} is {'damaged' if data else 'missing'}")
            if data.startswith(_LIST):
                items += codec.parse_list(data, key)
            else:
                items += values_of(codec.parse(data, key), key)
        *parents, name = path.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        # Items of an object are stored as pairs; items of a list never look like that.
        place[name] = dict(item["pair"] for item in items) if _is_pairs(items) else items
    return values


def named(values: Mapping[str, Any]) -> list[str]:
    """Keys of the chunks that a value names."""
    return [key for keys in values.get(PARTS, {}).values() for key in keys]


def _is_pairs(items: list[Any]) -> bool:
    return isinstance(items[0], dict) and set(items[0]) == {"pair"}


def _kept(value: Any, before: _Known | None) -> int:
    """Number of items at the front of a list that have not changed, by identity."""
    if before is None or not (isinstance(value, tuple) and isinstance(before.value, tuple)):
        return 0
    length = min(len(before.value), len(value))
    same = list(map(operator.is_, before.value[:length], value[:length]))
    return same.index(False) if False in same else length


def _items(value: Any, before: _Known | None, kept: int) -> list[bytes]:
    if isinstance(value, Mapping):
        return [codec.text({"pair": [str(k), codec.plain(value[k])]}) for k in sorted(value)]
    # If a list has grown, only the new items are encoded.
    head = before.items[:kept] if before is not None else []
    return head + [codec.text(codec.plain(item)) for item in value[kept:]]


def _names(value: Any) -> list[str]:
    """For each item the node that it is about, "" without one."""
    if isinstance(value, Mapping):
        return [str(key) for key in sorted(value)]
    return [item if isinstance(item, str) else getattr(item, "node", "") for item in value]


def _chunks(folder: str, items: list[bytes], names: list[str]) -> Iterator[tuple[str, bytes]]:
    if sum(map(len, items)) > COALESCED_BYTES:
        record = record_of([item.decode() for item in items], names)
        if record is not None and len(data := codec.text(record)) <= MAX_RECORD_BYTES:
            yield folder + _digest(data), data
            return
    # Filled in order, so that a list that only grows keeps its full chunks.
    chunk: list[bytes] = []
    size_bytes = 0
    for item in items:
        chunk.append(item)
        size_bytes += len(item) + 1
        if size_bytes >= CHUNK_BYTES:
            yield _chunk(folder, chunk)
            chunk, size_bytes = [], 0
    if chunk:
        yield _chunk(folder, chunk)


def _chunk(folder: str, items: list[bytes]) -> tuple[str, bytes]:
    data = b"[" + b",".join(items) + b"]"
    return folder + _digest(data), data


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=10).hexdigest()


def _all_in(keys: list[str], folder: str) -> bool:
    return all(key.startswith(folder) for key in keys)


# Patches: the rows that a mass event changes, as one piece of an intent with their names and
# changes.
#
# A node's row has 1.5 KB, of which a quarantine changes three fields: the same in all rows except
# for the name of the node.

PATCHES = b'{"patches":'
MOST = 20_000  # rows in one piece


def patches(changes: Sequence[Change], most_bytes: int) -> list[Piece]:
    """The pieces, at most ``most_bytes`` each; a single one if the rows change alike."""
    if not changes:
        return []
    texts = [codec.text([change.key, json.loads(change.patch)]).decode() for change in changes]
    names = [change.key.rpartition("/")[2] for change in changes]
    record = record_of(texts, names)
    value = codec.text({"patches": record})
    if record is not None and len(value) <= most_bytes:
        return [Piece(value, tuple(change.key for change in changes))]
    plain = [Change(change.key, text.encode()) for change, text in zip(changes, texts, strict=True)]
    return [
        Piece(
            codec.text({"patches": [json.loads(item.value or b"") for item in piece]}),
            tuple(item.key for item in piece),
        )
        for piece in split(plain, MOST, most_bytes)
    ]


def is_patches(value: bytes) -> bool:
    """True if the piece has patches."""
    return value.startswith(PATCHES)


def patches_of(value: bytes, where: str) -> list[tuple[str, dict[str, Any]]]:
    """(key, changed fields) of each row.

    Raises:
        CodecError: it cannot be read.
    """
    found = codec.parse(value, where)["patches"]
    rows = found if isinstance(found, list) else values_of(found, where)
    return [(key, patch) for key, patch in rows]

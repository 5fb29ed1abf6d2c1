"""Large fields of a stored value in immutable chunks, so that the value itself stays a few KB.

A job on ten thousand nodes has a placement, faults and spares of megabytes. Fields of many items
leave the value: their items are stored in chunks that are named by their content and written once,
before the transaction that names them in the value's ``parts``. Items of a mass event that differ
in little become one record (:mod:`megascale_driver.journal.coalesced`). So a decision writes what
is new in it, and a list that only grows rewrites its last chunk alone. A chunk that no value names
is garbage and harms nobody.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megascale_common.service.errors import CodecError
from megascale_driver.journal import coalesced, codec

INLINE_ITEMS = 8  # fields of fewer items stay
INLINE_BYTES = 2048  # and so do those whose JSON is not larger
CHUNK_BYTES = 128 << 10  # a chunk is closed once it is as large; its last item may exceed this
SLICE_ITEMS = 8192  # of a large field at most so many become one record
COALESCED_BYTES = 64 << 10  # if their JSON is larger than this,
MAX_RECORD_BYTES = 600 << 10  # and the record is not: it has to fit a transaction
_LIST = b"["
PARTS = "parts"  # the key beside a value's fields


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value without its large fields, and the chunks of these by key."""

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
    """A field as encoded last: an unchanged one costs nothing, a longer one its new items."""

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

        ``owner`` names the value among all; ``folder_of`` gives the folder of a field's chunks.
        """
        parts: dict[str, list[str]] = {}
        chunks: dict[str, bytes] = {}
        values = self._walk(owner, folder_of, "", value, parts, chunks)
        if parts:
            values[PARTS] = parts
        return Encoded(values, chunks)

    def forget(self, prefix: str) -> None:
        """Forget the values whose names begin so; they are stored no longer."""
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
        if before is not None and before.value is value and _all_in(before.keys, folder):
            return before
        kept = _kept(value, before)
        items = _items(value, before, kept)
        if sum(map(len, items)) <= INLINE_BYTES:
            found = _Known(value, items, codec.plain(value), [])
        else:
            # Slices that are full and have not changed are those from before.
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
                items += coalesced.unpacked(codec.parse(data, key), key)
        *parents, name = path.split(".")
        place = values
        for parent in parents:
            place = place.setdefault(parent, {})
        # Items of an object are pairs in a list of their own; those of a list never are.
        place[name] = dict(item["pair"] for item in items) if _is_pairs(items) else items
    return values


def named(values: Mapping[str, Any]) -> list[str]:
    """Keys of the chunks that a value names."""
    return [key for keys in values.get(PARTS, {}).values() for key in keys]


def _is_pairs(items: list[Any]) -> bool:
    return isinstance(items[0], dict) and set(items[0]) == {"pair"}


def _kept(value: Any, before: _Known | None) -> int:
    """How many items at the front of a list are those from before; values of the core stay."""
    if before is None or not (isinstance(value, tuple) and isinstance(before.value, tuple)):
        return 0
    length = min(len(before.value), len(value))
    same = list(map(operator.is_, before.value[:length], value[:length]))
    return same.index(False) if False in same else length


def _items(value: Any, before: _Known | None, kept: int) -> list[bytes]:
    if isinstance(value, Mapping):
        return [codec.text({"pair": [str(k), codec.plain(value[k])]}) for k in sorted(value)]
    # Of a list that has grown only the new items are encoded.
    head = before.items[:kept] if before is not None else []
    return head + [codec.text(codec.plain(item)) for item in value[kept:]]


def _names(value: Any) -> list[str]:
    """Of each item the node that it is about, "" if it is about none."""
    if isinstance(value, Mapping):
        return [str(key) for key in sorted(value)]
    return [item if isinstance(item, str) else getattr(item, "node", "") for item in value]


def _chunks(folder: str, items: list[bytes], names: list[str]) -> Iterator[tuple[str, bytes]]:
    if sum(map(len, items)) > COALESCED_BYTES:
        record = coalesced.packed([item.decode() for item in items], names)
        if record is not None and len(data := codec.text(record)) <= MAX_RECORD_BYTES:
            yield folder + _digest(data), data
            return
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

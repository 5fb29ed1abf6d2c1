"""Large fields of a stored value in immutable chunks, so that the value itself stays a few KB.

A job on ten thousand nodes has a placement, faults and spares of megabytes. Fields of many items
leave the value: their items are stored in chunks that are named by their content and written once,
before the transaction that names them in the value's ``parts``. So a decision writes what is new in
it, and a list that only grows rewrites its last chunk alone. A chunk that no value names is garbage
and harms nobody.
"""

from __future__ import annotations

import dataclasses
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megascale_common.service.errors import CodecError
from megascale_driver.journal import codec

INLINE_ITEMS = 8  # fields of fewer items stay
INLINE_BYTES = 2048  # and so do those whose JSON is not larger
CHUNK_BYTES = 128 << 10  # a chunk is closed once it is as large; its last item may exceed this
PARTS = "parts"  # the key beside a value's fields


@dataclass(frozen=True, slots=True)
class Encoded:
    """A value without its large fields, and the chunks of these by key."""

    values: dict[str, Any]
    chunks: dict[str, bytes]

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
    keys: list[str]
    chunks: dict[str, bytes]


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
        return values

    def _field(self, owner: str, folder: str, where: str, value: Any) -> _Known:
        before = self._known.get((owner, where))
        if before is not None and before.value is value and _all_in(before.keys, folder):
            return before
        items = _items(value, before)
        if sum(map(len, items)) <= INLINE_BYTES:
            found = _Known(value, items, codec.plain(value), [], {})
        else:
            chunks = dict(_chunks(folder, items))
            found = _Known(value, items, None, list(chunks), chunks)
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
            items += codec.parse_list(data, key)
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


def _items(value: Any, before: _Known | None) -> list[bytes]:
    if isinstance(value, Mapping):
        return [codec.text({"pair": [str(k), codec.plain(value[k])]}) for k in sorted(value)]
    # Of a list that has grown only the new items are encoded: values of the core never change.
    kept = 0
    if before is not None and isinstance(before.value, tuple):
        length = min(len(before.value), len(value))
        same = list(map(operator.is_, before.value[:length], value[:length]))
        kept = same.index(False) if False in same else length
    head = before.items[:kept] if before is not None else []
    return head + [codec.text(codec.plain(item)) for item in value[kept:]]


def _chunks(folder: str, items: list[bytes]) -> Iterator[tuple[str, bytes]]:
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

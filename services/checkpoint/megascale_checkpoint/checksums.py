"""Checksums: xxh3-128 of slot pieces and files, and JSON records that carry their own.

xxh3 runs at memory speed (about 20 GB/s per core against 1 GB/s of SHA-256), so everything that is
written is checksummed and everything that is read is verified. It detects damage; it does not stop
an adversary who can write the files.

So a right checksum says nothing about the meaning: what is read is also converted to a struct of
msgspec (:func:`convert`), and refused as damaged with the file's name if it does not fit.
"""

from __future__ import annotations

import heapq
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash
from msgspec import Meta

from megascale_common.service.errors import DamagedError
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece

T = TypeVar("T")
# Unit of work between two checks for cancellation: large enough to run at full speed.
CHUNK_BYTES = 16 << 20
RECORD_CHECKSUM = "xxh3"
MAX_SHOWN_CHARS = 80  # of a value that is wrong, in an error
MAX_JSON_DEPTH = 64  # lists and objects within each other; what is written here has seven at most


def checksum(data: bytes | memoryview) -> str:
    """xxh3-128 of ``data``, hexadecimal."""
    hasher = xxhash.xxh3_128()
    for start in range(0, len(data), CHUNK_BYTES):
        hasher.update(data[start : start + CHUNK_BYTES])
    return str(hasher.hexdigest())


def piece_view(piece: ShardPiece, image: memoryview) -> memoryview:
    """The bytes of ``piece`` in a slot image."""
    return image[piece.slot_offset_bytes : piece.slot_offset_bytes + piece.size_bytes]


def piece_checksums(layout: ShardLayout, image: memoryview) -> tuple[str, ...]:
    """Checksum of every piece of a slot image, in the layout's order."""
    return tuple(checksum(piece_view(piece, image)) for piece in layout.pieces)


def balanced(sizes: Sequence[int], count: int) -> list[list[int]]:
    """The indices of ``sizes`` in at most ``count`` shares of about equal sums."""
    heaps = [(0, number, list[int]()) for number in range(max(1, count))]
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        total, number, share = heaps[0]
        share.append(index)
        heapq.heapreplace(heaps, (total + sizes[index], number, share))
    return [share for _, _, share in heaps if share]


def verify_image(
    layout: ShardLayout,
    image: memoryview,
    checksums: tuple[str, ...],
    file: str,
    share: list[int] | None = None,
) -> None:
    """Raise DamagedError naming ``file`` when a piece of ``image`` differs from what was sealed.

    With ``share`` only the pieces of these indices are read.
    """
    for index in range(len(layout.pieces)) if share is None else share:
        piece = layout.pieces[index]
        if checksum(piece_view(piece, image)) != checksums[index]:
            raise DamagedError(file, f"{piece.name} ({piece.state}) changed after it was sealed")


def dump_record(values: Mapping[str, Any]) -> bytes:
    """``values`` as JSON that carries the checksum of its own canonical form."""
    return json.dumps(
        {**values, RECORD_CHECKSUM: checksum(_canonical(values))}, indent=1, sort_keys=True
    ).encode()


def load_record(data: bytes, file: str) -> dict[str, Any]:
    """The inverse of :func:`dump_record`.

    Raises:
        DamagedError: the content of ``file`` differs from what was written.
    """
    values = load_json_object(data, file)
    expected = values.pop(RECORD_CHECKSUM, None)
    if checksum(_canonical(values)) != expected:
        raise DamagedError(file, "its checksum does not match its content")
    return values


def load_json(data: bytes | str, file: str) -> Any:
    """The value in ``data``, which ``file`` holds.

    Raises:
        DamagedError: it is no JSON, or nested deeper than MAX_JSON_DEPTH.
    """
    too_deep = f"is JSON nested deeper than {MAX_JSON_DEPTH} lists and objects"
    try:
        value = json.loads(data)
    except RecursionError as error:
        raise DamagedError(file, too_deep) from error
    except ValueError as error:
        raise DamagedError(file, f"is not JSON: {error}") from error
    if is_too_deep(value):
        raise DamagedError(file, too_deep)
    return value


def is_too_deep(value: Any) -> bool:
    """Whether lists and objects are within each other more than MAX_JSON_DEPTH times."""
    # Level by level: how often a function may call itself depends on who has called it.
    level = [value]
    for _ in range(MAX_JSON_DEPTH + 1):
        level = [
            child
            for each in level
            if isinstance(each, dict | list)
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return True


def load_json_object(data: bytes | str, file: str) -> dict[str, Any]:
    """As :func:`load_json`, for an object."""
    values = load_json(data, file)
    if not isinstance(values, dict):
        raise DamagedError(file, "is not a JSON object")
    return values


# In JSON true is no number, and 1.0 no whole one. Numbers are counted in 64 bits.
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Positive = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Number = Annotated[float, Meta(gt=-1e300, lt=1e300)]
Digest = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Time = Annotated[datetime, Meta(tz=True)]

_NAMES = {
    "`int`": "a whole number",
    "`float`": "a number",
    "`str`": "text",
    "`bool`": "true or false",
    "`array`": "a list",
    "`object`": "an object",
    "`datetime`": "a time such as 2026-01-01T00:00:00.000+00:00",
    "`str` matching regex '^[0-9a-f]{32}$'": "an xxh3-128 of 32 hexadecimal digits",
    "RFC3339": "a time such as 2026-01-01T00:00:00.000+00:00",
}
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")


def convert(values: Any, form: type[T], file: str, where: str = "") -> T:
    """``values``, which ``file`` holds at ``where``, as a ``form`` of msgspec: types are checked.

    Raises:
        DamagedError: a field is missing, unknown, or not of its type; names the field.
    """
    try:
        return msgspec.convert(values, form)
    except (msgspec.ValidationError, ValueError) as error:  # half of a surrogate pair is the latter
        raise DamagedError(file, _problem(str(error), values, where)) from error


def _problem(error: str, values: Any, where: str) -> str:
    """What msgspec's ``error`` says, with the name of the field and its value."""
    text, found, place = error.rpartition(" - at `$")
    if not found:
        text, place = error, ""
    # Keys of maps are not in the text.
    path = _STEP.findall(place.removesuffix("`").split("[...]", 1)[0])
    name, value = where, values
    try:
        for key, index in path:
            name += f"[{index}]" if index else f".{key}" if name else key
            value = value[int(index) if index else key]
    except (KeyError, IndexError, TypeError):  # what looks like a path was a name in the file
        return shown(error)
    field = re.search(r"(missing required|unknown) field `(.*)`", text, re.DOTALL)
    if field is not None:
        full = f"{name}.{field[2]}" if name else field[2]
        if field[1] == "unknown":
            return f"has the unknown field {full[:MAX_SHOWN_CHARS]}"
        return f"{full} is missing"
    if text.startswith("Expected `object`") and not path:
        return f"{name or 'its content'} is not an object"
    wanted = re.match(r"(?:Expected|Invalid) (`\w+`|RFC3339)( (?!encoded)[^,]*)?", text)
    if wanted is None:  # a value outside an enumeration or out of range, or a form's own words
        return f"{name} is {shown(value)}: {text[:1].lower()}{text[1:]}" if path else text
    kind, bounds = wanted[1], wanted[2] or ""
    needed = _NAMES.get(f"{kind}{bounds}") or f"{_NAMES.get(kind, kind)}{bounds}"
    return f"{name} is {shown(value)} where {needed} is needed"


def is_count(value: Any) -> bool:
    """True for a whole number that fits :data:`Count`; in JSON true is none."""
    return type(value) is int and 0 <= value < 1 << 63


def shown(value: Any) -> str:
    """A value that is wrong; of a long one its beginning."""
    text = reprlib.repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

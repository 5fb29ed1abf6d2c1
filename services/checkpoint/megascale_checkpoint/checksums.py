"""Checksums: xxh3-128 of slot pieces and files, and JSON records that carry their own.

xxh3 runs at memory speed (about 20 GB/s per core against 1 GB/s of SHA-256), so everything that is
written is checksummed and everything that is read is verified. It detects damage; it does not stop
an adversary who can write the files.

So a right checksum says nothing about the meaning: what is read is also checked field by field
(:func:`check_fields`), and refused as damaged with the file's name.
"""

from __future__ import annotations

import heapq
import json
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import xxhash

from megascale_common.service.errors import DamagedError
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece

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


def shares(layout: ShardLayout, count: int) -> list[list[int]]:
    """The pieces' indices in ``count`` shares of about equal bytes: one for each thread."""
    return balanced([piece.size_bytes for piece in layout.pieces], count)


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


@dataclass(frozen=True, slots=True)
class Kind:
    """What the value of a field must be; ``what`` is said to people."""

    what: str
    fits: Callable[[Any], bool]


def whole(least: int, most: int = (1 << 63) - 1) -> Kind:
    """A whole number within bounds; in JSON true is none."""
    return Kind(
        f"a whole number of {least} to {most}", lambda v: type(v) is int and least <= v <= most
    )


def list_of(kind: Kind) -> Kind:
    """A list of such values."""
    return Kind(
        f"a list, each {kind.what}", lambda v: isinstance(v, list) and all(map(kind.fits, v))
    )


def object_of(kind: Kind) -> Kind:
    """An object of such values, by any name."""
    return Kind(
        f"an object, each {kind.what}",
        lambda v: isinstance(v, dict) and all(map(kind.fits, v.values())),
    )


def _is_time(value: Any) -> bool:
    try:
        datetime.fromisoformat(value).timestamp()
    except (TypeError, ValueError, OverflowError):
        return False
    return True


TEXT = Kind("text", lambda v: isinstance(v, str))
TRUTH = Kind("true or false", lambda v: isinstance(v, bool))
NUMBER = Kind("a number", lambda v: type(v) in (int, float) and abs(v) < 1e300)
OBJECT = Kind("an object", lambda v: isinstance(v, dict))
COUNT = whole(0)
CHECKSUM = Kind(
    "an xxh3-128 of 32 hexadecimal digits",
    lambda v: isinstance(v, str) and len(v) == 32 and set(v) <= set("0123456789abcdef"),
)
TIME = Kind("a time such as 2026-01-01T00:00:00.000+00:00", _is_time)


def check_fields(
    values: Any,
    kinds: Mapping[str, Kind],
    file: str,
    *,
    required: Iterable[str] = (),
    where: str = "",
    closed: bool = False,
) -> None:
    """Check the meaning of an object that ``file`` holds, at ``where`` in it.

    Args:
        kinds: what the fields are that may be there.
        closed: whether no others may.

    Raises:
        DamagedError: a field is missing, unknown, or of another kind; names it.
    """
    if not isinstance(values, dict):
        raise DamagedError(file, f"{where or 'its content'} is not an object")
    prefix = f"{where}." if where else ""
    for name in required:
        if name not in values:
            raise DamagedError(file, f"{prefix}{name} is missing")
    for name, value in values.items():
        kind = kinds.get(name)
        if kind is None:
            if closed:
                unknown = f"{prefix}{name}"[:MAX_SHOWN_CHARS]
                raise DamagedError(file, f"has the unknown field {unknown}")
        elif not kind.fits(value):
            raise DamagedError(
                file, f"{prefix}{name} is {shown(value)} where {kind.what} is needed"
            )


def shown(value: Any) -> str:
    """A value that is wrong; of a long one its beginning."""
    text = reprlib.repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def _canonical(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()

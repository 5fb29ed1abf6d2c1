"""The file format of one rank's part of a checkpoint: standard safetensors, one tensor per piece.

Each 1-D tensor is one primary piece. Its metadata name the flat range, the box and the global
parameter that it covers, so any later layout finds what it needs, and hold its checksum, so a piece
is verified without reading the whole file; a large one has those of its chunks as well, so that
several readers share it. The header has a checksum of its own, because otherwise
a flipped bit in an offset would go undetected.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from megascale_checkpoint.checksums import (
    CHUNK_BYTES,
    RECORD_CHECKSUM,
    Count,
    Digest,
    checksum,
    convert,
    dump_record,
    load_json,
    load_json_object,
    load_record,
    piece_view,
    shown,
)
from megascale_checkpoint.commit.manifest import File, Manifest
from megascale_checkpoint.storage import Storage
from megascale_common.service.errors import DamagedError, RequestError
from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece
from megascale_job.sizes.read_plan import chunk_bytes
from megascale_job.visible import agreed, counted

FORMAT = "megascale-shard-1"
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float64": "F64"}  # safetensors' names
# Some 600 bytes a piece: a rank alone with 128 layers has 5,000, and here is room for 28,000. A
# header of that size takes up to 0.6 GiB of memory when it is read.
MAX_HEADER_BYTES = 16 << 20
MAX_DIMENSIONS = 8  # of a parameter; experts have three
MAX_ELEMENTS = 1 << 60  # of a parameter, so that its bytes are counted in 64 bits
ALIGNMENT = 4096  # data starts on a page, so that files can be mapped
_LENGTH = struct.Struct("<Q")
_SHORT_DTYPES = {short: name for name, short in DTYPES.items()}
_Shape = Annotated[list[Count], Meta(max_length=MAX_DIMENSIONS)]


class _Entry(Struct):
    """A tensor of the header, as safetensors has it."""

    dtype: str
    shape: _Shape
    data_offsets: tuple[Count, Count]


class _Described(Struct):
    """What the metadata say of a tensor; ``chunks`` is absent for small pieces."""

    name: str
    state: str
    global_shape: _Shape
    start: _Shape
    stop: _Shape
    flat: tuple[Count, Count]
    xxh3: Digest
    chunks: list[Digest] = []


@dataclass(frozen=True, slots=True)
class Origin:
    """What a shard file belongs to."""

    job: str
    attempt: int
    step: int
    rank: int


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece in a file; ``piece.slot_offset_bytes`` is its offset in bytes in ``file``."""

    piece: ShardPiece
    checksum: str
    file: str
    chunks: tuple[str, ...] = ()


def primary(layout: ShardLayout, checksums: tuple[str, ...]) -> list[tuple[ShardPiece, str]]:
    """The pieces that a rank writes, each with its checksum, in the order of the slot.

    These are the primary ones that are not empty; replicas are written by one rank only.
    """
    chosen = [
        (p, c) for p, c in zip(layout.pieces, checksums, strict=True) if p.primary and p.size_bytes
    ]
    return sorted(chosen, key=lambda item: item[0].slot_offset_bytes)


def chunk_checksums(view: memoryview) -> list[str]:
    """Checksums of the chunks of a piece; none of one that is not divided."""
    length = chunk_bytes(len(view))
    if len(view) <= length:
        return []
    return [checksum(view[begin : begin + length]) for begin in range(0, len(view), length)]


def encode_header(
    origin: Origin,
    pieces: list[tuple[ShardPiece, str]],
    chunks: Sequence[Sequence[str]] = (),
) -> bytes:
    """Length and JSON of a safetensors header, padded with spaces to ALIGNMENT.

    ``chunks``: for each piece the checksums of its chunks (:func:`chunk_checksums`).

    Raises:
        RequestError: it would be larger than any reader takes.
    """
    header: dict[str, Any] = {}
    metadata = {
        "format": FORMAT,
        "origin": json.dumps([origin.job, origin.attempt, origin.step, origin.rank]),
    }
    offset = 0
    for number, (piece, digest) in enumerate(pieces):
        key = f"{piece.name}/{piece.state}/{number}"
        header[key] = {
            "dtype": DTYPES[piece.dtype],
            "shape": [piece.flat_stop - piece.flat_start],
            "data_offsets": [offset, offset + piece.size_bytes],
        }
        described = {
            "name": piece.name,
            "state": piece.state,
            "global_shape": piece.global_shape,
            "start": piece.start,
            "stop": piece.stop,
            "flat": [piece.flat_start, piece.flat_stop],
            RECORD_CHECKSUM: digest,
        }
        if chunks and chunks[number]:
            described["chunks"] = chunks[number]
        metadata[key] = json.dumps(described)
        offset += piece.size_bytes
    header["__metadata__"] = metadata
    # Safetensors allows strings only in __metadata__, so the checksum of all the rest goes there.
    metadata[RECORD_CHECKSUM] = json.loads(dump_record(header))[RECORD_CHECKSUM]
    body = json.dumps(header, separators=(",", ":")).encode()
    if len(body) > MAX_HEADER_BYTES - ALIGNMENT:
        raise RequestError(
            f"the {counted(len(pieces), 'piece')} of rank {origin.rank} "
            f"{agreed(len(pieces), 'need')} a header of {len(body)} bytes, "
            f"and files have one of {MAX_HEADER_BYTES} at most: divide the model over more ranks"
        )
    body += b" " * (-(_LENGTH.size + len(body)) % ALIGNMENT)
    return _LENGTH.pack(len(body)) + body


def piece_chunks(piece: ShardPiece, image: memoryview) -> Iterator[memoryview]:
    """A piece's bytes straight from the slot, without a copy."""
    view = piece_view(piece, image)
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def read_header(storage: Storage, file: str, origin: Origin, size_bytes: int) -> list[StoredPiece]:
    """Pieces of a shard file of ``size_bytes``.

    Raises:
        DamagedError: the file is missing, cut short, changed, not that of ``origin``, or its header
            contradicts itself.
        OSError: the storage does not answer.
    """
    prefix = memoryview(bytearray(_LENGTH.size))
    read_exactly(storage, file, 0, prefix)
    (length,) = _LENGTH.unpack(prefix)
    if length > MAX_HEADER_BYTES:  # a flipped bit here must not allocate exabytes
        limit = f"files have one of {MAX_HEADER_BYTES} at most"
        raise DamagedError(file, f"announces a header of {length} bytes, and {limit}")
    body = memoryview(bytearray(length))
    read_exactly(storage, file, _LENGTH.size, body)
    header = _checked(bytes(body), file)
    metadata = header.pop("__metadata__")
    for name in ("format", "origin", *header):
        if name not in metadata:
            raise DamagedError(file, f"{name} is missing")
    for name, value in metadata.items():
        if not isinstance(value, str):
            raise DamagedError(file, f"{name} is {shown(value)} where text is needed")
    if metadata["format"] != FORMAT:
        raise DamagedError(file, f"is of format {metadata['format']!r}, not {FORMAT!r}")
    written_by = load_json(metadata["origin"], file)
    if written_by != [origin.job, origin.attempt, origin.step, origin.rank]:
        raise DamagedError(file, f"belongs to {metadata['origin']}, not to {origin}")
    start = _LENGTH.size + length
    found = [_piece(key, entry, metadata[key], start, file) for key, entry in header.items()]
    end = max((p.piece.slot_offset_bytes + p.piece.size_bytes for p in found), default=start)
    if end > size_bytes:
        raise DamagedError(file, f"describes {end} bytes, and has {size_bytes}")
    return found


def pieces_of(storage: Storage, manifest: Manifest, file: File) -> list[StoredPiece]:
    """The pieces of one file of a checkpoint, by its header.

    Raises:
        DamagedError: no reader can read it; names the file's whole address.
        OSError: the storage does not answer.
    """
    origin = Origin(manifest.job, manifest.attempt, manifest.step, file.rank)
    try:
        return read_header(storage, file.path, origin, file.size_bytes)
    except DamagedError as error:
        raise located(storage, error) from error


def located(storage: Storage, error: DamagedError) -> DamagedError:
    """The error of a file in ``storage``, with the file's whole address."""
    return DamagedError(f"{storage.uri}/{error.file}", error.problem)


def read_exactly(storage: Storage, file: str, offset: int, target: memoryview) -> None:
    """Fill ``target`` from ``offset`` on.

    Raises:
        DamagedError: the file is missing or too short.
        OSError: the storage does not answer.
    """
    try:
        count = storage.read_into(file, offset, target)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DamagedError(file, "is missing") from error
    if count != len(target):
        raise DamagedError(file, f"ends at byte {offset + count}: it is cut short")


def _checked(body: bytes, file: str) -> dict[str, Any]:
    header = load_json_object(body, file)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or RECORD_CHECKSUM not in metadata:
        raise DamagedError(file, "its header is not that of a megascale safetensors file")
    expected = metadata.pop(RECORD_CHECKSUM)
    return load_record(json.dumps({**header, RECORD_CHECKSUM: expected}).encode(), file)


def _piece(key: str, entry: Any, described: str, start: int, file: str) -> StoredPiece:
    stored = convert(entry, _Entry, file, key)
    said = convert(load_json_object(described, file), _Described, file, key)
    if stored.dtype not in _SHORT_DTYPES:
        needed = f"one of {', '.join(_SHORT_DTYPES)}"
        problem = f"{key}.dtype is {shown(stored.dtype)} where {needed} is needed"
        raise DamagedError(file, problem)
    first, last = stored.data_offsets
    piece = ShardPiece(
        name=said.name,
        state=said.state,
        dtype=_SHORT_DTYPES[stored.dtype],
        global_shape=tuple(said.global_shape),
        start=tuple(said.start),
        stop=tuple(said.stop),
        flat_start=said.flat[0],
        flat_stop=said.flat[1],
        slot_offset_bytes=start + first,
        primary=True,
    )
    try:
        piece.check()
    except ValueError as error:
        raise DamagedError(file, str(error)) from error
    parts = -(-piece.size_bytes // chunk_bytes(piece.size_bytes))
    if (
        math.prod(piece.global_shape) > MAX_ELEMENTS
        or stored.shape != [piece.flat_stop - piece.flat_start]
        or last - first != piece.size_bytes
        or (said.chunks and len(said.chunks) != parts)
    ):
        raise DamagedError(file, f"{key}: what its header says of it does not agree")
    return StoredPiece(piece, said.xxh3, file, tuple(said.chunks))

"""Pieces of a state as runs: contiguous byte ranges of logical parameters, in arrays.

A :class:`~megascale_job.sizes.checkpoint_layout.ShardPiece` is a flat range of a box. In the
flattened parameter that is one run of bytes where the box is a block of whole rows, as every box of
the trainer is, and one run per row otherwise. In runs, what any two layouts have in common is the
overlap of intervals, whatever the number of dimensions.

Ranks exchange their runs in the form of :func:`encode`, so that each can plan for all.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megascale_job.sizes.checkpoint_layout import DTYPE_BYTES, ShardPiece

Ints = NDArray[np.int64]
# Name, optimizer state, dtype and global shape of a parameter's state.
Parameter = tuple[str, str, str, tuple[int, ...]]

# Columns of runs: which parameter, from which byte to which, who has it (a rank, or the number of a
# file), at which byte there, and as part of which unit (-1: none).
PARAMETER, START, STOP, HOLDER, OFFSET, UNIT = range(6)
# Columns of units: file, first byte in it, size in bytes, xxh3-128 (upper and lower half).
FILE, FIRST, SIZE, UPPER, LOWER = range(5)


@dataclass(frozen=True, slots=True)
class Runs:
    """``rows`` int64 [n, 6], one run each, in any order; ``units`` int64 [m, 5].

    A unit is what is read and verified as a whole: a stored piece, or a chunk of a large one. Runs
    in memory have none.
    """

    parameters: tuple[Parameter, ...]
    rows: Ints
    units: Ints


# Chunks of a stored piece: so large, and larger where a piece would have more of them than MOST.
LEAST_CHUNK_BYTES, MOST_CHUNKS = 8 << 20, 512


def chunk_bytes(size_bytes: int) -> int:
    """Size of the chunks of a stored piece; one that is no larger is not divided."""
    return max(
        LEAST_CHUNK_BYTES, -(-size_bytes // MOST_CHUNKS // LEAST_CHUNK_BYTES) * LEAST_CHUNK_BYTES
    )


def runs_of(
    pieces: Iterable[ShardPiece],
    holder: int,
    checksums: Sequence[str] = (),
    chunks: Sequence[Sequence[str]] = (),
) -> Runs:
    """The runs of one rank's slot, or with ``checksums``, one per piece, of one file.

    Args:
        pieces: ``slot_offset_bytes`` is the offset in the slot or in the file.
        holder: the rank, or the number of the file.
        checksums: xxh3-128 of each piece, hexadecimal.
        chunks: those of the chunks of each piece (:func:`chunk_bytes`); empty where it has none.
    """
    known: dict[Parameter, int] = {}
    rows: list[tuple[int, ...]] = []
    units: list[tuple[int, ...]] = []
    for number, piece in enumerate(pieces):
        first_unit, length = len(units) if checksums else -1, piece.size_bytes
        if checksums:
            own = chunks[number] if chunks else ()
            length = chunk_bytes(length) if own else length
            units += _units(piece, holder, own or (checksums[number],), length)
        if not piece.size_bytes:
            continue
        key = (piece.name, piece.state, piece.dtype, piece.global_shape)
        parameter = known.setdefault(key, len(known))
        done = 0  # bytes of the piece
        for begin, stop in _ranges(piece):
            start = begin
            while start < stop:
                size = min(stop - start, length - done % length)
                unit = first_unit + done // length if checksums else -1
                offset = piece.slot_offset_bytes + done
                rows.append((parameter, start, start + size, holder, offset, unit))
                start, done = start + size, done + size
    return Runs(tuple(known), _array(rows, 6), _array(units, 5))


def parameter_bytes(parameter: Parameter) -> int:
    """Size of a whole parameter's state."""
    _, _, dtype, shape = parameter
    return math.prod(shape) * DTYPE_BYTES[dtype]


def hexadecimal(upper: int, lower: int) -> str:
    """A checksum from the two halves that a unit holds."""
    return f"{upper & (2**64 - 1):016x}{lower & (2**64 - 1):016x}"


def join(tables: Sequence[Runs]) -> Runs:
    """All runs of several tables in one; equal parameters get one number."""
    known: dict[Parameter, int] = {}
    numbers: dict[tuple[Parameter, ...], Ints] = {}
    rows, units, count = [np.empty((0, 6), np.int64)], [np.empty((0, 5), np.int64)], 0
    for table in tables:
        if table.parameters not in numbers:
            ids = [known.setdefault(parameter, len(known)) for parameter in table.parameters]
            numbers[table.parameters] = np.array(ids, np.int64)
        moved = table.rows.copy()
        moved[:, PARAMETER] = numbers[table.parameters][moved[:, PARAMETER]]
        moved[moved[:, UNIT] >= 0, UNIT] += count
        count += len(table.units)
        rows.append(moved)
        units.append(table.units)
    return Runs(tuple(known), np.concatenate(rows), np.concatenate(units))


def encode(runs: Runs) -> bytes:
    """Bytes of a table: a line of JSON, then both arrays (int64, little-endian)."""
    head = [[list(parameter) for parameter in runs.parameters], len(runs.rows), len(runs.units)]
    arrays = (runs.rows.astype("<i8").tobytes(), runs.units.astype("<i8").tobytes())
    return b"".join((json.dumps(head).encode(), b"\n", *arrays))


def decode(data: bytes) -> Runs:
    """The inverse of :func:`encode`."""
    head, _, arrays = data.partition(b"\n")
    parameters, rows, units = _head(head)
    values = np.frombuffer(arrays, "<i8").astype(np.int64)
    end = rows * 6
    return Runs(parameters, values[:end].reshape(rows, 6), values[end:].reshape(units, 5))


@functools.lru_cache(1024)  # the ranks of one pipeline stage have equal heads
def _head(line: bytes) -> tuple[tuple[Parameter, ...], int, int]:
    parameters, rows, units = json.loads(line)
    return tuple((n, s, d, tuple(shape)) for n, s, d, shape in parameters), rows, units


def _units(
    piece: ShardPiece, file: int, checksums: Sequence[str], length: int
) -> list[tuple[int, ...]]:
    """The units of a piece, of ``length`` bytes each but for the last."""
    found = []
    for number, checksum in enumerate(checksums):
        upper, lower = (int(half, 16) for half in (checksum[:16], checksum[16:]))
        halves = ((half ^ 1 << 63) - (1 << 63) for half in (upper, lower))  # as signed numbers
        begin = number * length
        size = min(length, piece.size_bytes - begin)
        found.append((file, piece.slot_offset_bytes + begin, size, *halves))
    return found


def _ranges(piece: ShardPiece) -> list[tuple[int, int]]:
    """The byte ranges of the flattened parameter that the piece covers, in the piece's order."""
    shape, box = piece.global_shape, piece.box_shape
    # The innermost axes that the box covers whole, and the one before them, are one run.
    cut = len(shape) - 1
    while cut > 0 and box[cut] == shape[cut]:
        cut -= 1
    size = DTYPE_BYTES[piece.dtype]
    inner = math.prod(shape[cut + 1 :])
    length = math.prod(box[cut:]) if shape else 1
    outer = box[:cut] if shape else ()
    lead = piece.start[cut] * inner if shape else 0
    if all(extent == 1 for extent in outer):
        row = _row(shape, piece.start, cut) * math.prod(shape[cut:]) + lead
        return [((row + piece.flat_start) * size, (row + piece.flat_stop) * size)]
    first, last = piece.flat_start // length, -(-piece.flat_stop // length)
    index = np.unravel_index(np.arange(first, last), outer)
    moved = tuple(axis + low for axis, low in zip(index, piece.start, strict=False))
    base = np.ravel_multi_index(moved, shape[:cut]) * math.prod(shape[cut:]) + lead
    low = np.maximum(np.arange(first, last) * length, piece.flat_start) % length
    high = np.minimum((np.arange(first, last) + 1) * length, piece.flat_stop)
    high -= np.arange(first, last) * length
    pairs = zip((base + low) * size, (base + high) * size, strict=True)
    return [(int(start), int(stop)) for start, stop in pairs]


def _row(shape: Sequence[int], start: Sequence[int], axes: int) -> int:
    row = 0
    for axis in range(axes):
        row = row * shape[axis] + start[axis]
    return row


def _array(rows: list[tuple[int, ...]], columns: int) -> Ints:
    return np.array(rows, np.int64).reshape(len(rows), columns)

"""Plans a restore: which rank reads which bytes, and in which rounds they go to other ranks. Pure.

Note [Restore plan]
~~~~~~~~~~~~~~~~~~~
Every rank computes the same plan from what is stored, what every rank needs, and which ranks have
their own state in memory. A rank with its state in memory reads nothing for itself. The state of
the others comes from a peer's memory if a peer has it (a part that is replicated over tensor
parallelism), and from storage otherwise. Every stored piece that is needed has one reader, so each
byte is read from storage once. A rank that needs a piece is preferred as its reader, unless it has
more to read than its share. The cost is that of sorting all ranks' runs, in numpy, plus a short
step per stored piece.

**Runs** are contiguous byte ranges of logical parameters, in arrays. A
:class:`~megascale_job.sizes.checkpoint_layout.ShardPiece` is a flat range of a box. In the
flattened parameter it is one run of bytes if the box is a block of whole rows, as every box of the
trainer is, and one run per row otherwise. With runs, the common part of any two layouts is an
overlap of intervals, whatever the number of dimensions. Ranks exchange their runs in the form of
:func:`encode`, so that each can plan for all.

**Rounds** bound the memory. A rank reads its stream (:class:`ReadPlan`) one window at a time and
sends the parts that others need, all ranks in one exchange per round. A round has at most one
window of each reader, and no rank receives more than its share in a round, so the memory of every
rank is bounded whatever the two layouts are.
"""

from __future__ import annotations

import functools
import heapq
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megascale_job.sizes.checkpoint_layout import DTYPE_BYTES, MASTER, ShardPiece

Ints = NDArray[np.int64]
# Name, optimizer state, dtype and global shape of a parameter's state.
Parameter = tuple[str, str, str, tuple[int, ...]]

# Columns of runs: parameter, first byte and end in it, holder (a rank, or the number of a file),
# first byte there, unit of which it is a part (-1: none).
PARAMETER, START, STOP, HOLDER, OFFSET, UNIT = range(6)
# Columns of units: file, first byte in it, size in bytes, xxh3-128 (upper and lower half).
FILE, FIRST, SIZE, UPPER, LOWER = range(5)


@dataclass(frozen=True, slots=True)
class Runs:
    """``rows`` int64 [n, 6], one run each, in any order; ``units`` int64 [m, 5].

    A unit is read and verified as a whole: a stored piece, or a chunk of a large one. Runs in
    memory have no unit.
    """

    parameters: tuple[Parameter, ...]
    rows: Ints
    units: Ints


# Chunks of a stored piece have the least size, and a larger one if a piece would have more chunks.
LEAST_CHUNK_BYTES, MOST_CHUNKS = 8 << 20, 512


def chunk_bytes(size_bytes: int) -> int:
    """Size of the chunks of a stored piece; a piece that is not larger is not divided."""
    return max(
        LEAST_CHUNK_BYTES, -(-size_bytes // MOST_CHUNKS // LEAST_CHUNK_BYTES) * LEAST_CHUNK_BYTES
    )


def runs_of(
    pieces: Iterable[ShardPiece],
    holder: int,
    checksums: Sequence[str] = (),
    chunks: Sequence[Sequence[str]] = (),
) -> Runs:
    """The runs of one rank's slot, or of one file if ``checksums`` are given.

    Args:
        pieces: their ``slot_offset_bytes`` is the offset in the slot or in the file.
        holder: the rank, or the number of the file.
        checksums: xxh3-128 of each piece, hexadecimal.
        chunks: checksums of the chunks of each piece (:func:`chunk_bytes`); empty if it has none.
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
            continue  # its unit exists, so that units keep the order of pieces, but has no bytes
        key = (piece.name, piece.state, piece.dtype, piece.global_shape)
        parameter = known.setdefault(key, len(known))
        done = 0  # bytes of the piece
        for begin, stop in _ranges(piece):
            start = begin
            # A run that crosses the end of a chunk becomes two rows, because a row has one unit.
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
    """A checksum from its two halves in a unit."""
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
        # Rows refer to parameters and units by number, and both get new numbers in the whole.
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


@functools.lru_cache(1024)  # cached, because the ranks of one pipeline stage have equal heads
def _head(line: bytes) -> tuple[tuple[Parameter, ...], int, int]:
    parameters, rows, units = json.loads(line)
    return tuple((n, s, d, tuple(shape)) for n, s, d, shape in parameters), rows, units


def _units(
    piece: ShardPiece, file: int, checksums: Sequence[str], length: int
) -> list[tuple[int, ...]]:
    """The units of a piece, of ``length`` bytes each except the last."""
    found = []
    for number, checksum in enumerate(checksums):
        # The 128 bits are kept as two int64 columns, so an unsigned half becomes a signed number.
        upper, lower = (int(half, 16) for half in (checksum[:16], checksum[16:]))
        halves = ((half ^ 1 << 63) - (1 << 63) for half in (upper, lower))
        begin = number * length
        size = min(length, piece.size_bytes - begin)
        found.append((file, piece.slot_offset_bytes + begin, size, *halves))
    return found


def _ranges(piece: ShardPiece) -> list[tuple[int, int]]:
    """The byte ranges of the flattened parameter that the piece covers, in the piece's order."""
    shape, box = piece.global_shape, piece.box_shape
    # The innermost axes that the box covers whole, together with the one before them, are one run.
    cut = len(shape) - 1
    while cut > 0 and box[cut] == shape[cut]:
        cut -= 1
    size = DTYPE_BYTES[piece.dtype]
    inner = math.prod(shape[cut + 1 :])
    length = math.prod(box[cut:]) if shape else 1
    outer = box[:cut] if shape else ()
    lead = piece.start[cut] * inner if shape else 0
    if all(extent == 1 for extent in outer):
        # The usual case: a block of whole rows is one range of the flattened parameter.
        row = _row(shape, piece.start, cut) * math.prod(shape[cut:]) + lead
        return [((row + piece.flat_start) * size, (row + piece.flat_stop) * size)]
    # Otherwise one range per row of the box that the piece touches. ``index`` are the coordinates
    # of these rows within the box, ``base`` where they begin in the flattened parameter.
    first, last = piece.flat_start // length, -(-piece.flat_stop // length)
    index = np.unravel_index(np.arange(first, last), outer)
    moved = tuple(axis + low for axis, low in zip(index, piece.start, strict=False))
    base = np.ravel_multi_index(moved, shape[:cut]) * math.prod(shape[cut:]) + lead
    # The first and the last row can be covered in part: the piece is a flat range of the box.
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


TIED_HEAD = "head.weight"  # does not exist with tie_embeddings
ROUTER_BIAS = ".router.bias"  # of a layer, only with a bias_rate
# A reader may have this many times the mean before another rank reads in its place.
_SLACK = 1.1
IN_MEMORY = -1  # as the file of a unit: the reader's own slot

# Columns of ReadPlan.units after those of runs: the rank that reads the unit, and the position of
# the unit in the stream of all that this rank reads.
READER, STREAM = 5, 6
# Columns of ReadPlan.copies: reader, first byte in its stream, number of bytes, rank that needs
# them, first byte in that rank's state.
FROM, AT, BYTES, TO, TARGET = range(5)


class DoesNotFit(ValueError):
    """The stored state is not the one that the ranks need; the text names the parameter.

    Attributes:
        field: field of the job that differs from the job that wrote the state.
    """

    def __init__(self, problem: str, field: str = "trainer.model") -> None:
        super().__init__(problem)
        self.field = field

    def refusal(self, uri: str) -> str:
        """The refusal of the checkpoint at ``uri``, with the remedy."""
        return (
            f"{self.field}: checkpoint {uri} does not fit this job: {self}; "
            "resume with the model and optimizer that wrote it, or in a new folder"
        )


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """``units`` int64 [m, 7] are read once each; ``copies`` int64 [n, 5] bring them to the ranks.

    ``stream_bytes`` int64 [ranks] is the size of each rank's stream, from storage or from its
    memory; ``storage_bytes`` int64 [ranks] is the part from storage. ``distinct_bytes`` is the
    number of bytes needed from storage, each counted once.
    """

    units: Ints
    copies: Ints
    stream_bytes: Ints
    storage_bytes: Ints
    distinct_bytes: int


def check_placed(stored: Runs, wanted: Runs, *, weights_alone: bool) -> None:
    """Check that the job has a place for all stored state, so that no trained value is dropped.

    Args:
        wanted: the state that all ranks of the job need.
        weights_alone: the job takes only the parameters and starts with fresh optimizer states.

    Raises:
        DoesNotFit: a stored state has no place; names the field.
    """
    places = {(name, state) for name, state, _, _ in wanted.parameters}
    for name, state, _, _ in stored.parameters:
        if (name, state) in places or (weights_alone and state != MASTER):
            continue
        field = _model_field(name)
        if (name, MASTER) in places:
            field = "trainer.optimizer"
        elif name == TIED_HEAD:
            field = "trainer.model.tie_embeddings"
        raise DoesNotFit(f"{name} ({state}) is stored, and has no place in it", field)


def _model_field(name: str) -> str:
    """The field of a job that decides whether its model has the parameter ``name``."""
    return "trainer.model.experts.bias_rate" if name.endswith(ROUTER_BIAS) else "trainer.model"


def plan_reads(stored: Runs, wanted: Runs, in_memory: Sequence[bool]) -> ReadPlan:
    """Plan a restore.

    Args:
        stored: runs in the files; holders are files.
        wanted: runs that the ranks need; holders are ranks.
        in_memory: by rank, whether its own memory has the state that it needs.

    Raises:
        DoesNotFit: a state that a rank needs is not stored, stored twice, or has another shape.
    """
    world, held_by = len(in_memory), np.array(in_memory, bool)
    # A rank that has its state in memory needs nothing; what it would need is what it can give.
    mine = held_by[wanted.rows[:, HOLDER]]
    needs, held = _places(wanted, wanted, ~mine), _places(wanted, wanted, mine)
    files = _places(stored, wanted, np.ones(len(stored.rows), bool))
    _check_once(files, wanted.parameters)
    pairs = _pairs(needs, held, files)
    _check_covered(stored, wanted.parameters, needs, pairs)
    # Memory of a peer comes before storage, which is slower and shared by all jobs.
    from_file = pairs.held < 0
    units, number = _storage_units(stored, files, needs, pairs, from_file, world)
    given = _memory_units(held, pairs, ~from_file)
    both = np.concatenate((units, given))
    stream_bytes = _lay_out(both)
    storage_bytes = np.zeros(world, np.int64)
    np.add.at(storage_bytes, units[:, READER], units[:, SIZE])
    copies = _copies(both, number, files, needs, pairs, from_file)
    distinct = _union_bytes(pairs.low[from_file], pairs.high[from_file])
    # Streams exist only up to the last rank that reads; the others read nothing.
    padded = np.zeros(world, np.int64)
    padded[: len(stream_bytes)] = stream_bytes
    return ReadPlan(both, copies, padded, storage_bytes, distinct)


class _Places(NamedTuple):
    """Runs as ranges in one address space of all parameters; ``rows`` are those of Runs."""

    low: Ints
    high: Ints
    rows: Ints


class _Pairs(NamedTuple):
    """Parts ``low:high`` of needs, each with its row in ``held`` and in ``file`` (-1: none)."""

    need: Ints
    low: Ints
    high: Ints
    held: Ints
    file: Ints


def _places(runs: Runs, space: Runs, chosen: NDArray[np.bool_]) -> _Places:
    """The ``chosen`` runs, sorted by address; parameters that are not in ``space`` are left out."""
    # Parameters follow one another in the address space, so that an interval of addresses is a
    # part of exactly one of them, and sorting by address sorts by parameter too.
    sizes = np.array([0, *map(parameter_bytes, space.parameters)], np.int64)
    base = np.cumsum(sizes)[:-1] if len(sizes) > 1 else np.zeros(0, np.int64)
    number = {parameter: index for index, parameter in enumerate(space.parameters)}
    ids = np.array([number.get(parameter, -1) for parameter in runs.parameters], np.int64)
    rows = runs.rows[chosen]
    known = ids[rows[:, PARAMETER]] if len(rows) else np.zeros(0, np.int64)
    rows, known = rows[known >= 0].copy(), known[known >= 0]
    rows[:, PARAMETER] = known
    low = base[known] + rows[:, START]
    order = np.argsort(low, kind="stable")
    high = base[known] + rows[:, STOP]
    return _Places(low[order], high[order], rows[order])


def _pairs(needs: _Places, held: _Places, files: _Places) -> _Pairs:
    # The ends of all sources cut the address space into parts. Within a part every source is there
    # whole or not at all, so one row of ``held`` and one of ``files`` describe it.
    bounds = np.unique(np.concatenate((held.low, held.high, files.low, files.high)))
    parts = max(0, len(bounds) - 1)
    held_at, file_at = np.full(parts, -1, np.int64), np.full(parts, -1, np.int64)
    for target, source in ((held_at, held), (file_at, files)):
        # If several ranks hold a part, the last one in the order of addresses gives it: the order
        # is the same on every rank, and that is all that matters here.
        first, last = np.searchsorted(bounds, source.low), np.searchsorted(bounds, source.high)
        row, within = _expand(last - first)
        target[first[row] + within] = row
    # Each need overlaps a contiguous range of parts; one pair for each of these.
    first = np.maximum(np.searchsorted(bounds, needs.low, "right") - 1, 0)
    last = np.minimum(np.searchsorted(bounds, needs.high, "left"), parts)
    need, within = _expand(np.maximum(last - first, 0))
    part = first[need] + within
    low = np.maximum(bounds[part], needs.low[need])
    high = np.minimum(bounds[part + 1], needs.high[need])
    there = (high > low) & ((held_at[part] >= 0) | (file_at[part] >= 0))
    part = part[there]
    return _Pairs(need[there], low[there], high[there], held_at[part], file_at[part])


def _storage_units(
    stored: Runs,
    files: _Places,
    needs: _Places,
    pairs: _Pairs,
    from_file: NDArray[np.bool_],
    world: int,
) -> tuple[Ints, Ints]:
    """The needed stored pieces with their readers, and the row of each by its number."""
    unit = files.rows[pairs.file[from_file], UNIT]
    rank = needs.rows[pairs.need[from_file], HOLDER]
    used = np.unique(unit)
    size = stored.units[used, SIZE]
    # One entry per (unit, rank that needs it), with the number of bytes that it needs.
    key, inverse = np.unique(np.searchsorted(used, unit) * world + rank, return_inverse=True)
    overlap = np.zeros(len(key), np.int64)
    np.add.at(overlap, inverse, (pairs.high - pairs.low)[from_file])
    readers = _readers(size, key // world, key % world, overlap, world)
    units = np.zeros((len(used), 7), np.int64)
    units[:, :READER] = stored.units[used]
    units[:, READER] = readers
    # A reader goes through each file from its beginning to its end.
    order = np.lexsort((units[:, FIRST], units[:, FILE], units[:, READER]))
    row = np.full(len(stored.units), -1, np.int64)
    row[used[order]] = np.arange(len(used))
    return units[order], row


def _readers(size: Ints, unit: Ints, rank: Ints, overlap: Ints, world: int) -> Ints:
    """A reader for each unit: large units first, each to the rank with the least to read.

    ``unit``, ``rank`` and ``overlap`` list how many bytes of which unit a rank needs.
    """
    limit = _SLACK * float(size.sum()) / world
    first = np.searchsorted(unit, np.arange(len(size) + 1)).tolist()
    ranks, bytes_needed, sizes = rank.tolist(), (-overlap).tolist(), size.tolist()
    load, readers = [0] * world, np.empty(len(size), np.int64)
    heap = [(0, number) for number in range(world)]
    for number in np.argsort(-size, kind="stable").tolist():
        # Among the ranks that need the unit: the one with the least to read, then the one that
        # needs most of it, then the lowest. Ties must be broken in the same way on every rank.
        near = range(first[number], first[number + 1])
        best = min(near, key=lambda i: (load[ranks[i]], bytes_needed[i], ranks[i]))
        chosen = ranks[best]
        if load[chosen] + sizes[number] > limit:
            # The heap keeps outdated entries, because a load cannot be changed inside it; the
            # first one whose load is still true is the least loaded rank.
            while heap[0][0] != load[heap[0][1]]:
                heapq.heappop(heap)
            # Prefer the rank that needs it if its load is not higher.
            if load[chosen] > heap[0][0]:
                chosen = heap[0][1]
        load[chosen] += sizes[number]
        heapq.heappush(heap, (load[chosen], chosen))
        readers[number] = chosen
    return readers


def _memory_units(held: _Places, pairs: _Pairs, from_memory: NDArray[np.bool_]) -> Ints:
    """The parts that ranks send from their own slots, one unit each; int64 [m, 7]."""
    source, low = pairs.held[from_memory], pairs.low[from_memory]
    units = np.zeros((len(source), 7), np.int64)
    units[:, FILE] = IN_MEMORY
    units[:, FIRST] = held.rows[source, OFFSET] + low - held.low[source]
    units[:, SIZE] = pairs.high[from_memory] - low
    units[:, READER] = held.rows[source, HOLDER]
    return units


def _lay_out(units: Ints) -> Ints:
    """Fill STREAM: each reader's units one after the other; returns the length of each stream."""
    # Positions in the concatenation of all streams, less the beginning of the reader's own.
    order = np.argsort(units[:, READER], kind="stable")
    size, reader = units[order, SIZE], units[order, READER]
    end = np.cumsum(size)
    begin = end - size
    new = np.flatnonzero(np.diff(reader, prepend=-1))
    base = np.repeat(begin[new], np.diff(np.append(new, len(reader))))
    units[order, STREAM] = begin - base
    lengths = np.zeros(int(reader.max(initial=-1)) + 1, np.int64)
    np.add.at(lengths, reader, size)
    return lengths


def _copies(
    units: Ints,
    number: Ints,
    files: _Places,
    needs: _Places,
    pairs: _Pairs,
    from_file: NDArray[np.bool_],
) -> Ints:
    # ``unit`` is the row of ``units`` from which each pair is copied, ``inside`` the first byte in
    # it. A unit of storage is read whole, a unit of memory is exactly the part that is needed.
    row = files.rows[pairs.file[from_file]]
    unit, inside = np.empty(len(pairs.need), np.int64), np.zeros(len(pairs.need), np.int64)
    unit[from_file] = number[row[:, UNIT]]
    inside[from_file] = (
        row[:, OFFSET]
        + pairs.low[from_file]
        - files.low[pairs.file[from_file]]
        - units[unit[from_file], FIRST]
    )
    # Units in memory follow those of files, in the order of the pairs.
    given = len(pairs.need) - len(row)
    unit[~from_file] = len(units) - given + np.arange(given)
    copies = np.zeros((len(pairs.need), 5), np.int64)
    copies[:, FROM] = units[unit, READER]
    copies[:, AT] = units[unit, STREAM] + inside
    copies[:, BYTES] = pairs.high - pairs.low
    copies[:, TO] = needs.rows[pairs.need, HOLDER]
    copies[:, TARGET] = needs.rows[pairs.need, OFFSET] + pairs.low - needs.low[pairs.need]
    return copies


def _check_once(files: _Places, parameters: Sequence[Parameter]) -> None:
    # Sorted by address, so two ranges that overlap are neighbours.
    twice = np.flatnonzero(files.low[1:] < files.high[:-1])
    if len(twice):
        parameter = parameters[files.rows[twice[0], PARAMETER]]
        raise DoesNotFit(f"{parameter[0]} ({parameter[1]}) is stored with an overlap")


def _check_covered(
    stored: Runs, parameters: Sequence[Parameter], needs: _Places, pairs: _Pairs
) -> None:
    # Pairs of one need never overlap, so their sizes add up to the covered part.
    found = np.zeros(len(needs.low), np.int64)
    np.add.at(found, pairs.need, pairs.high - pairs.low)
    short = np.flatnonzero(found < needs.high - needs.low)
    if not len(short):
        return
    name, state, dtype, shape = parameters[needs.rows[short[0], PARAMETER]]
    other = next((there for there in stored.parameters if there[:2] == (name, state)), None)
    if other is None:
        raise DoesNotFit(f"{name} ({state}): nothing is stored", _model_field(name))
    if other[2:] != (dtype, shape):
        raise DoesNotFit(
            f"{name} ({state}) is {other[2]} {other[3]} there and {dtype} {shape} here"
        )
    raise DoesNotFit(f"{name} ({state}) is stored with a gap")


def _union_bytes(low: Ints, high: Ints) -> int:
    order = np.argsort(low, kind="stable")
    low, high = low[order], high[order]
    if not len(low):
        return 0
    # The part of each range beyond the furthest end of the ranges before it.
    before = np.concatenate(([low[0]], np.maximum.accumulate(high)[:-1]))
    return int(np.maximum(high - np.maximum(low, before), 0).sum())


def _expand(counts: Ints) -> tuple[Ints, Ints]:
    """Repeats the index of each count that many times; returns these and a running 0, 1, 2 ..."""
    index = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    return index, within


# A rank sends and receives at most this many windows per round (a window for more ranks is made
# smaller).
SHARE = 4
_LEAST_WINDOW = 4096


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes ``start:stop`` of a unit, to byte ``at`` of the window.

    ``file`` -1 is the reader's own slot. The unit is ``size_bytes`` long, begins at ``first`` in
    the file and has ``checksum`` (xxh3-128, hexadecimal).
    """

    file: int
    first: int
    size_bytes: int
    checksum: str
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Round:
    """One rank's part in a round.

    Attributes:
        reads: reads into its window.
        kept: int64 [n, 3]: byte of the window, byte of its own state, number of bytes.
        sent: int64 [n, 2]: byte of the window, number of bytes; in the order of the send buffer.
        send_bytes: int64 [ranks], bytes of the send buffer for each rank.
        received: int64 [n, 2]: byte of its own state, number of bytes; in the order of the receive
            buffer.
        receive_bytes: int64 [ranks], bytes of the receive buffer from each rank.
        exchanged: whether any rank sends; if not, there is no exchange in this round.
    """

    reads: tuple[Read, ...]
    kept: Ints
    sent: Ints
    send_bytes: Ints
    received: Ints
    receive_bytes: Ints
    exchanged: bool


class Rounds:
    """The rounds of a plan.

    Args:
        window_bytes: the largest window.
    """

    def __init__(self, plan: ReadPlan, window_bytes: int) -> None:
        self._plan = plan
        self._world = len(plan.stream_bytes)
        self.window_bytes = window_bytes
        # Halve the windows until none sends more than a rank's share: a window of parameters that
        # are replicated over many ranks is sent to each of them.
        while True:
            windows = -(-plan.stream_bytes // self.window_bytes)
            self._first = np.concatenate(([0], np.cumsum(windows)))
            copies = _cut(plan.copies, self.window_bytes)
            window = self._first[copies[:, FROM]] + copies[:, AT] // self.window_bytes
            parts = _remote(copies, window, self._world)
            sent = np.zeros(int(self._first[-1]), np.int64)
            np.add.at(sent, parts[:, 0], parts[:, 2])
            most = int(sent.max(initial=0))
            if most <= SHARE * window_bytes or self.window_bytes <= _LEAST_WINDOW:
                break
            self.window_bytes //= 2
        # At least the largest part, or a window would never find a round with room for it.
        budget = max(SHARE * window_bytes, int(parts[:, 2].max(initial=0)))
        self._round_of, self.count = _schedule(self._first, parts, budget)
        self._copies = copies
        self._round = self._round_of[window]
        self._exchanged = np.zeros(self.count, bool)
        self._exchanged[self._round[copies[:, FROM] != copies[:, TO]]] = True

    def of_rank(self, rank: int) -> Iterator[Round]:
        """The rounds of ``rank``; every rank has ``count`` rounds."""
        mine = slice(int(self._first[rank]), int(self._first[rank + 1]))
        window_in = {int(r): number for number, r in enumerate(self._round_of[mine].tolist())}
        # The sender sorts its copies by receiver and the receiver by sender, both with ties in the
        # order of ``self._copies``: so send buffer and receive buffer have the same order, and no
        # header travels with the bytes.
        out = _Sorted(self._copies, self._round, self._copies[:, FROM] == rank, TO, self.count)
        into = _Sorted(self._copies, self._round, self._copies[:, TO] == rank, FROM, self.count)
        units = self._plan.units[self._plan.units[:, READER] == rank]
        for number in range(self.count):
            window = window_in.get(number)
            reads = () if window is None else self._reads(units, window)
            sent, received = out.of(number), into.of(number)
            own = sent[:, TO] == rank
            kept, sent = sent[own], sent[~own]
            received = received[received[:, FROM] != rank]
            yield Round(
                reads,
                np.stack((kept[:, AT] % self.window_bytes, kept[:, TARGET], kept[:, BYTES]), 1),
                np.stack((sent[:, AT] % self.window_bytes, sent[:, BYTES]), 1),
                self._per_rank(sent[:, TO], sent[:, BYTES]),
                received[:, [TARGET, BYTES]],
                self._per_rank(received[:, FROM], received[:, BYTES]),
                bool(self._exchanged[number]),
            )

    def _per_rank(self, ranks: Ints, sizes: Ints) -> Ints:
        found = np.zeros(self._world, np.int64)
        np.add.at(found, ranks, sizes)
        return found

    def _reads(self, units: Ints, window: int) -> tuple[Read, ...]:
        low, high = window * self.window_bytes, (window + 1) * self.window_bytes
        first = int(np.searchsorted(units[:, STREAM], low, "right")) - 1
        last = int(np.searchsorted(units[:, STREAM], high))
        reads = []
        for unit in units[first:last].tolist():
            start = max(low - unit[STREAM], 0)
            stop = min(high - unit[STREAM], unit[SIZE])
            digest = hexadecimal(unit[UPPER], unit[LOWER])
            at = unit[STREAM] + start - low
            reads.append(Read(unit[FILE], unit[FIRST], unit[SIZE], digest, start, stop, at))
        return tuple(reads)


class _Sorted:
    """The copies of one rank, sorted by round, then by peer, then in the common order."""

    def __init__(
        self, copies: Ints, rounds: Ints, chosen: np.ndarray, peer: int, count: int
    ) -> None:
        copies, rounds = copies[chosen], rounds[chosen]
        order = np.lexsort((copies[:, peer], rounds))
        self._copies = copies[order]
        self._bounds = np.searchsorted(rounds[order], np.arange(count + 1))

    def of(self, number: int) -> Ints:
        """The copies of one round."""
        return self._copies[self._bounds[number] : self._bounds[number + 1]]


def _cut(copies: Ints, window_bytes: int) -> Ints:
    """The copies, cut where a window of the reader's stream ends."""
    first = copies[:, AT] // window_bytes
    last = (copies[:, AT] + copies[:, BYTES] - 1) // window_bytes
    index = np.repeat(np.arange(len(copies)), last - first + 1)
    starts = np.cumsum(last - first + 1) - (last - first + 1)
    window = first[index] + np.arange(len(index)) - starts[index]
    cut = copies[index]
    # The target moves with the beginning of the part.
    low = np.maximum(copies[index, AT], window * window_bytes)
    high = np.minimum(copies[index, AT] + copies[index, BYTES], (window + 1) * window_bytes)
    cut[:, TARGET] += low - cut[:, AT]
    cut[:, AT], cut[:, BYTES] = low, high - low
    return cut


def _remote(copies: Ints, window: Ints, world: int) -> Ints:
    """Bytes from each window to each other rank: int64 [n, 3] of window, rank, bytes; sorted."""
    away = copies[:, FROM] != copies[:, TO]
    key, inverse = np.unique(window[away] * world + copies[away, TO], return_inverse=True)
    sizes = np.zeros(len(key), np.int64)
    np.add.at(sizes, inverse, copies[away, BYTES])
    return np.stack((key // world, key % world, sizes), 1)


def _schedule(first: Ints, parts: Ints, budget: int) -> tuple[Ints, int]:
    """The round of each window: at most one per reader, and at most ``budget`` bytes to a rank.

    Returns:
        The rounds int64 [windows], and their number.
    """
    count = int(first[-1])
    rounds = np.zeros(count, np.int64)
    bounds = np.searchsorted(parts[:, 0], np.arange(count + 1)).tolist()
    ranks, sizes = parts[:, 1].tolist(), parts[:, 2].tolist()
    # Greedy: in each round every reader takes its next window if all receivers have room for it.
    # Windows of a reader stay in order, because it reads its stream once from end to end.
    following, end = first[:-1].tolist(), first[1:].tolist()
    active, number = [r for r in range(len(end)) if following[r] < end[r]], 0
    while active:
        left: dict[int, int] = {}
        for reader in active:
            window = following[reader]
            low, high = bounds[window], bounds[window + 1]
            if all(left.get(ranks[i], budget) >= sizes[i] for i in range(low, high)):
                for i in range(low, high):
                    left[ranks[i]] = left.get(ranks[i], budget) - sizes[i]
                rounds[window] = number
                following[reader] += 1
        number += 1
        # Another reader comes first in the next round, so that none waits forever.
        active = [r for r in active[1:] + active[:1] if following[r] < end[r]]
    return rounds, number

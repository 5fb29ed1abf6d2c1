"""Who reads what in a restore, and to which ranks it goes: the same on every rank.

A pure function of what is stored, what every rank needs, and which ranks hold their own state in
memory. A rank with its state in memory reads nothing for itself. What the others need comes from a
peer's memory where a peer holds it (a part that is replicated over tensor parallelism), and from
storage otherwise. Every stored piece that is needed has one reader, so each byte is read from
storage once; a rank that needs a piece is preferred as its reader, unless it has more to read than
its share.

The cost is that of sorting all ranks' runs, in numpy, plus a short step per stored piece.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megascale_job.sizes.checkpoint_layout import MASTER
from megascale_job.sizes.piece_runs import (
    FILE,
    FIRST,
    HOLDER,
    OFFSET,
    PARAMETER,
    SIZE,
    START,
    STOP,
    UNIT,
    Ints,
    Parameter,
    Runs,
    parameter_bytes,
)

TIED_HEAD = "head.weight"  # with tie_embeddings there is none
# A reader may be this much above the mean before another reads in its place.
_SLACK = 1.1
IN_MEMORY = -1  # as the file of a unit: the reader's own slot

# Columns of ReadPlan.units after those of piece_runs: the rank that reads the unit, and where the
# unit begins in the stream of all that this rank reads.
READER, STREAM = 5, 6
# Columns of ReadPlan.copies: reader, first byte in its stream, bytes, rank that needs them, first
# byte in that rank's state.
FROM, AT, BYTES, TO, TARGET = range(5)


class DoesNotFit(ValueError):
    """What is stored is not the state that the ranks need; names the parameter.

    Attributes:
        field: that of the job which is other than in the job that wrote it.
    """

    def __init__(self, problem: str, field: str = "trainer.model") -> None:
        super().__init__(problem)
        self.field = field

    def refusal(self, uri: str) -> str:
        """The refusal of the checkpoint at ``uri``, with what to do."""
        return (
            f"{self.field}: checkpoint {uri} does not fit this job: {self}; "
            "resume with the model and optimizer that wrote it, or in a new folder"
        )


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """``units`` int64 [m, 7] are read, each once; ``copies`` int64 [n, 5] take them to the ranks.

    ``stream_bytes`` int64 [ranks] is what each rank reads or gives from memory, ``storage_bytes``
    int64 [ranks] what it reads from storage. ``distinct_bytes`` are the bytes that are needed from
    storage, each counted once.
    """

    units: Ints
    copies: Ints
    stream_bytes: Ints
    storage_bytes: Ints
    distinct_bytes: int


def check_placed(stored: Runs, wanted: Runs, *, weights_alone: bool) -> None:
    """Check that the job has a place for all that is stored: nothing that was trained is dropped.

    Args:
        wanted: what all ranks of the job need.
        weights_alone: the job takes the parameters, and begins with optimizer states of its own.

    Raises:
        DoesNotFit: it has none; names the field.
    """
    places = {(name, state) for name, state, _, _ in wanted.parameters}
    for name, state, _, _ in stored.parameters:
        if (name, state) in places or (weights_alone and state != MASTER):
            continue
        field = "trainer.model"
        if (name, MASTER) in places:
            field = "trainer.optimizer"
        elif name == TIED_HEAD:
            field = "trainer.model.tie_embeddings"
        raise DoesNotFit(f"{name} ({state}) is stored, and has no place in it", field)


def plan_reads(stored: Runs, wanted: Runs, in_memory: Sequence[bool]) -> ReadPlan:
    """Plan a restore.

    Args:
        stored: what the files hold; holders are files.
        wanted: what the ranks need; holders are ranks. A rank in memory holds what it needs.
        in_memory: by rank, whether its own memory holds its state.

    Raises:
        DoesNotFit: something that a rank needs is stored nowhere, twice, or with another shape.
    """
    world, held_by = len(in_memory), np.array(in_memory, bool)
    mine = held_by[wanted.rows[:, HOLDER]]
    needs, held = _places(wanted, wanted, ~mine), _places(wanted, wanted, mine)
    files = _places(stored, wanted, np.ones(len(stored.rows), bool))
    _check_once(files, wanted.parameters)
    pairs = _pairs(needs, held, files)
    _check_covered(stored, wanted.parameters, needs, pairs)
    from_file = pairs.held < 0
    units, number = _storage_units(stored, files, needs, pairs, from_file, world)
    given = _memory_units(held, pairs, ~from_file)
    both = np.concatenate((units, given))
    stream_bytes = _lay_out(both)
    storage_bytes = np.zeros(world, np.int64)
    np.add.at(storage_bytes, units[:, READER], units[:, SIZE])
    copies = _copies(both, number, files, needs, pairs, from_file)
    distinct = _union_bytes(pairs.low[from_file], pairs.high[from_file])
    padded = np.zeros(world, np.int64)
    padded[: len(stream_bytes)] = stream_bytes
    return ReadPlan(both, copies, padded, storage_bytes, distinct)


class _Places(NamedTuple):
    """Runs as ranges of one address space of all parameters; ``rows`` are those of Runs."""

    low: Ints
    high: Ints
    rows: Ints


class _Pairs(NamedTuple):
    """Parts ``low:high`` of needs, each with a row of ``held`` or of ``files`` (-1: not there)."""

    need: Ints
    low: Ints
    high: Ints
    held: Ints
    file: Ints


def _places(runs: Runs, space: Runs, chosen: NDArray[np.bool_]) -> _Places:
    """The ``chosen`` runs, sorted by address; parameters that ``space`` has not are left out."""
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
    bounds = np.unique(np.concatenate((held.low, held.high, files.low, files.high)))
    parts = max(0, len(bounds) - 1)
    held_at, file_at = np.full(parts, -1, np.int64), np.full(parts, -1, np.int64)
    for target, source in ((held_at, held), (file_at, files)):
        first, last = np.searchsorted(bounds, source.low), np.searchsorted(bounds, source.high)
        row, within = _expand(last - first)
        target[first[row] + within] = row
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
    """The stored pieces that are needed, with their readers, and each one's row by its number."""
    unit = files.rows[pairs.file[from_file], UNIT]
    rank = needs.rows[pairs.need[from_file], HOLDER]
    used = np.unique(unit)
    size = stored.units[used, SIZE]
    key, inverse = np.unique(np.searchsorted(used, unit) * world + rank, return_inverse=True)
    overlap = np.zeros(len(key), np.int64)
    np.add.at(overlap, inverse, (pairs.high - pairs.low)[from_file])
    readers = _readers(size, key // world, key % world, overlap, world)
    units = np.zeros((len(used), 7), np.int64)
    units[:, :READER] = stored.units[used]
    units[:, READER] = readers
    order = np.lexsort((units[:, FIRST], units[:, FILE], units[:, READER]))
    row = np.full(len(stored.units), -1, np.int64)
    row[used[order]] = np.arange(len(used))
    return units[order], row


def _readers(size: Ints, unit: Ints, rank: Ints, overlap: Ints, world: int) -> Ints:
    """A reader for each unit: large units first, each to the rank with least to read.

    ``unit``, ``rank`` and ``overlap`` say how much of which unit a rank needs.
    """
    limit = _SLACK * float(size.sum()) / world
    first = np.searchsorted(unit, np.arange(len(size) + 1)).tolist()
    ranks, bytes_needed, sizes = rank.tolist(), (-overlap).tolist(), size.tolist()
    load, readers = [0] * world, np.empty(len(size), np.int64)
    heap = [(0, number) for number in range(world)]
    for number in np.argsort(-size, kind="stable").tolist():
        near = range(first[number], first[number + 1])
        best = min(near, key=lambda i: (load[ranks[i]], bytes_needed[i], ranks[i]))
        chosen = ranks[best]
        if load[chosen] + sizes[number] > limit:
            while heap[0][0] != load[heap[0][1]]:
                heapq.heappop(heap)
            # The one that needs it, where that is as good.
            if load[chosen] > heap[0][0]:
                chosen = heap[0][1]
        load[chosen] += sizes[number]
        heapq.heappush(heap, (load[chosen], chosen))
        readers[number] = chosen
    return readers


def _memory_units(held: _Places, pairs: _Pairs, from_memory: NDArray[np.bool_]) -> Ints:
    """What ranks give from their own slots, one unit per part; int64 [m, 7]."""
    source, low = pairs.held[from_memory], pairs.low[from_memory]
    units = np.zeros((len(source), 7), np.int64)
    units[:, FILE] = IN_MEMORY
    units[:, FIRST] = held.rows[source, OFFSET] + low - held.low[source]
    units[:, SIZE] = pairs.high[from_memory] - low
    units[:, READER] = held.rows[source, HOLDER]
    return units


def _lay_out(units: Ints) -> Ints:
    """Fill STREAM: each reader's units one after the other; returns the length of each stream."""
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
    row = files.rows[pairs.file[from_file]]
    unit, inside = np.empty(len(pairs.need), np.int64), np.zeros(len(pairs.need), np.int64)
    unit[from_file] = number[row[:, UNIT]]
    inside[from_file] = (
        row[:, OFFSET]
        + pairs.low[from_file]
        - files.low[pairs.file[from_file]]
        - units[unit[from_file], FIRST]
    )
    # Units in memory stand behind those of files, in the order of the pairs.
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
    twice = np.flatnonzero(files.low[1:] < files.high[:-1])
    if len(twice):
        parameter = parameters[files.rows[twice[0], PARAMETER]]
        raise DoesNotFit(f"{parameter[0]} ({parameter[1]}) is stored with an overlap")


def _check_covered(
    stored: Runs, parameters: Sequence[Parameter], needs: _Places, pairs: _Pairs
) -> None:
    found = np.zeros(len(needs.low), np.int64)
    np.add.at(found, pairs.need, pairs.high - pairs.low)
    short = np.flatnonzero(found < needs.high - needs.low)
    if not len(short):
        return
    name, state, dtype, shape = parameters[needs.rows[short[0], PARAMETER]]
    other = next((there for there in stored.parameters if there[:2] == (name, state)), None)
    if other is None:
        raise DoesNotFit(f"{name} ({state}): nothing is stored")
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
    before = np.concatenate(([low[0]], np.maximum.accumulate(high)[:-1]))
    return int(np.maximum(high - np.maximum(low, before), 0).sum())


def _expand(counts: Ints) -> tuple[Ints, Ints]:
    """For each of ``counts``: its index that many times, and 0, 1, 2 ... beside it."""
    index = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    return index, within

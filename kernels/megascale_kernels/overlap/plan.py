"""The steps of a sequence-parallel product and the rows that travel for each: pure arithmetic.

The whole has ``size * part_rows`` rows, and rank r owns the r-th ``part_rows`` of them. A product
of the whole consists of steps over contiguous rows, so that each step's transfers hide under the
products of other steps. A rank's own rows need no transfer: after a gather they are multiplied
first, while the first peers' rows arrive; before a scatter they are multiplied last, while the last
peers' rows leave. If the peers' steps differ in length, the shortest is therefore next to the own
one: it is the first of a gather and the last of a scatter. Peers come in cyclic order from the next
rank on, so that at any moment each rank exchanges rows with another one.

Within a part, chunks are cut at multiples of 128 rows, a GEMM's tile, if they are that long; else
at multiples of 16, since cuBLASLt refuses FP8 GEMMs with one scale per row at other numbers of rows
(seen at 11, 42, 107 and 1365); else anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

_UNITS = (128, 16, 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``start:stop`` of the whole, all owned by ``owner``: one copy moves them."""

    owner: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Step:
    """Rows ``start:stop`` of the whole that one product covers, also as pieces by owner."""

    start: int
    stop: int
    pieces: tuple[Piece, ...]


@functools.cache
def gather_plan(index: int, size: int, part_rows: int, chunks: int) -> tuple[Step, ...]:
    """Steps of a product whose rows are gathered: rank ``index``'s own rows first, then its peers'.

    Args:
        index, size: this rank and the number of ranks.
        part_rows: rows that each rank owns.
        chunks: the number of steps for the peers' rows; they are whole parts if there are fewer
            chunks than peers. There is one more step if the cyclic order passes from the last row
            to the first within a chunk.

    Raises:
        ValueError: no chunk or no row.
    """
    lengths = _peer_lengths(size, part_rows, chunks)
    return (_own_step(index, part_rows), *_peer_steps(index, size, part_rows, lengths))


@functools.cache
def scatter_plan(index: int, size: int, part_rows: int, chunks: int) -> tuple[Step, ...]:
    """Steps of a product whose rows are summed by their owners: the peers' first, the own last.

    Arguments and errors are those of :func:`gather_plan`.
    """
    lengths = _peer_lengths(size, part_rows, chunks)[::-1]
    return (*_peer_steps(index, size, part_rows, lengths), _own_step(index, part_rows))


def _own_step(index: int, part_rows: int) -> Step:
    start, stop = index * part_rows, (index + 1) * part_rows
    return Step(start, stop, (Piece(index, start, stop),))


def _peer_lengths(size: int, part_rows: int, chunks: int) -> list[int]:
    """The numbers of rows of the peers' chunks, the longer ones last."""
    if chunks < 1 or part_rows < 1:
        raise ValueError(
            f"a product is cut into at least one chunk of at least one row, "
            f"got {chunks} and {part_rows}"
        )
    peers = size - 1
    if chunks < peers:
        # Whole parts, as evenly as possible.
        bounds = [number * peers // chunks * part_rows for number in range(chunks + 1)]
    else:
        count, rows = min(chunks, peers * part_rows), peers * part_rows
        unit = next(unit for unit in _UNITS if unit * count <= rows)
        inner = [number * rows // count // unit * unit for number in range(count)]
        bounds = [*inner, rows] if peers else []
    return [high - low for low, high in pairwise(bounds)]


def _peer_steps(index: int, size: int, part_rows: int, lengths: Sequence[int]) -> list[Step]:
    whole, first = size * part_rows, (index + 1) * part_rows
    steps = []
    # Rows are counted on from the next rank's first, beyond the whole. A chunk that passes its end
    # becomes two steps, since a product covers contiguous rows.
    for low, high in pairwise(accumulate(lengths, initial=first)):
        for start, stop in ((low, min(high, whole)), (max(low, whole) - whole, high - whole)):
            if start < stop:
                steps.append(Step(start, stop, _by_owner(start, stop, part_rows)))
    return steps


def _by_owner(start: int, stop: int, part_rows: int) -> tuple[Piece, ...]:
    owners = range(start // part_rows, (stop - 1) // part_rows + 1)
    return tuple(
        Piece(owner, max(start, owner * part_rows), min(stop, (owner + 1) * part_rows))
        for owner in owners
    )

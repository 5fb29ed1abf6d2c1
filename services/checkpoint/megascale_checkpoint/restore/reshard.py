"""Resharding: cuts parameters into pieces and assembles them, between any two layouts.

Pure numpy. A piece is a flat range of a box of a parameter, as defined in
megascale_job.sizes.checkpoint_layout. A flat range of an n-dimensional box is a short list of
sub-boxes, so both directions copy contiguous runs of memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from megascale_common.service.errors import CoverageError
from megascale_job.sizes.checkpoint_layout import ShardPiece

Array = NDArray[np.generic]


def flat_boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[slice, ...]]:
    """Sub-boxes of ``shape`` that hold elements ``first`` to ``last`` (exclusive), in C order.

    At most ``2 * len(shape) - 1`` of them: a partial row at either end of each axis, and one box of
    whole rows in the middle.
    """
    if first >= last:
        return
    if not shape:
        yield ()
        return
    # `first` and `last` as (row, element within the row) along the first axis.
    row = math.prod(shape[1:])
    top, head = divmod(first, row)
    bottom, tail = divmod(last, row)
    if top == bottom:
        yield from ((slice(top, top + 1), *rest) for rest in flat_boxes(shape[1:], head, tail))
        return
    if head:  # the first row begins inside
        yield from ((slice(top, top + 1), *rest) for rest in flat_boxes(shape[1:], head, row))
        top += 1
    if top < bottom:  # whole rows
        yield (slice(top, bottom), *(slice(0, size) for size in shape[1:]))
    # The last row ends inside; nothing is left of it if `tail` is 0.
    yield from ((slice(bottom, bottom + 1), *rest) for rest in flat_boxes(shape[1:], 0, tail))


def put(whole: Array, piece: ShardPiece, values: Array) -> None:
    """Copy a piece's 1-D ``values`` to their place in the whole parameter."""
    box = _box(whole, piece)
    done = 0
    for part in flat_boxes(piece.box_shape, piece.flat_start, piece.flat_stop):
        target = box[part]
        target[...] = values[done : done + target.size].reshape(target.shape)
        done += target.size


def take(whole: Array, piece: ShardPiece, values: Array) -> None:
    """The inverse of :func:`put`: fill a piece's 1-D ``values`` from the whole parameter."""
    box = _box(whole, piece)
    done = 0
    for part in flat_boxes(piece.box_shape, piece.flat_start, piece.flat_stop):
        source = box[part]
        values[done : done + source.size] = source.reshape(-1)
        done += source.size


def check_coverage(pieces: Iterable[ShardPiece]) -> None:
    """Check that the stored pieces of one parameter and state hold each element exactly once.

    Raises:
        CoverageError: an element is missing or stored twice, or the pieces belong to different
            parameters.
    """
    # Two levels: within each box the flat ranges must join end to end, and the boxes must tile the
    # parameter, which disjoint boxes with the right total volume do.
    by_box: dict[tuple[tuple[int, ...], tuple[int, ...]], list[ShardPiece]] = {}
    for piece in pieces:
        by_box.setdefault((piece.start, piece.stop), []).append(piece)
    some = next((group[0] for group in by_box.values()), None)
    if some is None:
        raise CoverageError("nothing is stored")
    if any(
        (p.global_shape, p.dtype) != (some.global_shape, some.dtype)
        for group in by_box.values()
        for p in group
    ):
        raise CoverageError(f"{some.name} ({some.state}) is stored with different shapes or types")
    for group in by_box.values():
        ranges = sorted((piece.flat_start, piece.flat_stop) for piece in group)
        ends = [(0, 0), *ranges, (math.prod(group[0].box_shape),) * 2]
        if any(before[1] != after[0] for before, after in pairwise(ends)):
            raise CoverageError(
                f"{some.name} ({some.state}) has a gap or an overlap in the box {group[0].start}"
            )
    boxes = list(by_box)
    volume = sum(math.prod(high - low for low, high in zip(*box, strict=True)) for box in boxes)
    overlap = any(
        _overlap(one, other) for index, one in enumerate(boxes) for other in boxes[:index]
    )
    if volume != math.prod(some.global_shape) or overlap:
        raise CoverageError(
            f"{some.name} ({some.state}) of shape {some.global_shape} is not covered once "
            f"by {boxes}"
        )


def _overlap(
    one: tuple[tuple[int, ...], tuple[int, ...]], other: tuple[tuple[int, ...], tuple[int, ...]]
) -> bool:
    return all(max(a, c) < min(b, d) for a, b, c, d in zip(*one, *other, strict=True))


def _box(whole: Array, piece: ShardPiece) -> Array:
    return whole[tuple(slice(low, high) for low, high in zip(piece.start, piece.stop, strict=True))]

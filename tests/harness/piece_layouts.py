"""Layouts of ranks for property tests: any cut over tensor and data parallelism."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from tests.harness.checkpoint_files import slot_bytes

from megascale_job.sizes.checkpoint_layout import ShardLayout, ShardPiece

SHAPES = {"matrix": (6, 5), "cube": (4, 3, 2), "vector": (7,), "scalar": (1,)}
VALUES = {
    name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape) + 100 * number
    for number, (name, shape) in enumerate(SHAPES.items())
}


@st.composite
def layouts(draw: st.DrawFn) -> list[ShardLayout]:
    """Parameters cut along one axis over tp and flat over dp; vectors may be replicated over tp."""
    tp, dp = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    pieces: list[list[ShardPiece]] = [[] for _ in range(tp * dp)]
    for name, shape in SHAPES.items():
        replicated = len(shape) == 1 and draw(st.booleans())
        axis = draw(st.integers(0, len(shape) - 1))
        tp_cuts = _cuts(draw, shape[axis], tp)
        for t in range(tp):
            start, stop = [0] * len(shape), list(shape)
            if not replicated:
                start[axis], stop[axis] = tp_cuts[t], tp_cuts[t + 1]
            size = math.prod(b - a for a, b in zip(start, stop, strict=True))
            # Replicas are cut alike, because their ranks have the same layout of flat buffers.
            dp_cuts = (
                _cuts(draw, size, dp) if not replicated else [size * d // dp for d in range(dp + 1)]
            )
            for d in range(dp):
                box = (shape, tuple(start), tuple(stop), dp_cuts[d], dp_cuts[d + 1])
                primary = not replicated or t == 0
                pieces[d * tp + t].append(ShardPiece(name, "master", "float32", *box, 0, primary))
    return [pack(of_rank, draw(st.integers(0, 2))) for of_rank in pieces]


def _cuts(draw: st.DrawFn, size: int, parts: int) -> list[int]:
    inner = sorted(draw(st.lists(st.integers(0, size), min_size=parts - 1, max_size=parts - 1)))
    return [0, *inner, size]


def pack(pieces: list[ShardPiece], gap: int) -> ShardLayout:
    """The pieces one after the other, ``4 * gap`` bytes apart."""
    packed, offset = [], 0
    for piece in pieces:
        packed.append(replace(piece, slot_offset_bytes=offset))
        offset += piece.size_bytes + 4 * gap
    return ShardLayout(tuple(packed), slot_bytes(packed))

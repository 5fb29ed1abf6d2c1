"""Layouts of ranks for property tests: any cut over ranks, and jobs of any model and layout."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

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


Section = dict[str, Any]
_EXPERT_COUNTS = (12, 24)  # divided by many ep
_QK_NORMS: tuple[Section, ...] = (
    {},
    {"qk_norm": True},
    {"qk_norm": True, "qk_norm_over": "projection"},
)


def models() -> st.SearchStrategy[Section]:
    """Dense models, and ones with experts, of 6 to 8 layers."""
    return st.one_of(dense_models(), expert_models())


def dense_models() -> st.SearchStrategy[Section]:
    """Every choice that changes a table."""
    fields = st.fixed_dictionaries(
        {
            "layers": st.integers(6, 8),
            "hidden_size": st.sampled_from([16, 48]),
            "heads": st.sampled_from([4, 8]),
            "kv_heads": st.sampled_from([0, 4]),
            "ffn_size": st.integers(1, 90),
            "vocab_size": st.integers(1, 140),
            "sequence_length": st.just(8),
            "block": st.sampled_from(["parallel", "serial"]),
            "mlp": st.sampled_from(["gelu", "swiglu"]),
            "norm": st.sampled_from(["layernorm", "rmsnorm"]),
            "positions": st.sampled_from(["rope", "learned"]),
            "bias": st.booleans(),
            "norm_bias": st.booleans(),
            "head_dim": st.sampled_from([0, 6]),
            "attention_bias": st.booleans(),
            "tie_embeddings": st.booleans(),
        }
    )
    norms = st.sampled_from(_QK_NORMS)
    return st.tuples(fields, norms).map(lambda drawn: drawn[0] | drawn[1])


@st.composite
def expert_models(draw: st.DrawFn) -> Section:
    """Dense models whose feed-forward layers are experts, in all layers or after the first ones."""
    model = draw(dense_models())
    experts = st.fixed_dictionaries(
        {
            "count": st.sampled_from(_EXPERT_COUNTS),
            "ffn_size": st.integers(1, 9),
            "shared_ffn_size": st.sampled_from([0, 1, 37]),
            "dense_layers": st.integers(0, model["layers"] - 1),
            "bias_rate": st.sampled_from([0.0, 0.001]),
        }
    )
    return {**model, "block": "serial", "mlp": "swiglu", "bias": False, "experts": draw(experts)}


@st.composite
def grids(draw: st.DrawFn, model: Section) -> Section:
    """Layouts that the model allows: tp, cp, dp, pipeline stages even or not, ep with experts."""
    tp, cp = draw(st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]))
    dp = draw(st.integers(1, 3))
    if "qk_norm_over" in model:
        tp = 1
    pp, virtual = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)]))
    grid: Section = {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "virtual_stages": virtual}
    if draw(st.booleans()):
        inner = st.integers(1, model["layers"] - 1)
        number = pp * virtual - 1
        cuts = draw(st.lists(inner, min_size=number, max_size=number, unique=True))
        ends = [0, *sorted(cuts), model["layers"]]
        grid["stage_layers"] = [high - low for low, high in itertools.pairwise(ends)]
    if "experts" in model:
        common = math.gcd(model["experts"]["count"], tp * cp * dp)
        grid["ep"] = draw(st.sampled_from([n for n in range(1, common + 1) if common % n == 0]))
    return grid


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Section, Section]:
    """A model and a layout that it allows."""
    model = draw(models())
    return model, draw(grids(model))


@st.composite
def reshardings(draw: st.DrawFn) -> tuple[Section, Section, Section]:
    """A model with two layouts that it allows."""
    model = draw(models())
    return model, draw(grids(model)), draw(grids(model))

"""The parameter table: over all ranks every value of a parameter is primary exactly once."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from tests.harness.piece_layouts import jobs
from tests.harness.properties import examples

from megascale_job.blocks import layer as layer_module
from megascale_job.blocks.layer import layer_unit
from megascale_job.blocks.parts import Extent, Kept, LogicalParameter, Operator, Tensor
from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_job.sizes import memory as memory_module
from megascale_job.sizes.memory import rank_memory
from megascale_job.sizes.parameter_table import (
    DEFAULT_STATES,
    parameter_table,
    shard_layout,
    stage_layers,
)
from megascale_trainer.save.state_image import largest_slot_bytes, layout_of_rank


def _config(model: dict[str, Any], parallelism: dict[str, Any], bucket_mib: int = 64) -> JobConfig:
    training = {"steps": 1, "global_batch_size": 12, "bucket_mib": bucket_mib}
    return from_accepted(
        {"name": "t", "model": model, "parallelism": parallelism, "training": training}
    )


def _expected_elements(config: JobConfig) -> int:
    """Parameters of the model, counted from its definition."""
    m = config.model
    h, f = m.hidden_size, m.ffn_width
    query, kv = m.heads * m.head_size, m.key_value_heads * m.head_size
    norm = h * (2 if m.norm == "layernorm" and m.norm_bias else 1)
    attention = h * (query + 2 * kv + query)
    if m.qk_norm:
        attention += 2 * m.head_size if m.qk_norm_over == "heads" else query + kv
    inputs = f * (2 if m.mlp == "swiglu" else 1)
    if m.bias:
        attention += query + 2 * kv + 2 * h + inputs
    elif m.attention_bias and m.block == "serial":
        attention += query + 2 * kv
    attention += norm * (1 if m.block == "parallel" else 2)
    with_experts = m.layers - m.experts.dense_layers if m.experts.count else 0
    return (
        m.layers * attention
        + (m.layers - with_experts) * h * (inputs + f)
        + with_experts * _expected_of_experts(config)
        + (1 if m.tie_embeddings else 2) * m.vocab_size * h
        + norm
        + (m.sequence_length * h if m.positions == "learned" else 0)
    )


def _expected_of_experts(config: JobConfig) -> int:
    """Router with its state, experts, shared experts."""
    h, experts = config.model.hidden_size, config.model.experts
    router = experts.count * (h + (2 if experts.bias_rate else 1))
    return router + 3 * h * (experts.count * config.model.expert_width + experts.shared_ffn_size)


@examples(60)
@given(jobs())
def test_every_value_is_primary_on_exactly_one_rank(
    job: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    config = _config(*job)
    held: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for rank in range(config.layout.world_size):
        layout = shard_layout(parameter_table(config, rank))
        end = 0
        for piece in sorted(layout.pieces, key=lambda piece: piece.slot_offset_bytes):
            piece.check()
            assert piece.slot_offset_bytes >= end, "pieces overlap in the slot"
            end = piece.slot_offset_bytes + piece.size_bytes
            assert shapes.setdefault(piece.name, piece.global_shape) == piece.global_shape
            assert piece.stop[1:] == piece.global_shape[1:], "a box is a block of whole rows"
            if piece.primary:
                start = piece.start[0] * math.prod(piece.global_shape[1:])
                held[piece.name, piece.state].append(
                    (start + piece.flat_start, start + piece.flat_stop)
                )
        assert end <= layout.slot_bytes
    assert {name for name, _ in held} == set(shapes)
    for (name, state), spans in held.items():
        end = 0
        for start, stop in sorted(spans):
            assert start == end, f"{name} {state}: gap or overlap at {start}"
            end = stop
        assert end == math.prod(shapes[name])
    assert len(held) == len(DEFAULT_STATES) * len(shapes)
    assert sum(math.prod(shape) for shape in shapes.values()) == _expected_elements(config)


@examples(40)
@given(jobs())
def test_buckets_tile_buffers_and_shards_tile_buckets(
    job: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    config = _config(*job)
    for rank in range(config.layout.world_size):
        table = parameter_table(config, rank)
        for plan in table.buffers:
            assert [bucket.start for bucket in plan.buckets] == [
                0,
                *(bucket.stop for bucket in plan.buckets[:-1]),
            ][: len(plan.buckets)]
            assert plan.elements == (plan.buckets[-1].stop if plan.buckets else 0)
            for bucket in plan.buckets:
                shards = [bucket.shard(owner, plan.owners) for owner in range(plan.owners)]
                assert [low for low, _ in shards] == [
                    bucket.start,
                    *(high for _, high in shards[:-1]),
                ]
                assert shards[-1][1] == bucket.stop
                in_chunks = [
                    chunk
                    for chunk in table.chunks
                    if {f"layers.{index}" for index in chunk.layers} & set(bucket.units)
                ]
                assert len(in_chunks) <= 1, "a bucket holds layers of one chunk"
        for tensor in table.tensors:
            [plan] = [plan for plan in table.buffers if plan.name == tensor.buffer]
            end = tensor.offset + math.prod(tensor.shape)
            homes = [b for b in plan.buckets if b.start <= tensor.offset and end <= b.stop]
            assert len(homes) == 1, "a tensor lies in one bucket"
            assert tensor.offset % 64 == 0


@examples(40)
@given(jobs())
def test_slots_of_a_stage_are_equal_and_one_stage_has_the_largest(
    job: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    config = _config(*job)
    sizes = [layout_of_rank(config, rank).slot_bytes for rank in range(config.layout.world_size)]
    per_stage = config.layout.stage_size
    for first in range(0, len(sizes), per_stage):
        assert len(set(sizes[first : first + per_stage])) == 1
    assert largest_slot_bytes(config) == max(sizes)


def test_merged_rows_are_q_k_v_gate_up_of_this_rank() -> None:
    model = {
        "layers": 1,
        "hidden_size": 32,
        "heads": 4,
        "kv_heads": 2,
        "ffn_size": 40,
        "mlp": "swiglu",
    }
    config = _config({**model, "vocab_size": 50, "sequence_length": 8}, {"tp": 2})
    table = parameter_table(config, 1)
    [merged] = [tensor for tensor in table.tensors if tensor.name == "layers.0.in.weight"]
    rows = [
        (
            piece.name.split(".")[2],
            piece.start[0],
            piece.stop[0],
            (piece.offset - merged.offset) // 32,
        )
        for piece in table.slices
        if merged.offset <= piece.offset < merged.offset + math.prod(merged.shape)
        and piece.buffer == merged.buffer
    ]
    # ffn 40 over 2 ranks is 20 each, padded to 24: rank 1 holds rows 24 to 40
    assert merged.shape == (16 + 8 + 8 + 24 + 24, 32)
    assert rows == [
        ("q", 16, 32, 0),
        ("k", 8, 16, 16),
        ("v", 8, 16, 24),
        ("gate", 24, 40, 32),
        ("up", 24, 40, 56),
    ]


def test_a_bucket_holds_whole_layers_up_to_its_bound() -> None:
    model = {"layers": 6, "hidden_size": 256, "heads": 4, "vocab_size": 64, "sequence_length": 8}
    table = parameter_table(_config(model, {}, bucket_mib=7), 0)  # a layer is 3 MiB of float32
    sharded = table.buffers[0]
    assert [bucket.units for bucket in sharded.buckets] == [
        ("embedding", "layers.0", "layers.1"),
        ("layers.2", "layers.3"),
        ("layers.4", "layers.5", "head"),
    ]
    assert all((bucket.stop - bucket.start) * 4 <= 7 * 2**20 for bucket in sharded.buckets)
    assert len(parameter_table(_config(model, {}, bucket_mib=1), 0).buffers[0].buckets) == 8


SMALL = {"hidden_size": 16, "heads": 2, "vocab_size": 8, "sequence_length": 4}
WITH_EXPERTS = {
    **SMALL,
    "layers": 3,
    "block": "serial",
    "mlp": "swiglu",
    "experts": {"count": 8, "ffn_size": 5, "dense_layers": 1, "bias_rate": 0.001},
}


@pytest.mark.parametrize("model", [{**SMALL, "layers": 1, "bias": True}, WITH_EXPERTS])
def test_neither_norms_nor_biases_decay(model: dict[str, Any]) -> None:
    table = parameter_table(_config(model, {}), 0)
    for piece in table.slices:
        assert piece.decay == (len(piece.global_shape) >= 2), piece.name


def test_experts_are_split_over_ep_and_their_shards_over_ranks_with_the_same_experts() -> None:
    """Over tp 2 and dp 4 with ep 4: ranks 0 and 4 hold the experts 0 and 1, tp splits nothing."""
    config = _config(WITH_EXPERTS, {"tp": 2, "dp": 4, "ep": 4})
    for rank in range(8):
        table = parameter_table(config, rank)
        [plan] = [plan for plan in table.buffers if plan.name == "experts"]
        assert (plan.group, plan.owner, plan.owners) == ("expert_gradient", rank // 4, 2)
        assert [*config.layout.members(rank, plan.group)] == [rank % 4, rank % 4 + 4]
        boxes = {
            piece.name: (piece.global_shape, piece.start, piece.stop, piece.matrix_elements)
            for piece in table.slices
            if piece.buffer == "experts"
        }
        first, last = rank % 4 * 2, rank % 4 * 2 + 2
        assert boxes == {
            f"layers.{layer}.{name}.weight": ((8, *shape), (first, 0, 0), (last, *shape), size)
            for layer in (1, 2)
            for name, shape, size in (("experts_in", (10, 16), 160), ("experts_out", (16, 5), 80))
        }


def test_the_state_of_a_router_is_whole_on_each_rank_and_written_by_the_first_of_tp() -> None:
    config = _config(WITH_EXPERTS, {"tp": 2, "dp": 2, "ep": 2})
    for rank in range(4):
        table = parameter_table(config, rank)
        names = {piece.name for piece in table.slices if piece.buffer == "router"}
        assert names == {
            f"layers.{layer}.router.{kind}" for layer in (1, 2) for kind in ("bias", "load")
        }
        pieces = [piece for piece in shard_layout(table).pieces if piece.name in names]
        assert {piece.primary for piece in pieces} <= {rank % 2 == 0}
    without = {**WITH_EXPERTS, "experts": {**WITH_EXPERTS["experts"], "bias_rate": 0.0}}
    tensors = parameter_table(_config(without, {}), 0).tensors
    assert {tensor.name.split(".")[-1] for tensor in tensors if tensor.buffer == "router"} == {
        "load"
    }


@pytest.mark.parametrize("block", ["parallel", "serial"])
def test_a_norm_over_all_heads_has_a_weight_per_column(block: str) -> None:
    model = {**SMALL, "layers": 1, "block": block, "heads": 4, "kv_heads": 2, "qk_norm": True}
    expected = {"heads": (4, 4), "projection": (16, 8)}
    for over, (query, key) in expected.items():
        table = parameter_table(_config({**model, "qk_norm_over": over}, {}), 0)
        found = {
            piece.name: (piece.global_shape, piece.initial, piece.decay)
            for piece in table.slices
            if "q_norm" in piece.name or "k_norm" in piece.name
        }
        assert found == {
            "layers.0.q_norm.weight": ((query,), "ones", False),
            "layers.0.k_norm.weight": ((key,), "ones", False),
        }


def test_a_weight_that_is_declared_is_in_table_checkpoint_and_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A norm of q, say: one weight for all heads, which keeps q of every token for backward."""
    model = {"layers": 2, "hidden_size": 32, "heads": 4, "vocab_size": 8, "sequence_length": 4}
    config = _config(model, {"tp": 2})
    names = [{piece.name for piece in parameter_table(config, rank).slices} for rank in (0, 1)]
    kept = rank_memory(config, 0).activations_bytes
    weight = LogicalParameter("q_norm", Extent(8, "whole"), "ones")
    norm = Operator((Tensor("q_norm", "weight", (weight,)),), (Kept(Extent(32, "even")),))
    for module in (layer_module, memory_module):
        monkeypatch.setattr(
            module, "layer_unit", lambda model, blocks: (*layer_unit(model, blocks), norm)
        )
    added = {f"layers.{layer}.q_norm.weight" for layer in (0, 1)}
    for rank in (0, 1):
        table = parameter_table(config, rank)
        assert {piece.name for piece in table.slices} == names[rank] | added
        assert added < {tensor.name for tensor in table.tensors}
        pieces = [piece for piece in shard_layout(table).pieces if piece.name in added]
        assert len(pieces) == len(DEFAULT_STATES) * len(added)
        assert {piece.primary for piece in pieces} == {rank == 0}, "tp rank 0 writes it"
    assert rank_memory(config, 0).activations_bytes - kept == 2 * 4 * (32 // 2) * 2  # bf16


def test_uneven_stages() -> None:
    model = {"layers": 7, "hidden_size": 16, "heads": 2, "vocab_size": 8, "sequence_length": 4}
    assert stage_layers(_config(model, {"pp": 3})) == (range(3), range(3, 5), range(5, 7))
    assert stage_layers(_config(model, {"pp": 3, "stage_layers": [1, 4, 2]})) == (
        range(1),
        range(1, 5),
        range(5, 7),
    )


def test_virtual_stages_go_round_the_pipeline() -> None:
    model = {"layers": 7, "hidden_size": 16, "heads": 2, "vocab_size": 8, "sequence_length": 4}
    even = {"pp": 2, "virtual_stages": 2}
    uneven = {**even, "stage_layers": [3, 1, 2, 1]}
    tables = [
        parameter_table(_config(model, sizes), rank) for sizes in (even, uneven) for rank in (0, 1)
    ]
    assert [[list(chunk.layers) for chunk in table.chunks] for table in tables] == [
        [[0, 1], [4, 5]],
        [[2, 3], [6]],
        [[0, 1, 2], [4, 5]],
        [[3], [6]],
    ]
    assert [[(chunk.first, chunk.last) for chunk in table.chunks] for table in tables[:2]] == [
        [(True, False), (False, False)],
        [(False, False), (False, True)],
    ]
    names = [tensor.name for tensor in tables[0].tensors]
    assert names[0] == "embedding.weight" and not any(name.startswith("head") for name in names)


@pytest.mark.parametrize(
    ("model", "parallelism", "message"),
    [
        (
            {"kv_heads": 1},
            {"cp": 2},
            "trainer.model.kv_heads=1 must be a multiple of trainer.parallelism.tp . "
            "trainer.parallelism.cp=2",
        ),
        (
            {},
            {"virtual_stages": 2},
            "trainer.parallelism.virtual_stages must be 1 where trainer.parallelism.pp is 1",
        ),
        (
            {"hidden_size": 18},
            {},
            "trainer.model.hidden_size must be a multiple of trainer.model.heads",
        ),
        ({"kv_heads": 3}, {}, "trainer.model.heads must be a multiple of trainer.model.kv_heads"),
        ({}, {"tp": 8}, "trainer.model.heads=4 must be a multiple of trainer.parallelism.tp=8"),
        (
            {"kv_heads": 2},
            {"tp": 4},
            "trainer.model.kv_heads=2 must be a multiple of trainer.parallelism.tp=4",
        ),
        (
            {"sequence_length": 6},
            {"tp": 4},
            "trainer.model.sequence_length=6 must be a multiple of trainer.parallelism.tp=4",
        ),
        (
            {},
            {"pp": 3},
            "trainer.model.layers=2 is too few for trainer.parallelism.pp . virtual_stages = 3",
        ),
        ({}, {"pp": 2, "virtual_stages": 2}, "trainer.model.layers=2 is too few"),
        (
            {},
            {"pp": 2, "virtual_stages": 2, "stage_layers": [1, 1]},
            "trainer.parallelism.stage_layers must list 4 numbers",
        ),
        (
            {},
            {"pp": 2, "stage_layers": [1, 2]},
            "trainer.parallelism.stage_layers must list 2 numbers that add up to",
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused_by_name(
    model: dict[str, Any], parallelism: dict[str, Any], message: str
) -> None:
    base = {"layers": 2, "hidden_size": 16, "heads": 4, "vocab_size": 8, "sequence_length": 8}
    with pytest.raises(ValueError, match=message):
        parameter_table(_config({**base, **model}, parallelism), 0)

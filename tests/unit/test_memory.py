"""The memory estimate against what autograd really keeps, and against the table's own sizes."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.harness.fp8_gather import buffers_bytes, gathering
from tests.harness.kept_memory import (
    OwnMemory,
    head_peak_bytes,
    kept_bytes,
    layers_job,
    postponed_bytes,
)
from tests.harness.training import hiding, tiny_job

from megascale_job.loading import from_accepted, to_mapping
from megascale_job.sizes.memory import largest_rank_memory, rank_memory
from megascale_job.sizes.parameter_table import parameter_table
from megascale_kernels.operators import torch_operators
from megascale_trainer.parallel.data.buffers import FlatBuffers, Place
from megascale_trainer.parallel.groups import Edges, Group, single_process_groups
from megascale_trainer.parallel.pipeline import peer_edges
from megascale_trainer.parallel.pipeline.schedule import (
    Kind,
    PipelineShape,
    one_forward_one_backward,
)
from megascale_trainer.parallel.tensor import sharding as overlapped

WITH_EXPERTS = {"block": "serial", "mlp": "swiglu", "norm": "rmsnorm", "bias": False}


@pytest.mark.parametrize(
    "parallelism", [{}, {"tp": 2}, {"tp": 2, **hiding("tp")}], ids=["tp1", "tp2", "tp2 overlapped"]
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "model",
    [{}, {"block": "serial"}, {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "kv_heads": 2}],
    ids=["parallel", "serial", "swiglu"],
)
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_activations_of_a_layer(
    model: dict[str, Any], recompute: str, parallelism: dict[str, Any], precision: str
) -> None:
    few, many = (layers_job(layers, model, recompute=recompute, **parallelism) for layers in (2, 6))
    for job in (few, many):
        job["training"]["precision"] = precision
    measured = kept_bytes(many, torch_operators()) - kept_bytes(few, torch_operators())
    estimate = [rank_memory(from_accepted(job), 0).activations_bytes for job in (few, many)]
    assert estimate[1] - estimate[0] == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("block", ["parallel", "serial"])
def test_a_norm_over_all_heads_keeps_q_and_k(block: str, recompute: str) -> None:
    plain = {"block": block, "kv_heads": 2, "norm": "rmsnorm"}
    added = []
    for model in (plain, {**plain, "qk_norm": True, "qk_norm_over": "projection"}):
        few, many = (layers_job(layers, model, recompute=recompute) for layers in (2, 6))
        measured = kept_bytes(many, torch_operators()) - kept_bytes(few, torch_operators())
        estimate = [rank_memory(from_accepted(job), 0).activations_bytes for job in (few, many)]
        assert estimate[1] - estimate[0] == pytest.approx(measured, rel=0.03)
        added.append(estimate[1] - estimate[0])
    # Per token of 4 layers in bf16: 64 columns of q and 32 of k, before the norm's weight in bf16
    # and before the norm in float32.
    columns = 0 if recompute == "selective" else 64 + 32
    assert added[1] - added[0] == 4 * 2 * 64 * columns * (2 + 4)


@pytest.mark.parametrize(
    "parallelism", [{}, {"tp": 2}, {"dp": 2, "ep": 2}], ids=["alone", "tp2", "ep2"]
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("shared", [0, 128])
@pytest.mark.parametrize("dense", [1, 5])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_activations_of_a_layer_with_experts(
    precision: str, dense: int, shared: int, recompute: str, parallelism: dict[str, Any]
) -> None:
    """With even loads. One of two layers has experts; four more have them, or have none."""
    experts = {"count": 8, "top_k": 2, "ffn_size": 128, "shared_ffn_size": shared}
    few, many = (
        layers_job(
            layers,
            {
                **WITH_EXPERTS,
                "hidden_size": 256,
                "heads": 4,
                "experts": {**experts, "dense_layers": dense if layers > 2 else 1},
            },
            recompute=recompute,
            **parallelism,
        )
        for layers in (2, 6)
    )
    for job in (few, many):
        job["training"] |= {"forced_balance": True, "precision": precision}
    kept = [kept_bytes(job, torch_operators()) for job in (few, many)]
    estimate = [rank_memory(from_accepted(job), 0).activations_bytes for job in (few, many)]
    assert estimate[1] - estimate[0] == pytest.approx(kept[1] - kept[0], rel=0.03)


def _chunked(chunk_rows: int, length: int = 64, **parallelism: Any) -> dict[str, Any]:
    job = layers_job(1, {"vocab_size": 4000}, **parallelism)
    model = {**job["model"], "sequence_length": length}
    return {**job, "model": model, "loss": {**job["loss"], "chunk_rows": chunk_rows}}


@pytest.mark.parametrize("tp", [1, 2])
def test_memory_of_the_loss_follows_the_rows_of_a_chunk(tp: int) -> None:
    jobs = [_chunked(rows, tp=tp) for rows in (16, 64)]
    estimate = [rank_memory(from_accepted(job), 0).activations_bytes for job in jobs]
    measured = [head_peak_bytes(job, torch_operators()) for job in jobs]
    logits = (64 - 16) * 4000 // tp * (2 + 4)  # in bf16 and, by torch's operators, in float32
    assert logits <= estimate[1] - estimate[0] <= 1.02 * logits
    assert measured[1] - measured[0] == pytest.approx(estimate[1] - estimate[0], rel=0.05)


def test_memory_of_the_loss_in_chunks_hardly_grows_with_the_sequence() -> None:
    tokens = 2 * (512 - 64)
    grown = {}
    for rows in (0, 32):
        few, many = (
            head_peak_bytes(_chunked(rows, length), torch_operators()) for length in (64, 512)
        )
        grown[rows] = many - few
    assert grown[0] > tokens * 4000 * (2 + 4)
    # The normed tokens and their gradient, and what the norm's own backward makes in float32.
    assert tokens * 64 * 2 * 2 < grown[32] < tokens * 64 * 4 * 8
    few, many = (
        rank_memory(from_accepted(_chunked(32, length)), 0).activations_bytes
        - rank_memory(from_accepted(_chunked(0, length)), 0).activations_bytes
        for length in (64, 512)
    )
    assert many - few == tokens * (2 * 64 * 2 - 64 * 2 - 4000 * (2 + 4))


def test_a_loss_in_chunks_postpones_no_weight_gradient_of_the_head() -> None:
    job = _chunked(32)
    assert postponed_bytes(job, torch_operators()) == (
        postponed_bytes(_chunked(0), torch_operators()) - 2 * 64 * (64 + 4000) * 2
    )
    stages = {**job, "model": {**job["model"], "layers": 4}}
    needs = [
        rank_memory(
            from_accepted({**stages, "parallelism": {"pp": 2, "pipeline_schedule": schedule}}), 1
        ).activations_bytes
        for schedule in ("1f1b", "zero_bubble")
    ]
    layers = {**job, "model": {**job["model"], "layers": 2}}
    assert needs[1] - needs[0] == postponed_bytes(layers, torch_operators())


def test_buffers_are_exact() -> None:
    config = from_accepted(layers_job(4, {}, tp=2, dp=4))
    table, need = parameter_table(config, 0), rank_memory(config, 0)
    elements = sum(plan.elements for plan in table.buffers)
    assert (need.parameters_bytes, need.gradients_bytes) == (2 * elements, 4 * elements)
    assert need.optimizer_bytes == 12 * elements // 4
    state_bytes = need.parameters_bytes + need.gradients_bytes + need.optimizer_bytes
    assert need.total_bytes == state_bytes + need.activations_bytes + need.peer_memory_bytes
    assert need.activations_bytes > 0 and need.peer_memory_bytes == 0


@pytest.mark.parametrize(("tp", "dp", "ep"), [(1, 1, 1), (2, 2, 1), (2, 2, 4), (1, 4, 2)])
def test_buffers_with_experts_are_those_of_the_trainer(tp: int, dp: int, ep: int) -> None:
    """Experts are split over ep and their states over the ranks with the same ones."""
    experts = {"count": 8, "top_k": 2, "ffn_size": 96, "dense_layers": 1, "bias_rate": 0.001}
    config = from_accepted(layers_job(4, {**WITH_EXPERTS, "experts": experts}, tp=tp, dp=dp, ep=ep))
    table, need = parameter_table(config, 0), rank_memory(config, 0)
    place = Place(table, torch.bfloat16, torch.device("cpu"), single_process_groups())
    buffers = FlatBuffers(place)
    assert need.parameters_bytes == sum(one.nbytes for one in buffers.parameters.values())
    assert need.gradients_bytes == sum(one.nbytes for one in buffers.gradients.values())
    own = 3 * 3 * 64 * 96 * 8 // ep  # three layers, three matrices
    of_experts = sum(plan.elements for plan in table.buffers if plan.name == "experts")
    assert of_experts == own
    others = sum(plan.elements for plan in table.buffers) - own
    sharded = others // dp + own * ep // (tp * dp)
    assert need.optimizer_bytes == pytest.approx(12 * sharded, rel=0.01)


@pytest.mark.parametrize(("in_bf16", "layers"), [(0, 4), (1, 3)])
def test_weights_in_fp8_have_two_copies_of_one_byte(in_bf16: int, layers: int) -> None:
    job = layers_job(4, {}, tp=2)
    fp8 = {"layers_at_start_in_bf16": in_bf16}
    training = {**job["training"], "precision": "fp8", "fp8": fp8}
    need, plainly = (
        rank_memory(from_accepted(one), 0) for one in ({**job, "training": training}, job)
    )
    weights = layers * 12 * 64 * 64 // 2
    assert need.parameters_bytes - plainly.parameters_bytes == 2 * weights
    assert need.activations_bytes < plainly.activations_bytes


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bucket_mib", [0, 64])
@pytest.mark.parametrize("dp", [1, 4])
def test_weights_that_travel_in_fp8_are_in_bf16_in_the_shard_alone(
    dp: int, bucket_mib: int, bias: bool
) -> None:
    # With biases of 448 values the matrix behind them is not aligned, and has a copy.
    sections = {"model": {"bias": bias}, "training": {"bucket_mib": bucket_mib}}
    job = tiny_job(parallelism={"dp": dp}, **sections)
    needs = [rank_memory(gathering(job, kind), 0).parameters_bytes for kind in ("bf16", "fp8")]
    assert needs == [buffers_bytes(job, 0, kind) for kind in ("bf16", "fp8")]
    if not bias and not bucket_mib:  # such buckets have nothing beside the weights
        weights = 4 * 12 * 64 * 64
        assert needs[0] - needs[1] == 2 * weights - 2 * weights // dp


@given(
    tp=st.sampled_from([1, 2, 4]),
    rows=st.integers(1, 20),
    micro_batch_size=st.integers(1, 5),
    hidden_size=st.sampled_from([8, 24, 64]),
    precision=st.sampled_from(["fp32", "bf16"]),
    overlap=st.booleans(),
)
def test_peer_memory_is_what_the_trainer_takes(
    tp: int, rows: int, micro_batch_size: int, hidden_size: int, precision: str, overlap: bool
) -> None:
    config = from_accepted(
        tiny_job(
            model={"sequence_length": 4 * rows, "hidden_size": hidden_size, "heads": 4},
            parallelism={"tp": tp, "overlap": {"tp": overlap}},
            training={"micro_batch_size": micro_batch_size, "precision": precision},
        )
    )
    taken = [0]

    def take(
        handle: object, size_bytes: int, device: torch.device, *, timeout_s: float
    ) -> OwnMemory:
        taken.append(size_bytes)
        return OwnMemory(tp, size_bytes, device)

    handle = cast(torch.distributed.ProcessGroup, object()) if tp > 1 else None
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlapped, "why_unreachable", lambda *_: "")
        patch.setattr(overlapped, "open_peer_memory", take)
        overlapped.tensor_parallel(
            config,
            Group("tp", tuple(range(tp)), 0, handle, None),
            dtype,
            torch.device("cpu"),
            torch_operators(),
        )
    assert rank_memory(config, 0).peer_memory_bytes == taken[-1]
    assert (taken[-1] > 0) == (overlap and tp > 1)


@pytest.mark.parametrize("overlap", [hiding(), hiding("peer_edges")], ids=["plain", "overlapped"])
@pytest.mark.parametrize(("tp", "pp", "virtual_stages"), [(1, 2, 1), (2, 4, 1), (1, 2, 2)])
def test_peer_memory_of_edges_is_what_the_trainer_takes(
    tp: int, pp: int, virtual_stages: int, overlap: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"tp": tp, "pp": pp, "virtual_stages": virtual_stages, **overlap}
    config = from_accepted(
        tiny_job(model={"sequence_length": 12, "hidden_size": 24}, parallelism=sizes)
    )
    taken: list[int] = []

    def take(
        handle: object, size_bytes: int, device: torch.device, *, timeout_s: float
    ) -> OwnMemory:
        taken.append(size_bytes)
        return OwnMemory(2, size_bytes, device)

    monkeypatch.setattr(peer_edges, "why_unreachable", lambda *_: "")
    monkeypatch.setattr(peer_edges, "open_peer_memory", take)
    monkeypatch.setattr(peer_edges, "PeerMessages", lambda memory: memory)
    handle = cast(torch.distributed.ProcessGroup, object())
    for stage in range(pp):
        taken.clear()
        ring = virtual_stages > 1
        before, after = stage > 0 or ring, stage < pp - 1 or ring
        edges = Edges(
            *(
                Group(f"edge {there}", (0, 1), 0, handle, None) if there else None
                for there in (before, after, after, before)
            )
        )
        peer_edges.connect_edges(config, edges, stage, torch.float32, torch.device("cpu"))
        assert rank_memory(config, stage * tp).peer_memory_bytes == sum(taken)
        assert bool(taken) == bool(overlap["overlap"]["peer_edges"])


@pytest.mark.parametrize(("pp", "virtual_stages"), [(4, 1), (2, 2), (4, 2), (2, 4)])
def test_as_many_layers_are_alive_as_the_schedule_says(pp: int, virtual_stages: int) -> None:
    few, many = (
        rank_memory(from_accepted(layers_job(layers, {})), 0).activations_bytes for layers in (2, 6)
    )
    layer_bytes = (many - few) // 4
    head_bytes = few - 2 * layer_bytes
    config = from_accepted(layers_job(8, {}, pp=pp, virtual_stages=virtual_stages))
    for stage in range(pp):
        chunks = parameter_table(config, stage).chunks
        alive = most = 0
        for action in one_forward_one_backward(
            PipelineShape(stage, pp, config.micro_batches, virtual_stages)
        ):
            forward = (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
            alive += forward * len(chunks[action.chunk].layers)
            most = max(most, alive)
        expected = most * layer_bytes + (head_bytes if chunks[-1].last else 0)
        assert rank_memory(config, stage).activations_bytes == expected


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "model", [{}, {"block": "serial", "mlp": "swiglu", "kv_heads": 2, "ffn_size": 101}]
)
@pytest.mark.parametrize("tp", [1, 2])
def test_postponed_weight_gradients_keep_what_they_read(
    model: dict[str, Any], tp: int, precision: str
) -> None:
    whole = layers_job(2, model, tp=tp)
    whole["training"]["precision"] = precision
    job = layers_job(4, model, tp=tp, pp=2)
    job["training"]["precision"] = precision
    before, after = (
        from_accepted({**job, "parallelism": {**job["parallelism"], "pipeline_schedule": schedule}})
        for schedule in ("1f1b", "zero_bubble")
    )
    first, last = (
        rank_memory(after, rank).activations_bytes - rank_memory(before, rank).activations_bytes
        for rank in (0, tp)
    )
    assert first == 0, "the first stage postpones nothing"
    # The last one postpones those of one micro-batch: of two layers and the head.
    assert last == postponed_bytes(whole, torch_operators())
    graphs = from_accepted(
        {**to_mapping(after), "training": {**to_mapping(after)["training"], "cuda_graphs": True}}
    )
    assert (
        rank_memory(graphs, tp).activations_bytes
        >= rank_memory(after, tp).activations_bytes
        > rank_memory(before, tp).activations_bytes
    )


@pytest.mark.parametrize("tp", [1, 2])
def test_postponed_weight_gradients_of_experts_are_counted(tp: int) -> None:
    experts = {"count": 8, "top_k": 2, "ffn_size": 128, "shared_ffn_size": 128}
    model = {**WITH_EXPERTS, "hidden_size": 256, "heads": 4, "experts": experts}
    job = layers_job(4, model, tp=tp, pp=2)
    needs = [
        rank_memory(
            from_accepted(
                {**job, "parallelism": {**job["parallelism"], "pipeline_schedule": schedule}}
            ),
            tp,
        ).activations_bytes
        for schedule in ("1f1b", "zero_bubble")
    ]
    measured = postponed_bytes(layers_job(2, model, tp=tp), torch_operators())
    assert needs[1] - needs[0] == pytest.approx(measured, rel=0.03)


def test_earlier_stages_keep_more_micro_batches() -> None:
    config = from_accepted(layers_job(4, {}, pp=4))
    stages = [rank_memory(config, rank).activations_bytes for rank in range(4)]
    assert stages[0] == 4 * (stages[2] // 2)
    assert stages[0] > stages[1] > stages[2]
    assert largest_rank_memory(config).total_bytes == max(
        rank_memory(config, r).total_bytes for r in range(4)
    )


@pytest.mark.parametrize("model", [{}, {"mlp": "swiglu", "norm": "rmsnorm"}])
def test_fused_operators_keep_no_intermediates(model: dict[str, Any]) -> None:
    job = layers_job(1, model)
    plain, fused = (
        rank_memory(
            from_accepted({**job, "training": {**job["training"], "kernels": kernels}}), 0
        ).activations_bytes
        for kernels in ("torch", "triton")
    )
    tokens, hidden = 2 * 64, 64
    logits = 4 * tokens * 304  # 300 columns, padded
    layer = (
        tokens * (2 * 4 * hidden + 4 * hidden) if model else 0
    )  # silu(gate) in bf16, one norm in float32
    assert plain - fused == logits + layer

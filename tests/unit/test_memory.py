"""The memory estimate against what autograd really keeps, and against the table's own sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.harness.training import CPU, micro_batches, tiny_job

from megascale_common.job_config import from_dict
from megascale_common.memory import largest_rank_memory, rank_memory
from megascale_common.parameter_table import parameter_table
from megascale_executor.trainer.groups import single_process_groups
from megascale_executor.trainer.model.stage import Stage
from megascale_executor.trainer.model.weights import bind_weights
from megascale_executor.trainer.parallel.data.buffers import FlatBuffers
from megascale_executor.trainer.parallel.pipeline.schedule import Kind, one_forward_one_backward
from megascale_executor.trainer.parallel.tensor.products import plain_tensor_parallel
from megascale_kernels.operators import torch_operators


def _job(layers: int, model: dict[str, Any], **parallelism: Any) -> dict[str, Any]:
    return tiny_job(
        model={**model, "layers": layers, "sequence_length": 64},
        parallelism=parallelism,
        training={"micro_batch_size": 2, "global_batch_size": 16, "precision": "bf16"},
        data={"document_attention": False},
    )


def _kept_bytes(job: dict[str, Any]) -> int:
    """Bytes of distinct storages that a forward of the layers keeps for backward, weights aside."""
    config = from_dict(job)
    table, alone = parameter_table(config, 0), single_process_groups().world
    buffers = FlatBuffers(table, torch.bfloat16, CPU, alone, alone)
    weights, tp = bind_weights(table, buffers.parameters, buffers.gradients), plain_tensor_parallel(alone)
    stage = Stage(config, table.chunks[0], weights, tp, buffers, torch_operators())
    flat = [*buffers.parameters.values(), *buffers.gradients.values()]
    stored = {tensor.untyped_storage().data_ptr() for tensor in flat}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in stored:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stage.forward(None, micro_batches(config, 0, 0)[0])
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "model",
    [{}, {"block": "serial"}, {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "kv_heads": 2}],
    ids=["parallel", "serial", "swiglu"],
)
def test_activations_of_a_layer(model: dict[str, Any], recompute: str) -> None:
    few, many = (_job(layers, model, recompute=recompute) for layers in (2, 6))
    measured = _kept_bytes(many) - _kept_bytes(few)
    estimate = [rank_memory(from_dict(job), 0).activations_bytes for job in (few, many)]
    assert estimate[1] - estimate[0] == pytest.approx(measured, rel=0.03)


def test_buffers_are_exact() -> None:
    config = from_dict(_job(4, {}, tp=2, dp=4))
    table, need = parameter_table(config, 0), rank_memory(config, 0)
    elements = sum(plan.elements for plan in table.buffers)
    assert (need.parameters_bytes, need.gradients_bytes) == (2 * elements, 4 * elements)
    assert need.optimizer_bytes == 12 * elements // 4
    assert need.total_bytes > need.parameters_bytes + need.gradients_bytes + need.optimizer_bytes


@pytest.mark.parametrize(("pp", "virtual_stages"), [(4, 1), (2, 2), (4, 2), (2, 4)])
def test_as_many_layers_are_alive_as_the_schedule_says(pp: int, virtual_stages: int) -> None:
    few, many = (rank_memory(from_dict(_job(layers, {})), 0).activations_bytes for layers in (2, 6))
    layer_bytes = (many - few) // 4
    head_bytes = few - 2 * layer_bytes
    config = from_dict(_job(8, {}, pp=pp, virtual_stages=virtual_stages))
    for stage in range(pp):
        chunks = parameter_table(config, stage).chunks
        alive = most = 0
        for action in one_forward_one_backward(stage, pp, config.micro_batches, virtual_stages):
            forward = (action.kind is Kind.FORWARD) - (action.kind is Kind.BACKWARD)
            alive += forward * len(chunks[action.chunk].layers)
            most = max(most, alive)
        expected = most * layer_bytes + (head_bytes if chunks[-1].last else 0)
        assert rank_memory(config, stage).activations_bytes == expected


def test_earlier_stages_keep_more_micro_batches() -> None:
    config = from_dict(_job(4, {}, pp=4))
    stages = [rank_memory(config, rank).activations_bytes for rank in range(4)]
    assert stages[0] == 4 * (stages[2] // 2)
    assert stages[0] > stages[1] > stages[2]
    assert largest_rank_memory(config).total_bytes == max(rank_memory(config, r).total_bytes for r in range(4))

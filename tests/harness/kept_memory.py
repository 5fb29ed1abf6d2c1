"""What a forward of the model keeps for backward, measured: for tests of the memory estimate."""

from __future__ import annotations

from typing import Any

import torch
from tests.harness.training import micro_batches, tiny_job

from megascale_common.job_config import from_dict
from megascale_common.parameter_table import parameter_table
from megascale_executor.trainer.groups import single_process_groups
from megascale_executor.trainer.model.stage import Stage
from megascale_executor.trainer.model.weights import bind_weights
from megascale_executor.trainer.parallel.data.buffers import FlatBuffers
from megascale_executor.trainer.parallel.tensor.products import plain_tensor_parallel
from megascale_kernels.operators import Operators


def layers_job(layers: int, model: dict[str, Any], **parallelism: Any) -> dict[str, Any]:
    """Plain values of a job of so many layers: two sequences of 64 tokens, bf16, causal attention."""
    return tiny_job(
        model={**model, "layers": layers, "sequence_length": 64},
        parallelism=parallelism,
        training={"micro_batch_size": 2, "global_batch_size": 16, "precision": "bf16"},
        data={"document_attention": False},
    )


def kept_bytes(job: dict[str, Any], operators: Operators, device: torch.device | None = None) -> int:
    """Bytes of distinct storages that a forward of the layers keeps for backward, weights aside."""
    device = device or torch.device("cpu")
    config = from_dict(job)
    table, alone = parameter_table(config, 0), single_process_groups().world
    buffers = FlatBuffers(table, torch.bfloat16, device, alone, alone)
    weights, tp = bind_weights(table, buffers.parameters, buffers.gradients), plain_tensor_parallel(alone)
    stage = Stage(config, table.chunks[0], weights, tp, buffers, operators)
    flat = [*buffers.parameters.values(), *buffers.gradients.values()]
    stored = {tensor.untyped_storage().data_ptr() for tensor in flat}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in stored:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stage.forward(None, micro_batches(config, 0, 0, device)[0])
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())

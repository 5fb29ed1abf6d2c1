"""The memory that a model keeps for backward, or for weight gradients, for tests of the estimate.

Of a tensor-parallel group there is one rank here, which takes its own parts for those of the
others: values are wrong, sizes are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from tests.harness.training import micro_batches, tiny_job

from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_job.sizes.memory import rank_memory
from megascale_job.sizes.parameter_table import parameter_table
from megascale_kernels.expert_operators import expert_operators
from megascale_kernels.operators import Operators
from megascale_kernels.overlap.collective_matmul import CollectiveMatmuls
from megascale_kernels.quantize import Factor
from megascale_trainer.parallel.data.buffers import FlatBuffers, Place
from megascale_trainer.parallel.expert.experts import ExpertParallel, UnscaledExperts
from megascale_trainer.parallel.expert.fp8 import Fp8Experts
from megascale_trainer.parallel.groups import Group, single_process_groups
from megascale_trainer.parallel.pipeline.stage import Stage, StageExperts
from megascale_trainer.parallel.tensor.fp8 import Fp8, fp8_of
from megascale_trainer.parallel.tensor.matmul import OverlappedMatmuls
from megascale_trainer.parallel.tensor.sharding import TensorParallel, chunks, plain_tensor_parallel
from megascale_trainer.weights import bind_weights


def layers_job(layers: int, model: dict[str, Any], **parallelism: Any) -> dict[str, Any]:
    """A job of so many layers, as plain values: two sequences of 64 tokens, bf16, causal."""
    return tiny_job(
        model={**model, "layers": layers, "sequence_length": 64},
        parallelism=parallelism,
        training={"micro_batch_size": 2, "global_batch_size": 16, "precision": "bf16"},
        data={"document_attention": False},
    )


def kept_bytes(
    job: dict[str, Any], operators: Operators, device: torch.device | None = None
) -> int:
    """Bytes of distinct storages that a forward of the layers keeps for backward, weights aside."""
    device = device or torch.device("cpu")
    config = from_accepted(job)
    stage, stored = _stage(config, operators, _tensor_parallel(config, device), device)
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in stored:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stage.forward(None, micro_batches(config, 0, 0, device)[0]).output
    assert output.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def head_peak_bytes(job: dict[str, Any], operators: Operators) -> int:
    """The most bytes alive at once in forward and backward of the head and the loss.

    The head's weight, and what the products read and write besides, are among them.
    """
    # Here and not above: it imports what takes seconds.
    from torch.distributed._tools.mem_tracker import MemTracker

    config, device = from_accepted(job), torch.device("cpu")
    stage, _ = _stage(config, operators, _tensor_parallel(config, device), device)
    batch = micro_batches(config, 0, 0, device)[0]
    hidden = stage.forward(None, batch).output.detach().requires_grad_()
    with MemTracker() as tracker:
        objective, _ = stage.loss(hidden, batch)
        torch.autograd.backward(objective)
    return int(tracker.get_tracker_snapshot("peak")[device]["Total"])


def postponed_bytes(job: dict[str, Any], operators: Operators) -> int:
    """Bytes of distinct storages that the weight gradients of the whole model read, postponed.

    Gradients that they add to and scales of one value aside.
    """
    config, device = from_accepted(job), torch.device("cpu")
    tp = _tensor_parallel(config, device)
    stage, stored = _stage(config, operators, tp, device)
    batch = micro_batches(config, 0, 0, device)[0]
    objective = stage.run(None, batch).output
    with tp.weight_gradients.collected() as works:
        torch.autograd.backward(objective)
    tensors = [
        tensor
        for work in works
        if isinstance(work, partial)
        for operand in work.args
        for tensor in ([operand.data, operand.scale] if isinstance(operand, Factor) else [operand])
    ]
    kept = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and tensor.numel() > 1
    }
    return sum(size for at, size in kept.items() if at not in stored)


def _stage(
    config: JobConfig, operators: Operators, tp: TensorParallel, device: torch.device
) -> tuple[Stage, set[int]]:
    """The first stage of ``config``, and the addresses of its parameters and gradients."""
    table = parameter_table(config, 0)
    buffers = FlatBuffers(Place(table, torch.bfloat16, device, single_process_groups()))
    weights = bind_weights(table, buffers.values, buffers.gradients)
    fp8 = fp8_of(config, operators, tp, device)
    experts = _experts(config, operators, tp, fp8)
    stage = Stage(config, table.chunks[0], weights, tp, buffers, operators, fp8, experts)
    flat = [*buffers.parameters.values(), *buffers.gradients.values()]
    return stage, {tensor.untyped_storage().data_ptr() for tensor in flat}


def _experts(
    config: JobConfig, operators: Operators, tp: TensorParallel, fp8: Fp8 | None
) -> StageExperts | None:
    if not config.model.experts.count:
        return None
    group, cp = _OwnPeers(config.parallelism.ep, "ep"), single_process_groups()["cp"]
    found = expert_operators(operators.name, torch.bfloat16)
    plain = ExpertParallel(group, tp, cp, UnscaledExperts(found), found)
    if fp8 is None:
        return StageExperts(plain, None)
    in_fp8 = ExpertParallel(group, tp, cp, Fp8Experts(found, fp8.weights, fp8.fast), found)
    return StageExperts(plain, in_fp8)


class _OwnPeers(Group):
    """A group whose one rank gathers and sums its own parts alone, and sends itself its own."""

    def __init__(self, size: int, name: str = "tp") -> None:
        super().__init__(name, tuple(range(size)), 0, None, None)

    def all_gather(self, output: torch.Tensor, source: torch.Tensor) -> None:
        for part in output.chunk(self.size):
            part.copy_(source)

    def reduce_scatter(self, output: torch.Tensor, source: torch.Tensor) -> None:
        output.copy_(source.chunk(self.size)[0])


class OwnMemory:
    """Peer memory in which every peer is this rank."""

    def __init__(self, size: int, size_bytes: int, device: torch.device) -> None:
        self.rank, self.size, self.size_bytes, self.device = 0, size, size_bytes, device
        self._own = torch.zeros(size_bytes, dtype=torch.uint8, device=device)

    def tensor_of(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset_bytes: int = 0
    ) -> torch.Tensor:
        length = torch.Size(shape).numel() * dtype.itemsize
        return self._own[offset_bytes : offset_bytes + length].view(dtype).view(tuple(shape))

    def barrier(self) -> None:
        pass


def _tensor_parallel(config: JobConfig, device: torch.device) -> TensorParallel:
    size = config.parallelism.tp
    group = _OwnPeers(size)
    if not config.parallelism.overlap.tp:
        return plain_tensor_parallel(group)
    memory = OwnMemory(size, rank_memory(config, 0).peer_memory_bytes, device)
    return TensorParallel(group, OverlappedMatmuls(group, CollectiveMatmuls(memory, chunks(size))))

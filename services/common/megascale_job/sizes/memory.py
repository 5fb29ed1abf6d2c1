"""An estimate of the device memory of one rank, from the job alone.

Parameters, gradients and optimizer states are exact: they are the flat buffers of the parameter
table. In FP8 they include the two copies of each matrix; for a bucket that is gathered as bytes
they are the shard in bf16, the bytes and the transposed copies. Activations are the tensors that
the operators keep for backward. Peer memory (``overlap.tp``, ``overlap.peer_edges``) is allocated
outside torch's allocator, so ``torch.cuda.max_memory_allocated`` does not count it.

Not included are the allocator's fragmentation, workspaces of libraries, communicators' buffers and
the device context, so the device will report more. Also not included are dense attention masks, for
devices without a kernel for documents or windows, and the working memory of that kernel; and the
tables of LAMB's kernels, 16 bytes per 1024 values of a shard (0.13 % of its states).

:mod:`megascale_job.blocks` declares what each operator keeps per token; of experts it assumes even
loads over the ranks of ep. Kernels that are chosen by the device (``auto``) count as fused.

:func:`wanted_slots` and :func:`wanted_replica_slots` are the numbers of staging slots of a rank, on
which trainer, daemon and planner agree. A slot holds the whole state of a rank.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from megascale_job.blocks.ends import chunked_head_keeps, head_unit
from megascale_job.blocks.layer import Block, blocks_of, layer_unit
from megascale_job.blocks.parts import Extent, Kept, Operator, Unit
from megascale_job.config import CheckpointConfig, JobConfig, Recompute
from megascale_job.sizes.parameter_table import (
    DEFAULT_STATES,
    STATE_BYTES,
    ParameterTable,
    elements_of,
    fp8_buckets,
    fp8_expert_weights,
    fp8_weights,
    parameter_table,
)

_PARAMETER_BYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
_FP8_COPIES = 2  # of a weight in FP8: as stored and transposed, one byte per value each
_FLOAT32_BYTES = 4
# of region_bytes in megascale_kernels.overlap.row_transfers and in its peer_messages
_PEER_SLOTS, _PEER_ALIGNMENT_BYTES = 2, 256


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of device memory of one rank."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    peer_memory_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of them."""
        state = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return state + self.activations_bytes + self.peer_memory_bytes


def rank_memory(config: JobConfig, rank: int) -> RankMemory:
    """The estimate for ``rank``.

    Raises:
        ValueError: the layout cannot hold the model
            (:func:`megascale_job.sizes.parameter_table.parameter_table`).
    """
    table = parameter_table(config, rank)
    gradients = sum(plan.elements * (plan.copies or 1) for plan in table.buffers)
    recompute = config.parallelism.recompute
    kept = sum(
        number * _layer_bytes(config, kind, recompute)
        for kind, number in _alive_layers(config, table).items()
    )
    if table.chunks[-1].last:
        kept += _head_bytes(config)
    kept += _postponed_bytes(config, table)
    if recompute == "full":  # the layer that backward is just recomputing
        kinds = {kind for chunk in table.chunks for kind in _kinds(config, chunk.layers)}
        kept += max((_layer_bytes(config, kind, "none") for kind in kinds), default=0)
    return RankMemory(
        parameters_bytes=_parameters_bytes(config, table),
        gradients_bytes=gradients * _FLOAT32_BYTES,
        optimizer_bytes=table.shard_elements * STATE_BYTES * len(DEFAULT_STATES),
        activations_bytes=kept,
        peer_memory_bytes=_tensor_peer_bytes(config) + _edge_peer_bytes(config, table.at.pp),
    )


def largest_rank_memory(config: JobConfig) -> RankMemory:
    """The estimate of the rank that needs most, among one replica's stages: replicas are equal."""
    layout = config.layout
    return max(
        (rank_memory(config, rank) for rank in layout.members(0, "pp")),
        key=lambda need: need.total_bytes,
    )


def _parameters_bytes(config: JobConfig, table: ParameterTable) -> int:
    """Parameters in the compute dtype, and in FP8 the copies of each matrix."""
    size = _PARAMETER_BYTES[config.training.precision]
    owners = config.parallelism.dp * config.parallelism.cp
    layers = config.fp8_layers
    in_fp8 = (*fp8_weights(layers, table), *fp8_expert_weights(layers, table))
    total = _FP8_COPIES * elements_of(in_fp8)
    for plan in table.buffers:
        total += plan.elements * (_FLOAT32_BYTES if plan.counted else size)
    for travelling in fp8_buckets(config, table):
        # Without the gather: the whole bucket in ``size`` and a stored copy of its matrices. With
        # it: this rank's shard and the rest in ``size``, the whole bucket in one byte per value,
        # and copies of matrices that are not aligned.
        before = size * travelling.elements + elements_of(travelling.weights)
        after = size * (travelling.elements // owners + travelling.rest_elements)
        total += after + travelling.elements + travelling.copied_elements - before
    return total


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """Layers that keep equally much: of the same sub-blocks, in FP8 or not."""

    blocks: tuple[Block, ...]
    fp8: bool


def _kinds(config: JobConfig, layers: Iterable[int]) -> list[_LayerKind]:
    model, in_fp8 = config.model, config.fp8_layers
    return [_LayerKind(blocks_of(model, index), index in in_fp8) for index in layers]


def _alive_layers(config: JobConfig, table: ParameterTable) -> Counter[_LayerKind]:
    """Layers times micro-batches whose activations are alive at the end of the warm-up, by kind.

    1F1B: pp - stage micro-batches. Interleaved: the first 2 (pp - stage - 1) + (chunks - 1) pp + 1
    forwards, which visit the chunks in turn, pp micro-batches each (arXiv 2104.04473, section 2.2).
    """
    pp = config.parallelism.pp
    by_chunk = [Counter(_kinds(config, chunk.layers)) for chunk in table.chunks]
    alive = Counter[_LayerKind]()
    for forward in range(_alive(config, table.at.pp)):
        alive.update(by_chunk[forward // pp % len(by_chunk)])
    return alive


def _alive(config: JobConfig, stage: int) -> int:
    """Forwards of one chunk each that ``stage`` keeps at the end of the warm-up."""
    pp, chunks = config.parallelism.pp, config.parallelism.virtual_stages
    after = pp - stage - 1
    alive = after + 1 if chunks == 1 else 2 * after + (chunks - 1) * pp + 1
    return min(alive, config.micro_batches * chunks)


def _postponed_bytes(config: JobConfig, table: ParameterTable) -> int:
    """Inputs and output gradients of GEMMs whose weight gradients zero bubble postpones.

    A stage postpones as many backwards, last chunk first, as the first stage has more forwards
    alive than it. With CUDA graphs a postponed backward keeps its whole memory until then.
    """
    if config.parallelism.pipeline_schedule == "1f1b":
        return 0
    pp, chunks = config.parallelism.pp, table.chunks
    by_chunk = [
        sum(
            number * _postponed_layer_bytes(config, kind)
            for kind, number in Counter(_kinds(config, chunk.layers)).items()
        )
        for chunk in chunks
    ]
    head = 0  # in chunks it has its weight gradient in forward
    if not config.loss.chunk_rows:
        head = _kept_bytes(config, _gemm_operands(head_unit(config.model), fp8=False), fp8=False)
    total = 0
    for backward in range(_alive(config, 0) - _alive(config, table.at.pp)):
        at = len(chunks) - 1 - backward // pp % len(chunks)
        total += by_chunk[at] + (head if chunks[at].last else 0)
    return total


def _postponed_layer_bytes(config: JobConfig, kind: _LayerKind) -> int:
    held = _kept_bytes(
        config, _gemm_operands(layer_unit(config.model, kind.blocks), fp8=True), fp8=kind.fp8
    )
    if config.training.cuda_graphs:
        held = max(held, _layer_bytes(config, kind, config.parallelism.recompute))
    return held


def _gemm_operands(unit: Unit, *, fp8: bool) -> list[Kept]:
    """The tensors per token that the weight gradients of a unit's GEMMs read.

    A matrix [rows, columns] needs a tensor with rows and one with columns; one of them is its input
    and the other its output gradient.
    """
    return [
        Kept(extent, fp8=fp8, of_rows=operator.top_k > 0)
        for operator in unit
        if operator.gemm
        for extent in _sides(operator)
    ]


def _sides(operator: Operator) -> list[Extent]:
    """Both sides of every matrix of an operator; of experts for all rows of a token."""
    matrices = [tensor for tensor in operator.tensors if tensor.row]
    if operator.top_k:
        sizes = [size for tensor in matrices for size in tensor.row]
        return [Extent(operator.top_k * size, "even") for size in sizes]
    extents = []
    for tensor in matrices:
        # A matrix that every tp rank holds multiplies its part of the sequence: the router's.
        sides = [part.rows for part in tensor.parameters]
        sides.append(Extent(tensor.row[0], "whole"))
        if tensor.replicated:
            sides = [Extent(side.size, "even") for side in sides]
        extents += sides
    return extents


def _layer_bytes(config: JobConfig, kind: _LayerKind, recompute: Recompute) -> int:
    """Bytes that one layer keeps of one micro-batch; with full recompute only its input."""
    if recompute == "full":
        return _kept_bytes(config, [Kept(Extent(config.model.hidden_size, "even"))], fp8=kind.fp8)
    unit = layer_unit(config.model, kind.blocks)
    keeps = [kept for operator in unit for kept in operator.keeps]
    if recompute == "selective":
        keeps = [kept for kept in keeps if not kept.recomputed]
    return _kept_bytes(config, keeps, fp8=kind.fp8)


def _head_bytes(config: JobConfig) -> int:
    """Bytes that the head keeps of its one micro-batch, or at most needs at once, in chunks."""
    keeps = [kept for part in head_unit(config.model) for kept in part.keeps]
    if not config.loss.chunk_rows:
        return _kept_bytes(config, keeps, fp8=False)
    of_all = _kept_bytes(config, chunked_head_keeps(config.model), fp8=False)
    return of_all + _kept_bytes(config, keeps, fp8=False, tokens=_head_rows(config))


def head_share(config: JobConfig) -> float:
    """The share of a micro-batch's logits that exist at once."""
    return _head_rows(config) / _tokens(config) if config.loss.chunk_rows else 1.0


def _head_rows(config: JobConfig) -> int:
    """Tokens in one chunk of the head."""
    sequences, parallel = config.training.micro_batch_size, config.parallelism
    steps = config.model.sequence_length // (parallel.tp * parallel.cp)
    return config.loss.chunk_steps(steps, sequences, parallel.tp) * sequences * parallel.tp


def _tokens(config: JobConfig) -> int:
    """Tokens of a micro-batch in this rank's part of each sequence, before tp splits it."""
    tokens = config.training.micro_batch_size * config.model.sequence_length
    return tokens // config.parallelism.cp


def _kept_bytes(
    config: JobConfig, keeps: Iterable[Kept], *, fp8: bool, tokens: int | None = None
) -> int:
    tokens = _tokens(config) if tokens is None else tokens
    layout, plain = config.layout, config.training.kernels == "torch"
    # Rows for all tokens of the ep group: any of them may choose this rank's experts.
    by_token = config.parallelism.expert_exchange == "tokens"
    size = _PARAMETER_BYTES[config.training.precision]
    return sum(
        tokens
        * kept.elements.local(layout)
        * (layout.ep if by_token and kept.of_rows else 1)
        * (1 if fp8 and kept.fp8 else _FLOAT32_BYTES if kept.float32 else size)
        for kept in keeps
        if plain or not kept.torch_only
    )


def _tensor_peer_bytes(config: JobConfig) -> int:
    """Peer memory for the exchange of hidden states [S, B, H] in overlapped tensor parallelism.

    Ranks that cannot reach each other's memory allocate none; the estimate assumes that they can.
    """
    parallel = config.parallelism
    if not parallel.overlap.tp or parallel.tp == 1:
        return 0
    return _slots_bytes(_hidden_bytes(config))


def _edge_peer_bytes(config: JobConfig, stage: int) -> int:
    """Peer memory for the exchange of hidden states [S / tp, B, H] with neighbours of ``stage``.

    The same assumption applies; stages on different hosts allocate none.
    """
    parallel = config.parallelism
    if not parallel.overlap.peer_edges or parallel.pp == 1:
        return 0
    at_an_end = stage in (0, parallel.pp - 1)
    neighbours = 1 if at_an_end and parallel.virtual_stages == 1 else 2
    return neighbours * _slots_bytes(_hidden_bytes(config) // parallel.tp)


def _hidden_bytes(config: JobConfig) -> int:
    """Size of one micro-batch's hidden states [S / cp, B, H]."""
    return _tokens(config) * config.model.hidden_size * _PARAMETER_BYTES[config.training.precision]


def _slots_bytes(size_bytes: int) -> int:
    return _PEER_SLOTS * math.ceil(size_bytes / _PEER_ALIGNMENT_BYTES) * _PEER_ALIGNMENT_BYTES


# In addition to those in flight: the newest sealed one, and the one that is being persisted.
KEPT_SLOTS, LEAST_SLOTS, MOST_SLOTS = 2, 2, 8
# With checkpoint.replicas another node keeps, for each rank, a whole replica while the next one
# arrives. Until then the rank's own node keeps the same two states in extra slots.
REPLICA_SLOTS, HELD_FOR_REPLICAS = 2, 2


def snapshots_in_flight(interval_steps: int) -> int:
    """Number of snapshots, ``interval_steps`` apart, reserved, copied or unsettled at once.

    On CUDA the slot of step s + 1 is reserved while s waits for its copy and s - 1 for its result.
    """
    return {1: 3, 2: 2}.get(interval_steps, 1)


def wanted_slots(checkpoint: CheckpointConfig) -> int:
    """Slots of a rank if memory allows; 0 for a job without checkpoints."""
    if not checkpoint.uri:
        return 0
    in_flight = snapshots_in_flight(checkpoint.memory_interval_steps)
    held = HELD_FOR_REPLICAS if checkpoint.replicas else 0
    return checkpoint.slots or in_flight + KEPT_SLOTS + held


def wanted_replica_slots(checkpoint: CheckpointConfig) -> int:
    """Slots that another node keeps for the replicas of a rank of this job."""
    return REPLICA_SLOTS if checkpoint.uri and checkpoint.replicas else 0

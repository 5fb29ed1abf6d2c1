"""An estimate of the device memory of one rank, from the job alone.

Parameters, gradients and optimizer states are exact: they are the flat buffers of the parameter
table. Activations are a count of what the operators keep for backward. Peer memory (``overlap.tp``)
is taken from the device outside torch's allocator, so that ``torch.cuda.max_memory_allocated`` does
not count it. Left out are the allocator's fragmentation, workspaces of libraries, communicators'
buffers and the device context: expect the device to report more. Left out too are dense attention
masks, where no kernel takes documents or windows, and the working memory of the one that does.

A layer keeps, per token and in elements, with h the hidden size, q and kv a rank's columns of q and
of k or v, f its FFN width and c that of its columns in the input GEMM (2f for swiglu, else f);
kernels that are chosen by the device (``auto``) count as fused:

======================================  ===================  ===================  =========
what                                    parallel block       serial block         selective
======================================  ===================  ===================  =========
inputs of the norms                     h / tp               2 h / tp             kept
gathered inputs of the input GEMMs      h                    2 h                  kept
the activation's input                  q + 2 kv + c (all)   c                    q + 2 kv + c
q, k, v and the attention's result      2 q + 2 kv           2 q + 2 kv           dropped
input of the output GEMMs               q + f                q + f                kept
torch alone: silu(gate) of swiglu       f                    f                    dropped
torch alone: rmsnorm in float32         h / tp               2 h / tp             kept
======================================  ===================  ===================  =========
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megascale_common.job.config import JobConfig
from megascale_common.sizes.parameter_slices import ParameterTable
from megascale_common.sizes.parameter_table import STATE_BYTES, STATES, local_width, parameter_table

_PARAMETER_BYTES = {"fp32": 4, "bf16": 2}
_FLOAT32_BYTES = 4
# of megascale_kernels.overlap.collective_matmul.region_bytes
_PEER_SLOTS, _PEER_ALIGNMENT_BYTES = 2, 256


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of one rank."""

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
            (:func:`megascale_common.sizes.parameter_table.parameter_table`).
    """
    table = parameter_table(config, rank)
    elements = sum(plan.elements for plan in table.buffers)
    kept = _alive_layers(config, table) * _layer_bytes(config)
    if table.chunks[-1].last:
        kept += _head_bytes(config)
    if config.parallelism.recompute == "full":
        kept += _layer_bytes(config, recompute="none")  # the layer that backward is computing again
    return RankMemory(
        parameters_bytes=elements * _PARAMETER_BYTES[config.training.precision],
        gradients_bytes=elements * _FLOAT32_BYTES,
        optimizer_bytes=table.shard_elements * STATE_BYTES * len(STATES),
        activations_bytes=kept,
        peer_memory_bytes=_peer_memory_bytes(config),
    )


def largest_rank_memory(config: JobConfig) -> RankMemory:
    """The estimate of the rank that needs most: the stages of one replica are looked at, the rest
    are like them.
    """
    layout = config.layout
    return max(
        (rank_memory(config, rank) for rank in layout.group_of(0, ("pp",))),
        key=lambda need: need.total_bytes,
    )


def _alive_layers(config: JobConfig, table: ParameterTable) -> int:
    """Layers times micro-batches whose activations are alive at once, at the end of the pipeline's
    warm-up.

    1F1B: pp - stage micro-batches. Interleaved: the first 2 (pp - stage - 1) + (chunks - 1) pp + 1
    forwards, which visit the chunks in turn, pp micro-batches each (arXiv 2104.04473, section 2.2).
    """
    pp, chunks = config.parallelism.pp, table.chunks
    after = pp - table.at.pp - 1
    alive = after + 1 if len(chunks) == 1 else 2 * after + (len(chunks) - 1) * pp + 1
    alive = min(alive, config.micro_batches * len(chunks))
    return sum(len(chunks[forward // pp % len(chunks)].layers) for forward in range(alive))


def _layer_bytes(config: JobConfig, recompute: str | None = None) -> int:
    """What one layer keeps of one micro-batch, in bytes; hidden states are cut over tp, gathered
    ones are whole.
    """
    model, tp = config.model, config.parallelism.tp
    recompute = recompute or config.parallelism.recompute
    plain = config.training.kernels == "torch"
    tokens = config.training.micro_batch_size * model.sequence_length
    size = _PARAMETER_BYTES[config.training.precision]
    hidden = tokens * model.hidden_size
    if recompute == "full":
        return hidden // tp * size
    norms = 1 if model.block == "parallel" else 2
    query = model.heads * model.head_size // tp
    heads = query + 2 * model.key_value_heads * model.head_size // tp
    width = local_width(model.ffn_width, tp)
    ffn = width * (2 if model.mlp == "swiglu" else 1)
    kept = norms * (hidden // tp + hidden)  # input of each norm; gathered input of each input GEMM
    kept += tokens * (
        heads + ffn + query + width
    )  # result of the input GEMM; input of the output GEMM
    if recompute == "none":
        kept += tokens * query  # the attention's own output
        # Rotated q, k, v take the place of the input GEMM's result, unless the merged activation
        # still needs that.
        kept += tokens * heads if model.block == "parallel" else 0
        kept += tokens * width if model.mlp == "swiglu" and plain else 0  # silu(gate)
    wide = (
        norms * hidden // tp * _FLOAT32_BYTES if model.norm == "rmsnorm" and plain else 0
    )  # its intermediate
    return kept * size + wide


def _head_bytes(config: JobConfig) -> int:
    """What the vocabulary head needs of the one micro-batch in it: logits, whose gradient takes
    their place, and beside them, while torch's own operators compute either, one float32
    intermediate.
    """
    wide = _FLOAT32_BYTES if config.training.kernels == "torch" else 0
    model, size = config.model, _PARAMETER_BYTES[config.training.precision]
    tokens = config.training.micro_batch_size * model.sequence_length
    logits = tokens * local_width(model.vocab_size, config.parallelism.tp)
    return logits * (size + wide) + tokens * model.hidden_size * size


def _peer_memory_bytes(config: JobConfig) -> int:
    """What overlapped tensor parallelism exchanges hidden states [S, B, H] through, or would: ranks
    that cannot reach each other's memory take none.
    """
    parallel, model = config.parallelism, config.model
    if not parallel.overlap.tp or parallel.tp == 1:
        return 0
    tokens = config.training.micro_batch_size * model.sequence_length
    whole = tokens * model.hidden_size * _PARAMETER_BYTES[config.training.precision]
    return _PEER_SLOTS * math.ceil(whole / _PEER_ALIGNMENT_BYTES) * _PEER_ALIGNMENT_BYTES

"""Parameter slices: what a rank holds, and where it lies in its flat buffers.

A :class:`ParameterTable` (built by :mod:`megascale_job.sizes.parameter_table`) is what
initialisation, training, gradient clipping, the optimizer, snapshots and resharding all read.
*Logical* names (``layers.3.q.weight``) and global shapes never change with the layout; *stored*
tensors are what the GEMMs use. A stored tensor may merge several logical parameters: rank r's input
projection holds the rows ``[q_r | k_r | v_r | gate_r | up_r]``. Output projections are stored
input-major, ``[attention_r | ffn_r]`` rows by ``hidden`` columns, that is as ``[in, out]``: then
every logical box is a block of whole rows, one contiguous run both in the flat buffer and in the
flattened global parameter, and the merged output projection is still one GEMM.

A pipeline stage keeps two flat buffers. ``sharded`` is cut over tp; ``replicated`` (norms,
row-parallel biases, learned positions) is held whole by every tp rank, and its gradients are
partial sums until they are summed over tp. With tied embeddings the first and the last stage keep
the table in a third one, ``tied``, and sum its gradients between them. Each buffer is cut into
buckets of whole layers in the order of forward, padded so that the dp ranks own equal, aligned
shards (ZeRO-2 of MegaScale section 3.1). Units of all offsets and sizes here are elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megascale_job.layout import Axis, Coordinates
from megascale_job.sizes.block import Initial


@dataclass(frozen=True, slots=True)
class ParameterSlice:
    """The rows ``start[0]:stop[0]`` of one logical parameter, at ``offset`` of ``buffer``.

    ``replicated_over`` names the axes whose ranks hold the same slice; ``std`` is the deviation of
    ``normal`` values.
    """

    name: str
    global_shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    replicated_over: tuple[Axis, ...]
    buffer: str
    offset: int
    decay: bool
    initial: Initial
    std: float

    @property
    def elements(self) -> int:
        """Number of values in the box."""
        return math.prod(high - low for low, high in zip(self.start, self.stop, strict=True))

    @property
    def global_offset(self) -> int:
        """Index of the box's first value in the flattened parameter: boxes are whole rows."""
        return self.start[0] * math.prod(self.global_shape[1:])


def align(value: int, multiple: int) -> int:
    """``value`` up to the next multiple."""
    return -(-value // multiple) * multiple


def stands_for(at: Coordinates, replicated_over: tuple[Axis, ...]) -> bool:
    """Whether a rank counts for what is replicated over these axes: one rank of each group does."""
    return ("tp" not in replicated_over or at.tp == 0) and (
        "pp" not in replicated_over or at.pp == 0
    )


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that the model computes with: ``shape`` in C order at ``offset`` of ``buffer``."""

    name: str
    shape: tuple[int, ...]
    buffer: str
    offset: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """``start:stop`` of a buffer: the unit of gradient reduce-scatter and parameter all-gather."""

    start: int
    stop: int
    units: tuple[str, ...]

    def shard(self, dp_rank: int, dp: int) -> tuple[int, int]:
        """The part of the buffer that data-parallel rank ``dp_rank`` of ``dp`` owns."""
        size = (self.stop - self.start) // dp
        return self.start + dp_rank * size, self.start + (dp_rank + 1) * size


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """One flat buffer: its size and its buckets in the order of forward."""

    name: str
    elements: int
    buckets: tuple[Bucket, ...]
    replicated_over: tuple[Axis, ...]


@dataclass(frozen=True, slots=True)
class ShardRange:
    """What this rank owns of one bucket: ``start:stop`` of ``buffer``.

    It lies at ``shard_offset`` of the rank's flat shard.
    """

    buffer: str
    start: int
    stop: int
    shard_offset: int


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """A virtual pipeline stage: some layers, maybe the embedding before or the head after them.

    ``first``: the embedding stands before them; ``last``: the head follows. Of P pipeline stages,
    stage p holds the virtual stages p, p + P, p + 2 P and so on: one without interleaving.
    """

    layers: range
    first: bool
    last: bool

    @property
    def units(self) -> tuple[str, ...]:
        """Names of what a bucket holds whole, in the order of forward."""
        layers = (f"layers.{index}" for index in self.layers)
        return (*(("embedding",) if self.first else ()), *layers, *(("head",) if self.last else ()))


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """Everything one rank holds, ``chunks`` in the order of the model.

    No bucket holds layers of two chunks.
    """

    at: Coordinates
    dp: int
    chunks: tuple[ModelChunk, ...]
    buffers: tuple[BufferPlan, ...]
    tensors: tuple[StoredTensor, ...]
    slices: tuple[ParameterSlice, ...]

    @property
    def shard_ranges(self) -> tuple[ShardRange, ...]:
        """The rank's shard, bucket by bucket: buffers in order, their buckets in order."""
        found, offset = [], 0
        for buffer in self.buffers:
            for bucket in buffer.buckets:
                start, stop = bucket.shard(self.at.dp, self.dp)
                found.append(ShardRange(buffer.name, start, stop, offset))
                offset += stop - start
        return tuple(found)

    def stored_in(self, buffer: str, bucket: Bucket) -> list[StoredTensor]:
        """The tensors of a bucket, in the order of the table; none leaves its bucket."""
        return [
            tensor
            for tensor in self.tensors
            if tensor.buffer == buffer and bucket.start <= tensor.offset < bucket.stop
        ]

    @property
    def shard_elements(self) -> int:
        """Size of the rank's flat shard of one optimizer state, padding included."""
        return sum(buffer.elements for buffer in self.buffers) // self.dp

    def overlaps(self) -> Iterator[tuple[ShardRange, ParameterSlice, int, int]]:
        """Every (range, slice, start, stop) with ``start:stop`` in both, in shard order."""
        by_buffer = {
            buffer.name: [s for s in self.slices if s.buffer == buffer.name]
            for buffer in self.buffers
        }
        for owned in self.shard_ranges:
            for piece in by_buffer[owned.buffer]:
                start = max(owned.start, piece.offset)
                stop = min(owned.stop, piece.offset + piece.elements)
                if start < stop:
                    yield owned, piece, start, stop

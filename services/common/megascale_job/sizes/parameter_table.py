"""The parameter table of a rank, computed from the job alone.

It is pure, so every process can compute every rank's table. The weights themselves are declared in
:mod:`megascale_job.sizes.block`; here they get their places. Also :func:`shard_layout`, the byte
image of a rank's optimizer shard in a snapshot slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megascale_job.config import JobConfig, ModelConfig, ParallelismConfig
from megascale_job.layout import Axis
from megascale_job.sizes.block import Tensor, Unit, embedding_unit, head_unit, layer_unit
from megascale_job.sizes.checkpoint_layout import MASTER, ShardLayout, ShardPiece
from megascale_job.sizes.parameter_slices import (
    Bucket,
    BufferPlan,
    ModelChunk,
    ParameterSlice,
    ParameterTable,
    StoredTensor,
    align,
    stands_for,
)

ALIGNMENT = 64  # elements: 128 bytes of bf16, as wide loads and cuBLAS require
# States of the default optimizer. Driver and agent assume them of every optimizer: its package,
# which declares them, is only installed where it trains.
DEFAULT_STATES = (MASTER, "exp_avg", "exp_avg_sq")
# Every optimizer state is float32, and so is the gradient buffer that buckets are sized by.
STATE_BYTES = 4
SHARDED, REPLICATED, TIED = "sharded", "replicated", "tied"


def parameter_table(config: JobConfig, rank: int) -> ParameterTable:
    """The table of one rank.

    Raises:
        ValueError: a size that the layout cannot divide, or a feature that is not built; names the
            field.
    """
    _check(config)
    sizes = config.parallelism
    at = sizes.layout.coordinates(rank)
    chunks = model_chunks(config, at.pp)
    bucket_elements = config.training.bucket_mib * 2**20 // STATE_BYTES
    layout = _Layout(at.tp, sizes.tp, sizes.pp, bucket_elements, ALIGNMENT * sizes.dp)
    layer = layer_unit(config.model)
    for chunk in chunks:
        if chunk.first:
            layout.unit("embedding", "", embedding_unit(config.model))
        for index in chunk.layers:
            layout.unit(f"layers.{index}", f"layers.{index}.", layer)
        if chunk.last:
            layout.unit("head", "", head_unit(config.model))
        layout.close_buckets()
    return ParameterTable(
        at, sizes.dp, chunks, layout.buffers(), tuple(layout.tensors), tuple(layout.slices)
    )


def parameter_names(model: ModelConfig) -> tuple[str, ...]:
    """The logical parameters of a model in its order, whatever its layout; a tied one once."""
    layer = layer_unit(model)
    units = [("", embedding_unit(model))]
    units += [(f"layers.{index}.", layer) for index in range(model.layers)]
    names = {
        f"{prefix}{parameter.name}.{tensor.kind}": None
        for prefix, unit in [*units, ("", head_unit(model))]
        for operator in unit
        for tensor in operator.tensors
        for parameter in tensor.parameters
    }
    return tuple(names)


def model_chunks(config: JobConfig, stage: int) -> tuple[ModelChunk, ...]:
    """The virtual stages that pipeline stage ``stage`` holds, in the order of the model."""
    layers = stage_layers(config)
    last = len(layers) - 1
    held = range(stage, len(layers), config.parallelism.pp)
    return tuple(ModelChunk(layers[number], number == 0, number == last) for number in held)


def stage_layers(config: JobConfig) -> tuple[range, ...]:
    """Layer indices of each virtual stage.

    They are ``stage_layers`` if set, else even with the remainder on the first stages.

    The last virtual stage also computes the vocabulary head, so it is never the one that gets an
    extra layer.
    """
    counts = config.parallelism.stage_layers
    if not counts:
        stages = config.parallelism.pp * config.parallelism.virtual_stages
        each, rest = divmod(config.model.layers, stages)
        counts = tuple(each + (stage < rest) for stage in range(stages))
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return tuple(range(start, start + count) for start, count in zip(starts, counts, strict=True))


def parameter_counts(config: JobConfig) -> dict[str, int]:
    """Elements of each parameter of the whole model, by name."""
    alone = replace(config, parallelism=ParallelismConfig())
    return {s.name: math.prod(s.global_shape) for s in parameter_table(alone, 0).slices}


def checkpoint_bytes(config: JobConfig) -> int:
    """What a whole checkpoint takes on storage."""
    return sum(parameter_counts(config).values()) * STATE_BYTES * len(DEFAULT_STATES)


def shard_layout(table: ParameterTable, states: Sequence[str] = DEFAULT_STATES) -> ShardLayout:
    """How the rank's optimizer states lie in a slot: the flat shard of each, one after the other.

    ``primary`` is true on exactly one rank for every value: rank 0 of an axis stands for what is
    replicated over it.
    """
    pieces = []
    for number, state in enumerate(states):
        for owned, piece, start, stop in table.overlaps():
            position = number * table.shard_elements + owned.shard_offset + start - owned.start
            pieces.append(
                ShardPiece(
                    name=piece.name,
                    state=state,
                    dtype="float32",
                    global_shape=piece.global_shape,
                    start=piece.start,
                    stop=piece.stop,
                    flat_start=start - piece.offset,
                    flat_stop=stop - piece.offset,
                    slot_offset_bytes=position * STATE_BYTES,
                    primary=stands_for(table.at, piece.replicated_over),
                )
            )
    image_bytes = len(states) * table.shard_elements * STATE_BYTES
    return ShardLayout(tuple(pieces), -(-image_bytes // 4096) * 4096)


class _Layout:
    """Gives stored tensors their places in one tp rank's buffers.

    Whole units go to buckets of at most ``limit`` elements, or to one unit's bucket. A tied tensor
    is alone in its buffer, so that the ranks of both stages that hold it own the same shards.
    """

    def __init__(self, tp_rank: int, tp: int, pp: int, limit: int, bucket_multiple: int) -> None:
        self._tp_rank, self._tp, self._pp = tp_rank, tp, pp
        self._limit, self._multiple = limit, bucket_multiple
        self._ends = {SHARDED: 0, REPLICATED: 0, TIED: 0}
        self._open: dict[str, list[str]] = {buffer: [] for buffer in self._ends}
        self._buckets: dict[str, list[Bucket]] = {buffer: [] for buffer in self._ends}
        self.tensors: list[StoredTensor] = []
        self.slices: list[ParameterSlice] = []

    def unit(self, name: str, prefix: str, unit: Unit) -> None:
        """Place a unit's tensors, in a new bucket if the open one has no room for all of them."""
        tensors = [tensor for operator in unit for tensor in operator.tensors]
        for buffer in self._ends:
            mine = [tensor for tensor in tensors if _buffer(tensor) == buffer]
            size = sum(align(tensor.elements(self._tp), ALIGNMENT) for tensor in mine)
            if buffer == TIED and self._ends[TIED]:  # one stage is the first and the last
                size = 0
            if self._ends[buffer] - self._bucket_start(buffer) + size > self._limit:
                self._close_bucket(buffer)
            if mine:
                self._open[buffer].append(name)
            for tensor in mine:
                self._place(prefix, tensor)

    def close_buckets(self) -> None:
        """Have what follows start in new buckets."""
        for buffer in self._ends:
            self._close_bucket(buffer)

    def buffers(self) -> tuple[BufferPlan, ...]:
        """Describe the buffers, whose buckets are all closed; the tied one where there is one."""
        return tuple(
            BufferPlan(buffer, end, tuple(self._buckets[buffer]), self._replicated_over(buffer))
            for buffer, end in self._ends.items()
            if end or buffer != TIED
        )

    def _place(self, prefix: str, tensor: Tensor) -> None:
        buffer = _buffer(tensor)
        trailing = (tensor.columns,) if tensor.columns else ()
        if buffer == TIED and self._ends[TIED]:  # one stage is the first and the last
            [twin] = [stored for stored in self.tensors if stored.buffer == TIED]
            self.tensors.append(replace(twin, name=f"{prefix}{tensor.name}.{tensor.kind}"))
            return
        start, row = self._ends[buffer], 0
        for parameter in tensor.parameters:
            first, rows = parameter.rows.part(self._tp_rank, self._tp)
            if rows:
                self.slices.append(
                    ParameterSlice(
                        name=f"{prefix}{parameter.name}.{tensor.kind}",
                        global_shape=(parameter.rows.size, *trailing),
                        start=(first, *(0 for _ in trailing)),
                        stop=(first + rows, *trailing),
                        replicated_over=self._replicated_over(buffer),
                        buffer=buffer,
                        offset=start + row * (tensor.columns or 1),
                        decay=tensor.decays,
                        initial=parameter.initial,
                        std=parameter.std,
                    )
                )
            row += parameter.rows.local(self._tp)
        name = f"{prefix}{tensor.name}.{tensor.kind}"
        self.tensors.append(StoredTensor(name, (row, *trailing), buffer, start))
        self._ends[buffer] = start + align(tensor.elements(self._tp), ALIGNMENT)

    def _replicated_over(self, buffer: str) -> tuple[Axis, ...]:
        if buffer == TIED:
            return ("pp",) if self._pp > 1 else ()
        return ("tp",) if buffer == REPLICATED else ()

    def _bucket_start(self, buffer: str) -> int:
        return self._buckets[buffer][-1].stop if self._buckets[buffer] else 0

    def _close_bucket(self, buffer: str) -> None:
        start = self._bucket_start(buffer)
        if self._ends[buffer] > start:
            stop = start + align(self._ends[buffer] - start, self._multiple)
            self._buckets[buffer].append(Bucket(start, stop, tuple(self._open[buffer])))
            self._ends[buffer] = stop
            self._open[buffer].clear()


def _buffer(tensor: Tensor) -> str:
    if tensor.tied:
        return TIED
    return REPLICATED if tensor.replicated else SHARDED


def _check(config: JobConfig) -> None:
    """Refuse what the table cannot describe; the message names the field and the remedy."""
    model, sizes = config.model, config.parallelism
    stages = sizes.pp * sizes.virtual_stages
    problems = [
        (
            sizes.cp > 1 or sizes.ep > 1,
            "trainer.parallelism.cp and trainer.parallelism.ep must be 1: not built yet",
        ),
        (
            sizes.virtual_stages > 1 and sizes.pp == 1,
            "trainer.parallelism.virtual_stages must be 1 where trainer.parallelism.pp is 1",
        ),
        (
            model.hidden_size % model.heads != 0 and not model.head_dim,
            "trainer.model.hidden_size must be a multiple of trainer.model.heads",
        ),
        (
            model.heads % model.key_value_heads != 0,
            "trainer.model.heads must be a multiple of trainer.model.kv_heads",
        ),
        (
            model.heads % sizes.tp != 0,
            f"trainer.model.heads={model.heads} must be a multiple of "
            f"trainer.parallelism.tp={sizes.tp}",
        ),
        (
            model.key_value_heads % sizes.tp != 0,
            f"trainer.model.kv_heads={model.key_value_heads} must be a multiple of "
            f"trainer.parallelism.tp={sizes.tp}",
        ),
        (
            model.sequence_length % sizes.tp != 0,
            f"trainer.model.sequence_length={model.sequence_length} must be a multiple of "
            f"trainer.parallelism.tp={sizes.tp}",
        ),
        (
            not sizes.stage_layers and model.layers < stages,
            f"trainer.model.layers={model.layers} is too few for "
            f"trainer.parallelism.pp * virtual_stages = {stages}: a virtual stage needs a layer",
        ),
        (
            bool(sizes.stage_layers)
            and (len(sizes.stage_layers) != stages or sum(sizes.stage_layers) != model.layers),
            f"trainer.parallelism.stage_layers must list "
            f"{'1 number that adds' if stages == 1 else f'{stages} numbers that add'} up to "
            f"trainer.model.layers={model.layers}",
        ),
    ]
    for wrong, message in problems:
        if wrong:
            raise ValueError(message)

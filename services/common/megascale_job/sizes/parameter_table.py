"""The parameter table of a rank, computed from the job alone. Pure.

Every process can therefore compute every rank's table. :mod:`megascale_job.blocks` declares the
weights; here they get their places. :func:`shard_layout` is the layout of a rank's optimizer
shard in a snapshot slot.

A :class:`ParameterTable` lists a rank's parameters and their places in its flat buffers.
Initialisation, training, gradient clipping, the optimizer, snapshots and resharding all read it.
*Logical* names (``layers.3.q.weight``) and global shapes never change with the layout; *stored*
tensors are the operands of the GEMMs. A stored tensor can merge several logical parameters: rank
r's input projection has the rows ``[q_r | k_r | v_r | gate_r | up_r]``. Output projections are
stored input-major, ``[attention_r | ffn_r]`` rows by ``hidden`` columns, that is as ``[in, out]``.
So every logical box is a block of whole rows, one contiguous range both in the flat buffer and in
the flattened global parameter, and the merged output projection is still one GEMM.

Note [Flat buffers]
~~~~~~~~~~~~~~~~~~~
A pipeline stage keeps a few flat buffers. ``sharded`` is split over tp. ``replicated`` (norms,
row-parallel biases, learned positions, routers) is whole on every tp rank, and its gradients are
partial sums until they are summed over tp. With tied embeddings the first and the last stage keep
the embedding table in another buffer, ``tied``, and sum its gradients between them. ``experts``
holds this rank's experts, split over ep. ``router`` holds the state of routers in float32, whole on
every tp rank; its gradients are counts.

Each buffer is divided into buckets of whole layers in the order of forward. The ranks that hold the
same part of a buffer, its *group*, own equal, aligned shards of each bucket (ZeRO-2 of MegaScale
section 3.1): cp and dp, and for experts the ranks of the stage with the same experts. All offsets
and sizes here are in elements.

Note [Sums of experts in one order]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The gradient of an expert is a sum over the tokens of all ranks of a stage. With ep, the rows of
several ranks meet in one GEMM; without, the ranks' gradients meet in a reduce-scatter. These are
two orders of the same sum, which differ in the last bits. With ``training.deterministic`` there is
one order for every ep: a rank keeps the gradients of each rank of its ep group apart, and the
owners add up those of all ranks of the stage, in the order of the ranks. The memory of the
gradients is then that of ep 1.

Note [Gather of FP8 weights]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
With ``fp8.parameter_gather: fp8`` the FP8 weights of a bucket (:func:`fp8_weights`) are gathered as
e4m3, one byte per value. The *rest* of the bucket (biases of column-parallel projections; an
embedding, a head or a layer in bf16 in the same bucket) arrives in bf16 by a sum over the
data-parallel ranks, to which each adds the values that it owns. In passes of a ring that moves 4
bytes per value, while an all-gather in bf16 moves 2. So only buckets for which the gather moves
fewer bytes use it (:func:`fp8_buckets`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megascale_job.blocks.ends import embedding_unit, head_unit
from megascale_job.blocks.layer import layer_units
from megascale_job.blocks.parts import Initial, Tensor, Unit
from megascale_job.config import JobConfig, ModelConfig, ParallelismConfig
from megascale_job.layout import Axis, Coordinates, GroupName, RankLayout
from megascale_job.sizes.checkpoint_layout import MASTER, ShardLayout, ShardPiece


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
        """Index of the box's first value in the flattened parameter, as boxes are whole rows."""
        return self.start[0] * math.prod(self.global_shape[1:])

    @property
    def matrix_elements(self) -> int:
        """Number of values of one matrix of the box: of experts each has its own."""
        return self.elements if len(self.global_shape) < 3 else math.prod(self.global_shape[1:])


def align(value: int, multiple: int) -> int:
    """``value`` rounded up to a multiple."""
    return -(-value // multiple) * multiple


def stands_for(at: Coordinates, replicated_over: tuple[Axis, ...]) -> bool:
    """Whether this is the one rank of its group that counts for state replicated over the axes."""
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

    def shard(self, owner: int, owners: int) -> tuple[int, int]:
        """The part of the buffer that rank ``owner`` of the ``owners`` in its group owns."""
        size = (self.stop - self.start) // owners
        return self.start + owner * size, self.start + (owner + 1) * size


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """One flat buffer: its size and its buckets in the order of forward.

    This rank owns the shard number ``owner`` of ``owners``, the ranks of ``group``. ``copies``:
    gradients of so many ranks are kept apart and summed in the order of ranks: see Note [Sums of
    experts in one order]. 0: they are summed as they come.
    """

    name: str
    elements: int
    buckets: tuple[Bucket, ...]
    replicated_over: tuple[Axis, ...]
    group: GroupName
    owner: int
    owners: int
    copies: int = 0

    @property
    def counted(self) -> bool:
        """Whether its gradients count choices of experts; its parameters are in float32."""
        return self.name == ROUTER


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The part of one bucket that this rank owns: ``start:stop`` of ``buffer``.

    It is at ``shard_offset`` of the rank's flat shard.
    """

    buffer: str
    start: int
    stop: int
    shard_offset: int


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """A virtual pipeline stage: some layers, and possibly the embedding or the head.

    ``first``: the embedding is before the layers; ``last``: the head follows them. With P pipeline
    stages, stage p has the virtual stages p, p + P, p + 2 P and so on; without interleaving one.
    """

    layers: range
    first: bool
    last: bool

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units, which buckets do not divide, in the order of forward."""
        layers = (f"layers.{index}" for index in self.layers)
        return (*(("embedding",) if self.first else ()), *layers, *(("head",) if self.last else ()))


@dataclass(frozen=True, slots=True)
class ParameterTable:
    """All parameters of one rank, ``chunks`` in the order of the model.

    No bucket has layers of two chunks.
    """

    at: Coordinates
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
                start, stop = bucket.shard(buffer.owner, buffer.owners)
                found.append(ShardRange(buffer.name, start, stop, offset))
                offset += stop - start
        return tuple(found)

    def stored_in(self, buffer: str, bucket: Bucket) -> list[StoredTensor]:
        """The tensors of a bucket, in the order of the table; each is whole in its bucket."""
        return [
            tensor
            for tensor in self.tensors
            if tensor.buffer == buffer and bucket.start <= tensor.offset < bucket.stop
        ]

    @property
    def shard_elements(self) -> int:
        """Size of the rank's flat shard of one optimizer state, including padding."""
        return sum(buffer.elements // buffer.owners for buffer in self.buffers)

    def overlaps(self) -> Iterator[tuple[ShardRange, ParameterSlice, int, int]]:
        """Every (range, slice, start, stop) with ``start:stop`` in both, in shard order."""
        # A shard of a flat buffer ends anywhere in a parameter, and a bucket's padding belongs to
        # none, so the two lists of intervals are intersected.
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


ALIGNMENT = 64  # elements: 128 bytes of bf16, as wide loads and cuBLAS require
# States of the default optimizer. Driver and agent assume them for every optimizer, because the
# package that declares an optimizer's states is only installed on nodes that train.
DEFAULT_STATES = (MASTER, "exp_avg", "exp_avg_sq")
# Every optimizer state is float32, and so is the gradient buffer, which determines bucket sizes.
STATE_BYTES = 4
SHARDED, REPLICATED, TIED = "sharded", "replicated", "tied"
EXPERTS, ROUTER = "experts", "router"


def parameter_table(config: JobConfig, rank: int) -> ParameterTable:
    """The table of one rank.

    Raises:
        ValueError: a size that the layout does not divide, or a feature that is not built; names
            the field.
    """
    _check(config)
    sizes = config.parallelism
    at = sizes.layout.coordinates(rank)
    chunks = model_chunks(config, at.pp)
    bucket_elements = config.training.bucket_mib * 2**20 // STATE_BYTES
    layout = _Layout(at, sizes.layout, bucket_elements, deterministic=config.training.deterministic)
    layers = layer_units(config.model)
    for chunk in chunks:
        if chunk.first:
            layout.unit("embedding", "", embedding_unit(config.model))
        for index in chunk.layers:
            layout.unit(f"layers.{index}", f"layers.{index}.", layers[index])
        if chunk.last:
            layout.unit("head", "", head_unit(config.model))
        layout.close_buckets()
    return ParameterTable(at, chunks, layout.buffers(), tuple(layout.tensors), tuple(layout.slices))


def matrix_counts(model: ModelConfig) -> dict[str, int]:
    """Number of matrices of each logical parameter by name, in the order of the model.

    It is the same for any layout. A tied parameter is there once. Experts have one matrix each,
    every other parameter counts as one.
    """
    units = [("", embedding_unit(model))]
    units += [(f"layers.{index}.", unit) for index, unit in enumerate(layer_units(model))]
    return {
        f"{prefix}{parameter.name}.{tensor.kind}": (parameter.rows.size if tensor.of_experts else 1)
        for prefix, unit in [*units, ("", head_unit(model))]
        for operator in unit
        for tensor in operator.tensors
        for parameter in tensor.parameters
    }


def model_chunks(config: JobConfig, stage: int) -> tuple[ModelChunk, ...]:
    """The virtual stages of pipeline stage ``stage``, in the order of the model."""
    layers = stage_layers(config)
    last = len(layers) - 1
    held = range(stage, len(layers), config.parallelism.pp)
    return tuple(ModelChunk(layers[number], number == 0, number == last) for number in held)


def stage_layers(config: JobConfig) -> tuple[range, ...]:
    """Layer indices of each virtual stage: ``stage_layers`` if set, else an even split.

    In an even split the first stages get the remainder: the last one also computes the vocabulary
    head, so it never gets an extra layer.
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
    """Size of a whole checkpoint on storage."""
    return sum(parameter_counts(config).values()) * STATE_BYTES * len(DEFAULT_STATES)


def shard_layout(table: ParameterTable, states: Sequence[str] = DEFAULT_STATES) -> ShardLayout:
    """The rank's optimizer states in a slot: the flat shard of each, one after the other.

    ``primary`` is true on exactly one rank for every value: on rank 0 of each axis over which the
    value is replicated.
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
    return ShardLayout(tuple(pieces), slot_bytes(table, states))


def slot_bytes(table: ParameterTable, states: Sequence[str] = DEFAULT_STATES) -> int:
    """Size of the rank's slot: whole pages, because processes share its memory by pages."""
    return align(len(states) * table.shard_elements * STATE_BYTES, 4096)


class _Layout:
    """Gives stored tensors their places in the buffers of the rank ``at``.

    Whole units go to buckets of at most ``limit`` elements; a larger unit has a bucket of its own.
    A tied tensor is alone in its buffer, so that the ranks of both of its stages own the same
    shards.
    """

    def __init__(
        self, at: Coordinates, layout: RankLayout, limit: int, *, deterministic: bool
    ) -> None:
        self._at = at
        self._layout = layout
        self._copies = layout.ep if deterministic else 0
        self._limit = limit
        self._ends = dict.fromkeys((SHARDED, REPLICATED, TIED, EXPERTS, ROUTER), 0)
        self._open: dict[str, list[str]] = {buffer: [] for buffer in self._ends}
        self._buckets: dict[str, list[Bucket]] = {buffer: [] for buffer in self._ends}
        self.tensors: list[StoredTensor] = []
        self.slices: list[ParameterSlice] = []

    def unit(self, name: str, prefix: str, unit: Unit) -> None:
        """Place a unit's tensors, in a new bucket if the open one has not enough room."""
        tensors = [tensor for operator in unit for tensor in operator.tensors]
        for buffer in self._ends:
            mine = [tensor for tensor in tensors if _buffer(tensor) == buffer]
            size = sum(align(tensor.elements(self._layout), ALIGNMENT) for tensor in mine)
            if buffer == TIED and self._ends[TIED]:  # one stage is the first and the last
                size = 0  # the head uses the embedding's tensor
            # Units are never divided: a layer's gradients are complete at one moment of backward,
            # and its bucket can be reduced then.
            if self._ends[buffer] - self._bucket_start(buffer) + size > self._limit:
                self._close_bucket(buffer)
            if mine:
                self._open[buffer].append(name)
            for tensor in mine:
                self._place(prefix, tensor)

    def close_buckets(self) -> None:
        """Close all buckets, so that the next tensors start new ones."""
        for buffer in self._ends:
            self._close_bucket(buffer)

    def buffers(self) -> tuple[BufferPlan, ...]:
        """The buffers, once all buckets are closed; some only if they are used."""
        return tuple(
            BufferPlan(
                buffer,
                end,
                tuple(self._buckets[buffer]),
                self._replicated_over(buffer),
                _group(buffer),
                self._layout.index_in(self._at, _group(buffer)),
                self._owners(buffer),
                self._copies if buffer == EXPERTS else 0,
            )
            for buffer, end in self._ends.items()
            if end or buffer in (SHARDED, REPLICATED)
        )

    def _place(self, prefix: str, tensor: Tensor) -> None:
        buffer = _buffer(tensor)
        if buffer == TIED and self._ends[TIED]:  # one stage is the first and the last
            # Two names for the same place, and no second slice: the parameter is saved once.
            [twin] = [stored for stored in self.tensors if stored.buffer == TIED]
            self.tensors.append(replace(twin, name=f"{prefix}{tensor.name}.{tensor.kind}"))
            return
        start, row = self._ends[buffer], 0
        for parameter in tensor.parameters:
            first, rows = parameter.rows.part(self._at, self._layout)
            # The last ranks can have only padding of a padded extent; then there is no slice, but
            # the stored tensor has the same shape on all ranks.
            if rows:
                self.slices.append(
                    ParameterSlice(
                        name=f"{prefix}{parameter.name}.{tensor.kind}",
                        global_shape=(parameter.rows.size, *tensor.row),
                        start=(first, *(0 for _ in tensor.row)),
                        stop=(first + rows, *tensor.row),
                        replicated_over=self._replicated_over(buffer),
                        buffer=buffer,
                        offset=start + row * math.prod(tensor.row),
                        decay=tensor.decays,
                        initial=parameter.initial,
                        std=parameter.std,
                    )
                )
            row += parameter.rows.local(self._layout)
        name = f"{prefix}{tensor.name}.{tensor.kind}"
        self.tensors.append(StoredTensor(name, (row, *tensor.row), buffer, start))
        self._ends[buffer] = start + align(tensor.elements(self._layout), ALIGNMENT)

    def _replicated_over(self, buffer: str) -> tuple[Axis, ...]:
        if buffer == TIED:
            return ("pp",) if self._layout.pp > 1 else ()
        return ("tp",) if buffer in (REPLICATED, ROUTER) else ()

    def _owners(self, buffer: str) -> int:
        stride, extent = self._layout.span(_group(buffer))
        return extent // stride

    def _bucket_start(self, buffer: str) -> int:
        return self._buckets[buffer][-1].stop if self._buckets[buffer] else 0

    def _close_bucket(self, buffer: str) -> None:
        start = self._bucket_start(buffer)
        if self._ends[buffer] > start:
            # Padded so that the owners' shards are equal, each of whole ALIGNMENT elements.
            multiple = ALIGNMENT * self._owners(buffer)
            stop = start + align(self._ends[buffer] - start, multiple)
            self._buckets[buffer].append(Bucket(start, stop, tuple(self._open[buffer])))
            self._ends[buffer] = stop
            self._open[buffer].clear()


def _buffer(tensor: Tensor) -> str:
    if tensor.tied:
        return TIED
    if tensor.of_experts:
        return EXPERTS
    if tensor.counted:
        return ROUTER
    return REPLICATED if tensor.replicated else SHARDED


def _group(buffer: str) -> GroupName:
    """The ranks that own a buffer's shards."""
    return "expert_gradient" if buffer == EXPERTS else "gradient"


def _check(config: JobConfig) -> None:
    """Refuse what the table cannot describe; the message names the field and the remedy."""
    model, sizes = config.model, config.parallelism
    stages, ranks = sizes.pp * sizes.virtual_stages, sizes.tp * sizes.cp
    product = "trainer.parallelism.tp"
    if sizes.cp > 1:
        product += " * trainer.parallelism.cp"
    problems = [
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
            model.heads % ranks != 0,
            f"trainer.model.heads={model.heads} must be a multiple of {product}={ranks}",
        ),
        (
            model.key_value_heads % ranks != 0,
            f"trainer.model.kv_heads={model.key_value_heads} must be a multiple of "
            f"{product}={ranks}",
        ),
        (
            model.sequence_length % ranks != 0,
            f"trainer.model.sequence_length={model.sequence_length} must be a multiple of "
            f"{product}={ranks}",
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


_MATRICES = "in.weight", "out.weight"
# In bytes; for operands with less alignment cuBLAS has fewer algorithms
# (megascale_kernels.cublas_lt).
OPERAND_ALIGNMENT = 256
_BF16_BYTES, _REST_BYTES = 2, 4  # moved per value, in passes of a ring


@dataclass(frozen=True, slots=True)
class Fp8Bucket:
    """A bucket that is gathered as bytes, and its tensors in the order of their offsets."""

    buffer: str
    bucket: Bucket
    weights: tuple[StoredTensor, ...]
    rest: tuple[StoredTensor, ...]

    @property
    def elements(self) -> int:
        """Size of the bucket, including padding."""
        return self.bucket.stop - self.bucket.start

    @property
    def copied_elements(self) -> int:
        """Number of values in weights that do not arrive aligned, so that the operand is a copy."""
        return elements_of(
            tensor
            for tensor in self.weights
            if (tensor.offset - self.bucket.start) % OPERAND_ALIGNMENT
        )

    @property
    def rest_elements(self) -> int:
        """Size of the rest with each of its tensors aligned."""
        return sum(aligned(math.prod(tensor.shape)) for tensor in self.rest)


def fp8_weights(layers: Iterable[int], table: ParameterTable) -> tuple[StoredTensor, ...]:
    """The rank's matrices in ``layers``, the layers in FP8, without experts of any kind."""
    prefixes = tuple(f"layers.{index}." for index in layers)
    return tuple(
        tensor
        for tensor in table.tensors
        if tensor.buffer == SHARDED
        and tensor.name.startswith(prefixes)
        and tensor.name.endswith(_MATRICES)
        and ".shared_" not in tensor.name
    )


def fp8_expert_weights(layers: Iterable[int], table: ParameterTable) -> tuple[StoredTensor, ...]:
    """The matrices of this rank's experts in ``layers``, the layers in FP8."""
    prefixes = tuple(f"layers.{index}." for index in layers)
    return tuple(
        tensor
        for tensor in table.tensors
        if tensor.buffer == EXPERTS and tensor.name.startswith(prefixes)
    )


def fp8_buckets(config: JobConfig, table: ParameterTable) -> tuple[Fp8Bucket, ...]:
    """The buckets that are gathered as bytes, in the order of the buffers.

    See Note [Gather of FP8 weights]. None without ``parameter_gather: fp8``.
    """
    if not config.gathers_fp8:
        return ()
    weights = {*fp8_weights(config.fp8_layers, table)}
    found = []
    for plan in table.buffers:
        for bucket in plan.buckets:
            stored = table.stored_in(plan.name, bucket)
            travelling = Fp8Bucket(
                plan.name,
                bucket,
                tuple(tensor for tensor in stored if tensor in weights),
                tuple(tensor for tensor in stored if tensor not in weights),
            )
            moved = travelling.elements + _REST_BYTES * travelling.rest_elements
            if moved < _BF16_BYTES * travelling.elements:
                found.append(travelling)
    return tuple(found)


def elements_of(tensors: Iterable[StoredTensor]) -> int:
    """Number of values in all of the tensors."""
    return sum(math.prod(tensor.shape) for tensor in tensors)


def aligned(elements: int) -> int:
    """``elements`` rounded up to the next position at which a tensor of the rest can begin."""
    return align(elements, OPERAND_ALIGNMENT // _BF16_BYTES)

"""The parameter table of a rank, computed from the job alone: pure, so that every process can know
every rank's table.

Also :func:`shard_layout`, the byte image of a rank's optimizer shard in a snapshot slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megascale_common.job.config import JobConfig
from megascale_common.job.rank_layout import Axis
from megascale_common.sizes.checkpoint_layout import ShardLayout, ShardPiece, State
from megascale_common.sizes.parameter_slices import (
    Bucket,
    BufferPlan,
    Initial,
    ModelChunk,
    ParameterSlice,
    ParameterTable,
    StoredTensor,
)

ALIGNMENT = 64  # elements: 128 bytes of bf16, what wide loads and cuBLAS want
WIDTH_MULTIPLE = (
    8  # local FFN and vocabulary widths: bf16 tensor cores want K and N in steps of 16 bytes
)
STATES: tuple[State, ...] = ("master", "exp_avg", "exp_avg_sq")
STATE_BYTES = (
    4  # every optimizer state is float32, and so is the gradient buffer that buckets are sized by
)
SHARDED, REPLICATED = "sharded", "replicated"


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
    layout = _Layout(config.training.bucket_mib * 2**20 // STATE_BYTES, ALIGNMENT * sizes.dp)
    for chunk in chunks:
        builder = _Builder(config, at.tp)
        if chunk.first:
            builder.embedding()
        for index in chunk.layers:
            builder.layer(index)
        if chunk.last:
            builder.head()
        for name, tensors in builder.units:
            layout.unit(name, tensors)
        layout.close_buckets()
    return ParameterTable(
        at, sizes.dp, chunks, layout.buffers(), tuple(layout.tensors), tuple(layout.slices)
    )


def model_chunks(config: JobConfig, stage: int) -> tuple[ModelChunk, ...]:
    """The virtual stages that pipeline stage ``stage`` holds, in the order of the model."""
    layers = stage_layers(config)
    last = len(layers) - 1
    held = range(stage, len(layers), config.parallelism.pp)
    return tuple(ModelChunk(layers[number], number == 0, number == last) for number in held)


def stage_layers(config: JobConfig) -> tuple[range, ...]:
    """Layer indices of each virtual stage: ``stage_layers``, else even with the remainder on the
    first stages.

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


def local_width(size: int, tp: int) -> int:
    """Padded width that each of ``tp`` ranks holds of a dimension of ``size``."""
    return -(-size // (tp * WIDTH_MULTIPLE)) * WIDTH_MULTIPLE


def shard_layout(table: ParameterTable) -> ShardLayout:
    """How the rank's optimizer states lie in a snapshot slot: the flat shard of each of STATES, one
    after the other.

    ``primary`` is true on exactly one rank for every value: tp rank 0 stands for what is replicated
    over tp.
    """
    pieces = []
    for number, state in enumerate(STATES):
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
                    primary=not piece.replicated_over or table.at.tp == 0,
                )
            )
    image_bytes = len(STATES) * table.shard_elements * STATE_BYTES
    return ShardLayout(tuple(pieces), -(-image_bytes // 4096) * 4096)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one logical parameter inside a stored tensor: ``rows`` of them here, padded up to
    ``stored_rows``.
    """

    name: str
    global_rows: int
    first_row: int
    rows: int
    stored_rows: int
    initial: Initial = "normal"
    std: float = 0.0


@dataclass(frozen=True, slots=True)
class _Stored:
    """A stored tensor before it has a place; ``columns`` None makes it a vector."""

    buffer: str
    name: str
    kind: Literal["weight", "bias"]
    parts: list[_Part]
    columns: int | None

    @property
    def elements(self) -> int:
        return sum(part.stored_rows for part in self.parts) * (self.columns or 1)


class _Builder:
    """Lists a chunk's stored tensors, unit by unit (embedding, layers, head) in the order of
    forward.
    """

    def __init__(self, config: JobConfig, tp_rank: int) -> None:
        self._model, self._tp, self._tp_rank = config.model, config.parallelism.tp, tp_rank
        self.units: list[tuple[str, list[_Stored]]] = []

    def embedding(self) -> None:
        """The first stage's tables: token embedding over tp, learned positions whole."""
        model = self._model
        self.units.append(("embedding", []))
        self._tensor(
            SHARDED,
            "embedding.weight",
            [self._padded("embedding", model.vocab_size)],
            model.hidden_size,
        )
        if model.positions == "learned":
            rows = model.sequence_length
            part = _Part("positions", rows, 0, rows, rows, "normal", model.initializer_std)
            self._tensor(REPLICATED, "positions.weight", [part], model.hidden_size)

    def layer(self, index: int) -> None:
        """One transformer layer, parallel block (one merged GEMM in, one out) or serial block."""
        model, prefix = self._model, f"layers.{index}."
        self.units.append((f"layers.{index}", []))
        heads = [self._even(prefix + "q", model.heads)]
        heads += [self._even(prefix + name, model.key_value_heads) for name in ("k", "v")]
        gates = ("gate", "up") if model.mlp == "swiglu" else ("up",)
        widths = [self._padded(prefix + name, model.ffn_width) for name in gates]
        out_std = model.initializer_std / math.sqrt(2 * model.layers)
        attention = self._even(prefix + "attention_out", model.heads, out_std)
        ffn = self._padded(prefix + "ffn_out", model.ffn_width, out_std)
        if model.block == "parallel":
            self._norm(prefix + "norm")
            self._projections(prefix, "", heads + widths, [attention, ffn])
        else:
            self._norm(prefix + "attention_norm")
            self._projections(prefix, "attention_", heads, [attention])
            self._norm(prefix + "ffn_norm")
            self._projections(prefix, "ffn_", widths, [ffn])

    def head(self) -> None:
        """The last stage's final norm and vocabulary head."""
        self.units.append(("head", []))
        self._norm("final_norm")
        self._tensor(
            SHARDED,
            "head.weight",
            [self._padded("head", self._model.vocab_size)],
            self._model.hidden_size,
        )

    def _projections(
        self, prefix: str, kind: str, inputs: list[_Part], outputs: list[_Part]
    ) -> None:
        """Input and output projection of a (sub-)block; biases of outputs are added once, after the
        sum over tp.
        """
        hidden = self._model.hidden_size
        self._tensor(SHARDED, f"{prefix}{kind}in.weight", inputs, hidden)
        if self._model.bias:
            self._tensor(SHARDED, f"{prefix}{kind}in.bias", inputs, None, "bias")
        self._tensor(SHARDED, f"{prefix}{kind}out.weight", outputs, hidden)
        if self._model.bias:
            for part in outputs:
                self._vector(part.name, "bias", "zeros")

    def _norm(self, name: str) -> None:
        self._vector(name, "weight", "ones")
        if self._model.norm == "layernorm" and self._model.norm_bias:
            self._vector(name, "bias", "zeros")

    def _vector(self, name: str, kind: Literal["weight", "bias"], initial: Initial) -> None:
        size = self._model.hidden_size
        self._tensor(
            REPLICATED, f"{name}.{kind}", [_Part(name, size, 0, size, size, initial)], None, kind
        )

    def _even(self, name: str, heads: int, std: float | None = None) -> _Part:
        """``heads`` heads cut evenly over tp (divisibility was checked)."""
        rows = heads * self._model.head_size
        each = rows // self._tp
        std = self._model.initializer_std if std is None else std
        return _Part(name, rows, self._tp_rank * each, each, each, "normal", std)

    def _padded(self, name: str, size: int, std: float | None = None) -> _Part:
        """``size`` rows cut into equal padded widths; the last ranks may hold fewer, or none."""
        width = local_width(size, self._tp)
        first = min(self._tp_rank * width, size)
        std = self._model.initializer_std if std is None else std
        return _Part(name, size, first, min(width, size - first), width, "normal", std)

    def _tensor(
        self,
        buffer: str,
        name: str,
        parts: list[_Part],
        columns: int | None,
        kind: Literal["weight", "bias"] = "weight",
    ) -> None:
        self.units[-1][1].append(_Stored(buffer, name, kind, parts, columns))


class _Layout:
    """Gives stored tensors their places: whole units to buckets of at most ``limit`` elements (or
    one unit).
    """

    def __init__(self, limit: int, bucket_multiple: int) -> None:
        self._limit, self._multiple = limit, bucket_multiple
        self._ends = {SHARDED: 0, REPLICATED: 0}
        self._open: dict[str, list[str]] = {SHARDED: [], REPLICATED: []}
        self._buckets: dict[str, list[Bucket]] = {SHARDED: [], REPLICATED: []}
        self.tensors: list[StoredTensor] = []
        self.slices: list[ParameterSlice] = []

    def unit(self, name: str, tensors: list[_Stored]) -> None:
        """Place a unit's tensors, in a new bucket where the open one has no room for all of them."""
        for buffer in self._ends:
            mine = [tensor for tensor in tensors if tensor.buffer == buffer]
            size = sum(_align(tensor.elements, ALIGNMENT) for tensor in mine)
            if self._ends[buffer] - self._bucket_start(buffer) + size > self._limit:
                self._close_bucket(buffer)
            if mine:
                self._open[buffer].append(name)
            for tensor in mine:
                self._place(tensor)

    def close_buckets(self) -> None:
        """Have what follows start in new buckets."""
        for buffer in self._ends:
            self._close_bucket(buffer)

    def buffers(self) -> tuple[BufferPlan, ...]:
        """Describe both buffers, whose buckets are all closed."""
        return tuple(
            BufferPlan(buffer, end, tuple(self._buckets[buffer]), _replicated_over(buffer))
            for buffer, end in self._ends.items()
        )

    def _place(self, tensor: _Stored) -> None:
        trailing = () if tensor.columns is None else (tensor.columns,)
        start, row = self._ends[tensor.buffer], 0
        for part in tensor.parts:
            initial: Initial = "zeros" if tensor.kind == "bias" else part.initial
            if part.rows:
                self.slices.append(
                    ParameterSlice(
                        name=f"{part.name}.{tensor.kind}",
                        global_shape=(part.global_rows, *trailing),
                        start=(part.first_row, *(0 for _ in trailing)),
                        stop=(part.first_row + part.rows, *trailing),
                        replicated_over=_replicated_over(tensor.buffer),
                        buffer=tensor.buffer,
                        offset=start + row * (tensor.columns or 1),
                        decay=tensor.columns is not None,  # neither norms nor biases decay
                        initial=initial,
                        std=part.std if initial == "normal" else 0.0,
                    )
                )
            row += part.stored_rows
        self.tensors.append(StoredTensor(tensor.name, (row, *trailing), tensor.buffer, start))
        self._ends[tensor.buffer] = start + _align(tensor.elements, ALIGNMENT)

    def _bucket_start(self, buffer: str) -> int:
        return self._buckets[buffer][-1].stop if self._buckets[buffer] else 0

    def _close_bucket(self, buffer: str) -> None:
        start = self._bucket_start(buffer)
        if self._ends[buffer] > start:
            stop = start + _align(self._ends[buffer] - start, self._multiple)
            self._buckets[buffer].append(Bucket(start, stop, tuple(self._open[buffer])))
            self._ends[buffer] = stop
            self._open[buffer].clear()


def _replicated_over(buffer: str) -> tuple[Axis, ...]:
    return ("tp",) if buffer == REPLICATED else ()


def _align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _check(config: JobConfig) -> None:
    """Refuse what the table cannot describe; the message names the field and the remedy."""
    model, sizes = config.model, config.parallelism
    stages = sizes.pp * sizes.virtual_stages
    problems = [
        (
            sizes.cp > 1 or sizes.ep > 1,
            "parallelism.cp and parallelism.ep must be 1: not built yet",
        ),
        (
            sizes.virtual_stages > 1 and sizes.pp == 1,
            "parallelism.virtual_stages must be 1 where parallelism.pp is 1",
        ),
        (
            model.tie_embeddings,
            "model.tie_embeddings must be false: tied embeddings are not built yet",
        ),
        (
            model.hidden_size % model.heads != 0,
            "model.hidden_size must be a multiple of model.heads",
        ),
        (
            model.heads % model.key_value_heads != 0,
            "model.heads must be a multiple of model.kv_heads",
        ),
        (
            model.heads % sizes.tp != 0,
            f"model.heads={model.heads} must be a multiple of parallelism.tp={sizes.tp}",
        ),
        (
            model.key_value_heads % sizes.tp != 0,
            f"model.kv_heads={model.key_value_heads} must be a multiple of parallelism.tp={sizes.tp}",
        ),
        (
            model.sequence_length % sizes.tp != 0,
            f"model.sequence_length={model.sequence_length} must be a multiple of parallelism.tp={sizes.tp}",
        ),
        (
            not sizes.stage_layers and model.layers < stages,
            f"model.layers={model.layers} is too few for parallelism.pp * virtual_stages = {stages}: "
            "a virtual stage needs a layer",
        ),
        (
            bool(sizes.stage_layers)
            and (len(sizes.stage_layers) != stages or sum(sizes.stage_layers) != model.layers),
            f"parallelism.stage_layers must list {stages} numbers that add up to model.layers={model.layers}",
        ),
    ]
    for wrong, message in problems:
        if wrong:
            raise ValueError(message)

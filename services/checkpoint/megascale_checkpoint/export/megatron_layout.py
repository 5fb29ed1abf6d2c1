"""A job's parameters in Megatron-core's GPT model: names, order of rows, cuts. Pure.

Names are those of layers with Transformer Engine, Megatron's default, where the weights of a norm
belong to the projection after it. The order of rows is that of Megatron's own converters
(tools/checkpoint):
- ``linear_qkv`` has its rows by group of heads: the group's queries, its key, its value;
- ``linear_fc1`` has, on each tensor-parallel rank, its gate part and then its up part;
- the vocabulary is padded by repeating its last row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from megascale_checkpoint.export.architectures import EMBEDDING, HEAD
from megascale_checkpoint.export.values import Floats
from megascale_common.service.errors import RequestError, invalid
from megascale_job.config import ModelConfig, RopeScalingConfig

# Megatron has the factor of llama3's scaling as an argument, and its other fields as constants.
ROPE_SCALINGS = (
    RopeScalingConfig(),
    RopeScalingConfig(
        kind="llama3",
        low_frequency_factor=1.0,
        high_frequency_factor=4.0,
        original_sequence_length=8192,
    ),
)
VOCABULARY_MULTIPLE = 128  # Megatron's default of --make-vocab-size-divisible-by
_QKV, _FC1 = "self_attention.linear_qkv", "mlp.linear_fc1"


@dataclass(frozen=True, slots=True)
class Cut:
    """The sizes of the layout that an export is written for."""

    tp: int = 1
    pp: int = 1


@dataclass(frozen=True, slots=True)
class MegatronTensor:
    """One tensor of a pipeline stage.

    Attributes:
        name: in Megatron's model of that stage.
        logical: the job's parameters in it.
        parts: makes each tensor-parallel rank's part from them.
    """

    name: str
    logical: tuple[str, ...]
    parts: Callable[[list[Floats]], list[Floats]]


def padded_vocabulary(model: ModelConfig, tp: int) -> int:
    """Rows of the embedding, as Megatron pads them."""
    multiple = VOCABULARY_MULTIPLE * tp
    return -(-model.vocab_size // multiple) * multiple


def check(model: ModelConfig, cut: Cut) -> None:
    """Raise RequestError, with the field, if Megatron-core has no such model or no such cut."""
    windows = {model.window_of(layer) for layer in range(model.layers)}
    scaling = replace(model.rope_scaling, factor=1.0)
    unfit = [
        ("experts.count", model.experts.count, not model.experts.count, "0: dense models alone"),
        ("block", model.block, model.block == "serial", "serial"),
        ("positions", model.positions, model.positions == "rope", "rope"),
        ("qk_norm_over", model.qk_norm_over, model.qk_norm_over == "heads", "heads"),
        ("layer_windows" if model.layer_windows else "window", max(windows), windows == {0}, "0"),
        ("rope_scaling", model.rope_scaling.kind, scaling in ROPE_SCALINGS, "llama3 as published"),
        # Without biases Megatron computes GELU with the error function, and a job with tanh.
        ("mlp", "gelu without biases", model.mlp == "swiglu" or model.bias, "swiglu, or bias"),
    ]
    wrong = [(name, value, needed) for name, value, fits, needed in unfit if not fits]
    if wrong:
        remedy = "export with --format hf or dcp"
        texts = [
            (
                f"trainer.model.{name}",
                f"{value}, where the export to Megatron-core's GPT needs {needed}; {remedy}",
            )
            for name, value, needed in wrong
        ]
        raise RequestError("; ".join(f"{path}: {text}" for path, text in texts), fields=texts)
    for name, size, of in (
        ("--tp", cut.tp, {"key/value heads": model.key_value_heads, "ffn width": model.ffn_width}),
        ("--pp", cut.pp, {"layers": model.layers}),
    ):
        for what, count in of.items():
            if size < 1 or count % size:
                raise invalid(name, f"{size} does not divide {count} {what}", "give a divisor")


def stage_tensors(
    model: ModelConfig, cut: Cut, stage: int, shapes: dict[str, tuple[int, ...]]
) -> Iterator[MegatronTensor]:
    """The tensors of one pipeline stage; ``shapes`` are those of the job's parameters.

    If the embedding is tied, a last stage that is not also the first has a copy of it.
    """
    layers = model.layers // cut.pp
    if stage == 0:
        yield _vocabulary("embedding.word_embeddings.weight", EMBEDDING, model, cut)
    for local in range(layers):
        yield from _layer(local, f"layers.{stage * layers + local}", model, cut, shapes)
    if stage == cut.pp - 1:
        yield from _norm("decoder.final_layernorm.", "final_norm", model, cut, shapes)
        if not model.tie_embeddings or cut.pp > 1:
            head = EMBEDDING if model.tie_embeddings else HEAD
            yield _vocabulary("output_layer.weight", head, model, cut)


def _layer(
    local: int, logical: str, model: ModelConfig, cut: Cut, shapes: dict[str, tuple[int, ...]]
) -> Iterator[MegatronTensor]:
    prefix, tp, groups = f"decoder.layers.{local}.", cut.tp, model.key_value_heads
    norms = ("attention_norm", f"{_QKV}.layer_norm_"), ("ffn_norm", f"{_FC1}.layer_norm_")
    for name, foreign in norms:
        yield from _norm(prefix + foreign, f"{logical}.{name}", model, cut, shapes)
    gate = ("gate", "up") if model.mlp == "swiglu" else ("up",)
    for name in ("q", "k") if model.qk_norm else ():
        norm = f"{prefix}self_attention.{name}_layernorm."
        yield from _norm(norm, f"{logical}.{name}_norm", model, cut, shapes)
    for kind in ("weight", "bias") if model.bias or model.attention_bias else ("weight",):
        qkv = tuple(f"{logical}.{part}.{kind}" for part in "qkv")
        yield MegatronTensor(
            f"{prefix}{_QKV}.{kind}", qkv, lambda each: _rows(_by_group(each, groups), tp)
        )
    for kind in ("weight", "bias") if model.bias else ("weight",):
        inner = tuple(f"{logical}.{part}.{kind}" for part in gate)
        yield MegatronTensor(f"{prefix}{_FC1}.{kind}", inner, lambda each: _side_by_side(each, tp))
        for name, foreign in (
            ("attention_out", "self_attention.linear_proj"),
            ("ffn_out", "mlp.linear_fc2"),
        ):
            yield MegatronTensor(
                f"{prefix}{foreign}.{kind}",
                (f"{logical}.{name}.{kind}",),
                (lambda each: _columns(each, tp)) if kind == "weight" else _whole(tp),
            )


def _norm(
    foreign: str, logical: str, model: ModelConfig, cut: Cut, shapes: dict[str, tuple[int, ...]]
) -> Iterator[MegatronTensor]:
    """A norm; Megatron's LayerNorm always has a bias, which is zero if the job has none."""
    yield MegatronTensor(f"{foreign}weight", (f"{logical}.weight",), _whole(cut.tp))
    if model.norm == "layernorm":
        if f"{logical}.bias" in shapes:
            yield MegatronTensor(f"{foreign}bias", (f"{logical}.bias",), _whole(cut.tp))
        else:
            zeros = np.zeros(shapes[f"{logical}.weight"], np.float32)
            yield MegatronTensor(f"{foreign}bias", (), lambda each: [zeros] * cut.tp)


def _vocabulary(foreign: str, logical: str, model: ModelConfig, cut: Cut) -> MegatronTensor:
    rows = padded_vocabulary(model, cut.tp)

    def parts(each: list[Floats]) -> list[Floats]:
        (whole,) = each
        last = np.repeat(whole[-1:], rows - len(whole), axis=0)
        return _rows(np.concatenate([whole, last]), cut.tp)

    return MegatronTensor(foreign, (logical,), parts)


def _by_group(each: list[Floats], groups: int) -> Floats:
    """Rows of queries, keys and values, ordered group by group."""
    rest = each[0].shape[1:]
    grouped = [part.reshape(groups, -1, *rest) for part in each]
    return np.concatenate(grouped, axis=1).reshape(-1, *rest)


def _side_by_side(each: list[Floats], tp: int) -> list[Floats]:
    """Each rank's rows of one part, followed by its rows of the next."""
    cuts = [_rows(part, tp) for part in each]
    return [np.concatenate(parts) for parts in zip(*cuts, strict=True)]


def _rows(whole: Floats, tp: int) -> list[Floats]:
    return np.split(whole, tp)


def _columns(each: list[Floats], tp: int) -> list[Floats]:
    """Columns of an output projection, which a job stores as [in, out], Megatron as [out, in]."""
    return [np.ascontiguousarray(part.T) for part in np.split(each[0], tp)]


def _whole(tp: int) -> Callable[[list[Floats]], list[Floats]]:
    """The same whole tensor for every rank."""
    return lambda each: each * tp

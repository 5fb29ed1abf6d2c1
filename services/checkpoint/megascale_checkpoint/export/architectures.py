"""Table of Hugging Face architectures and the models that each can hold; pure, for both directions.

An entry gives the fields of `trainer.model` with which the architecture computes the same function,
the names of its tensors, and the contents of its config.json. To add an architecture, add an entry:
the names of tensors are derived from it here (:func:`transfers`), config.json in
:mod:`megascale_checkpoint.export.foreign_config`.

A job's parameters are whole here: padding of the vocabulary and of the FFN exists only in a rank's
memory, so it is neither exported nor imported.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megascale_common.service.errors import RequestError
from megascale_job.config import ExpertsConfig, JobConfig, ModelConfig, TrainingConfig
from megascale_job.sizes.parameter_table import parameter_table

# Names of a layer's parameters, by logical name, in nearly all architectures.
_ATTENTION = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "attention_out": "self_attn.o_proj",
}
_GATED = {**_ATTENTION, "gate": "mlp.gate_proj", "up": "mlp.up_proj", "ffn_out": "mlp.down_proj"}
_TWO_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_ONE_NORM = {"norm": "input_layernorm"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignExperts:
    """The experts of an architecture: names of their tensors, and fields of config.json.

    Attributes:
        router: name after ``model.layers.N.``; ``gate``, ``up`` and ``down`` are those of an
            expert's matrices, whose number replaces ``{}``.
        counts: the field with the number of experts, under each of its names; the first one is
            written.
        width: the field with the width of one expert.
        normalise: the field that is true if the weights of a token sum to 1; "": they always do.
        dense_layers: the field that lists layers with an ordinary FFN; "": there are none.
    """

    router: str
    gate: str
    up: str
    down: str
    counts: tuple[str, ...]
    width: str
    normalise: str = ""
    dense_layers: str = ""


# Version 5 of transformers merges the experts of a layer in memory, as a job does, and saves them
# so with save_original_format=False. These names are the same in all architectures.
_MERGED = {
    "router.weight": "mlp.gate.weight",
    "experts_in.weight": "mlp.experts.gate_up_proj",
    "experts_out.weight": "mlp.experts.down_proj",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One architecture of `transformers`.

    Attributes:
        name: its class there; ``model_type`` its name in config.json.
        needs: fields of trainer.model, each with the only value that fits.
        layer_names: names after ``model.layers.N.``, by logical name.
        epsilon: the name of norm_epsilon in config.json.
        activations: values of hidden_act that fit; the first one is written.
        windows: ``none``: full attention; ``uniform``: one window for all layers; ``mixed``: each
            layer has that window or none.
        head_dim: True if the width of a head can differ from hidden_size / heads.
        bias: of projections; ``set``: as ``bias_fields`` of config.json say.
        bias_fields: these fields, each with the architecture's default.
        norm_bias: True if norms have a bias; ``head_bias``: if the head has one.
        rotation: columns of a head that rotary embedding turns together: ``halves`` as in a job,
            (i, i + d/2), or ``pairs``, (2 i, 2 i + 1).
        experts: the experts in place of the FFN; None: the architecture is dense.
        fixed: further fields of config.json, each with the only value that fits.
        absent: the values of fields that a config.json leaves out.
    """

    name: str
    model_type: str
    needs: Mapping[str, Any]
    layer_names: Mapping[str, str]
    epsilon: str
    final_norm: str = "model.norm"
    activations: tuple[str, ...] = ("silu", "swish")
    windows: Literal["none", "uniform", "mixed"] = "none"
    head_dim: bool = False
    bias: Literal["none", "set", "always"] = "none"
    bias_fields: Mapping[str, bool] = field(default_factory=dict)
    norm_bias: bool = False
    head_bias: bool = False
    rotation: Literal["halves", "pairs"] = "halves"
    experts: ForeignExperts | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    absent: Mapping[str, Any] = field(default_factory=dict)


_QK_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_COUNT = "experts.count"
# Fields of trainer.model that must be at their defaults unless an architecture needs others.
_PLAIN = {"attention_bias": False, "qk_norm": False, "qk_norm_over": "heads"}
_HEADS_ALIKE = {"num_key_value_heads": None}  # as many as query heads
_LLAMA_LIKE = {"block": "serial", "mlp": "swiglu", "norm": "rmsnorm"}
_GELU = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")  # three names of the tanh form

# Exports use the first one that fits.
ARCHITECTURES = (
    Architecture(
        name="LlamaForCausalLM",
        model_type="llama",
        needs=_LLAMA_LIKE,
        layer_names={**_GATED, **_TWO_NORMS},
        epsilon="rms_norm_eps",
        head_dim=True,
        bias="set",
        bias_fields={"attention_bias": False, "mlp_bias": False},
        absent={**_HEADS_ALIKE, "rope_theta": 10_000.0},
    ),
    Architecture(
        name="MistralForCausalLM",
        model_type="mistral",
        needs=_LLAMA_LIKE,
        layer_names={**_GATED, **_TWO_NORMS},
        epsilon="rms_norm_eps",
        windows="uniform",
        head_dim=True,
        absent={"sliding_window": 4096},
    ),
    Architecture(
        name="MinistralForCausalLM",
        model_type="ministral",
        needs=_LLAMA_LIKE,
        layer_names={**_GATED, **_TWO_NORMS},
        epsilon="rms_norm_eps",
        windows="mixed",
        head_dim=True,
        absent={"sliding_window": 4096},
    ),
    Architecture(
        name="Qwen2ForCausalLM",
        model_type="qwen2",
        needs={**_LLAMA_LIKE, "attention_bias": True},
        layer_names={**_GATED, **_TWO_NORMS},
        epsilon="rms_norm_eps",
        fixed={"use_sliding_window": False},
        absent={**_HEADS_ALIKE, "rope_theta": 10_000.0, "use_sliding_window": False},
    ),
    Architecture(
        name="Qwen3ForCausalLM",
        model_type="qwen3",
        needs={**_LLAMA_LIKE, "qk_norm": True},
        layer_names={**_GATED, **_TWO_NORMS, **_QK_NORMS},
        epsilon="rms_norm_eps",
        head_dim=True,
        fixed={"use_sliding_window": False, "attention_bias": False},
        absent={
            "rope_theta": 10_000.0,
            "use_sliding_window": False,
            "attention_bias": False,
            "head_dim": 128,
        },
    ),
    Architecture(
        name="MixtralForCausalLM",
        model_type="mixtral",
        needs=_LLAMA_LIKE,
        layer_names={**_ATTENTION, **_TWO_NORMS},
        epsilon="rms_norm_eps",
        windows="uniform",
        head_dim=True,
        experts=ForeignExperts(
            router="block_sparse_moe.gate",
            gate="block_sparse_moe.experts.{}.w1",
            up="block_sparse_moe.experts.{}.w3",
            down="block_sparse_moe.experts.{}.w2",
            counts=("num_local_experts",),
            width="intermediate_size",
        ),
        fixed={"router_jitter_noise": 0.0},
        absent={"rope_theta": 1_000_000.0, "router_jitter_noise": 0.0},
    ),
    Architecture(
        name="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        needs={**_LLAMA_LIKE, "qk_norm": True},
        layer_names={**_GATED, **_TWO_NORMS, **_QK_NORMS},
        epsilon="rms_norm_eps",
        head_dim=True,
        experts=ForeignExperts(
            router="mlp.gate",
            gate="mlp.experts.{}.gate_proj",
            up="mlp.experts.{}.up_proj",
            down="mlp.experts.{}.down_proj",
            counts=("num_experts", "num_local_experts"),
            width="moe_intermediate_size",
            normalise="norm_topk_prob",
            dense_layers="mlp_only_layers",
        ),
        fixed={"use_sliding_window": False, "attention_bias": False, "decoder_sparse_step": 1},
        absent={
            "rope_theta": 10_000.0,
            "use_sliding_window": False,
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "norm_topk_prob": False,
        },
    ),
    Architecture(
        name="OlmoeForCausalLM",
        model_type="olmoe",
        needs={**_LLAMA_LIKE, "qk_norm": True, "qk_norm_over": "projection"},
        layer_names={**_ATTENTION, **_TWO_NORMS, **_QK_NORMS},
        epsilon="rms_norm_eps",
        experts=ForeignExperts(
            router="mlp.gate",
            gate="mlp.experts.{}.gate_proj",
            up="mlp.experts.{}.up_proj",
            down="mlp.experts.{}.down_proj",
            counts=("num_experts", "num_local_experts"),
            width="intermediate_size",
            normalise="norm_topk_prob",
        ),
        fixed={"attention_bias": False, "clip_qkv": None},
        absent={
            **_HEADS_ALIKE,
            "rope_theta": 10_000.0,
            "attention_bias": False,
            "norm_topk_prob": False,
        },
    ),
    Architecture(
        name="CohereForCausalLM",
        model_type="cohere",
        needs={"block": "parallel", "mlp": "swiglu", "norm": "layernorm"},
        layer_names={**_GATED, **_ONE_NORM},
        epsilon="layer_norm_eps",
        rotation="pairs",
        fixed={"use_qk_norm": False, "attention_bias": False},
        absent={**_HEADS_ALIKE, "use_qk_norm": False, "attention_bias": False},
    ),
    Architecture(
        name="StableLmForCausalLM",
        model_type="stablelm",
        needs={"block": "parallel", "mlp": "swiglu", "norm": "layernorm"},
        layer_names={**_GATED, **_ONE_NORM},
        epsilon="layer_norm_eps",
        norm_bias=True,
        fixed={
            "use_parallel_residual": True,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "partial_rotary_factor": 1.0,
        },
        absent={
            "use_parallel_residual": False,
            "use_qkv_bias": False,
            "qk_layernorm": False,
            "partial_rotary_factor": 0.25,
        },
    ),
    Architecture(
        name="PhiForCausalLM",
        model_type="phi",
        needs={"block": "parallel", "mlp": "gelu", "norm": "layernorm"},
        layer_names={
            **_ATTENTION,
            **_ONE_NORM,
            "attention_out": "self_attn.dense",
            "up": "mlp.fc1",
            "ffn_out": "mlp.fc2",
        },
        epsilon="layer_norm_eps",
        final_norm="model.final_layernorm",
        activations=("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
        bias="always",
        norm_bias=True,
        head_bias=True,
        fixed={"qk_layernorm": False, "partial_rotary_factor": 1.0},
        absent={**_HEADS_ALIKE, "qk_layernorm": False, "partial_rotary_factor": 0.5},
    ),
    Architecture(
        name="Starcoder2ForCausalLM",
        model_type="starcoder2",
        needs={"block": "serial", "mlp": "gelu", "norm": "layernorm"},
        layer_names={**_ATTENTION, **_TWO_NORMS, "up": "mlp.c_fc", "ffn_out": "mlp.c_proj"},
        epsilon="norm_epsilon",
        activations=_GELU,
        windows="uniform",
        bias="set",
        bias_fields={"use_bias": True},
        norm_bias=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Misfit:
    """Why an architecture cannot hold a model: a field of trainer.model and its needed value."""

    field: str
    value: object
    needed: str

    def __str__(self) -> str:
        return f"{self.field} is {self.value} where it needs {self.needed}"


def misfits(architecture: Architecture, model: ModelConfig) -> list[Misfit]:
    """Every field of trainer.model that ``architecture`` cannot represent."""
    found = [
        Misfit(name, getattr(model, name), str(needed).lower())
        for name, needed in architecture.needs.items()
        if getattr(model, name) != needed
    ]
    found += [
        Misfit(name, str(getattr(model, name)).lower(), str(plain).lower())
        for name, plain in _PLAIN.items()
        # Biases on all projections include those of q, k and v.
        if getattr(model, name) != plain
        and name not in architecture.needs
        and not (name == "attention_bias" and model.bias)
    ]
    if model.tie_embeddings and architecture.head_bias:
        found.append(Misfit("tie_embeddings", "true", "false"))
    if model.head_size * model.heads != model.hidden_size and not architecture.head_dim:
        found.append(Misfit("head_dim", model.head_dim, "hidden_size / heads"))
    if model.positions != "rope":
        found.append(Misfit("positions", model.positions, "rope"))
    if model.bias and architecture.bias == "none":
        found.append(Misfit("bias", "true", "false"))
    if model.norm == "layernorm" and model.norm_bias and not architecture.norm_bias:
        found.append(Misfit("norm_bias", "true", "false"))
    windows = {model.window_of(layer) for layer in range(model.layers)}
    name = "layer_windows" if model.layer_windows else "window"
    shown = list(model.layer_windows) or model.window
    if architecture.windows == "none" and windows != {0}:
        found.append(Misfit(name, shown, "0"))
    elif architecture.windows == "uniform" and len(windows) > 1:
        found.append(Misfit(name, shown, "one window for all layers"))
    elif architecture.windows == "mixed" and len(windows - {0}) > 1:
        found.append(Misfit(name, shown, "one window, or 0, for each layer"))
    return [*_misfits_of_experts(architecture.experts, model.experts), *found]


def _misfits_of_experts(foreign: ForeignExperts | None, experts: ExpertsConfig) -> Iterator[Misfit]:
    if foreign is None or not experts.count:
        if bool(experts.count) != (foreign is not None):
            yield Misfit(_COUNT, experts.count, "0" if foreign is None else "1 or more")
        return
    # A bias of the router decides which experts compute a token, so it cannot be left out.
    needs: dict[str, Any] = {"score": "softmax", "scale": 1.0, "groups": 1}
    needs |= {"shared_ffn_size": 0, "bias_rate": 0.0}
    needs |= {} if foreign.normalise else {"normalise": True}
    needs |= {} if foreign.dense_layers else {"dense_layers": 0}
    for name, needed in needs.items():
        value = getattr(experts, name)
        if value != needed:
            yield Misfit(f"experts.{name}", str(value).lower(), str(needed).lower())


def choose(model: ModelConfig) -> Architecture:
    """The architecture that holds ``model``.

    Raises:
        RequestError: none does; names the fields in which the nearest architecture differs.
    """
    fitting = next((each for each in ARCHITECTURES if not misfits(each, model)), None)
    if fitting is not None:
        return fitting
    # Of several equally near ones the last, because the first ones can hold fewer models.
    nearest = min(reversed(ARCHITECTURES), key=lambda each: _distance(each, model))
    wrong = misfits(nearest, model)
    remedy = "export with --format dcp, which holds any model"
    fields = [
        (
            f"trainer.model.{each.field}",
            f"{each.value}, where the nearest Hugging Face architecture, {nearest.name}, needs "
            f"{each.needed}",
        )
        for each in wrong
    ]
    raise RequestError(
        "; ".join([*(f"{path}: {problem}" for path, problem in fields), remedy]),
        fields=[(path, f"{problem}; {remedy}") for path, problem in fields],
    )


def _distance(architecture: Architecture, model: ModelConfig) -> tuple[bool, bool, bool, int]:
    """Number of misfits; experts, the block, then the FFN count most: users change them last."""
    wrong = [each.field for each in misfits(architecture, model)]
    return _COUNT in wrong, "block" in wrong, "mlp" in wrong, len(wrong)


Change = Literal["none", "transposed", "pairs"]
HEAD = "head.weight"
EMBEDDING = "embedding.weight"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor of a Hugging Face model, and the parameter of a job that it corresponds to.

    Attributes:
        foreign: its name in the Hugging Face files; ``shape`` is its shape there.
        logical: the job's parameter; "" if the job has none, and the tensor is all zeros.
        change: ``transposed``: the job stores output projections as [in, out]; ``pairs``: the rows
            of each head have another order, because rotary embedding turns pairs of them.
        at: the index of its first value in the flattened parameter, of which it is a part; None:
            it is all of it. The experts of a layer are one parameter of a job.
    """

    foreign: str
    shape: tuple[int, ...]
    logical: str
    change: Change
    at: int | None = None

    @property
    def elements(self) -> int:
        """Number of its values."""
        return math.prod(self.shape)


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Global shape of every parameter of ``model``, in the model's order.

    Raises:
        RequestError: no layout can hold the model; names the field.
    """
    job = JobConfig(
        name="model", model=model, training=TrainingConfig(steps=1, global_batch_size=1)
    )
    try:
        table = parameter_table(job, 0)
    except ValueError as error:
        raise RequestError(str(error)) from error
    return {piece.name: piece.global_shape for piece in table.slices}


def check_model(stored: Mapping[str, tuple[int, ...]], model: ModelConfig) -> None:
    """Raise RequestError if the checkpoint's parameters are not those of ``model``."""
    wanted = parameter_shapes(model)
    for name in sorted({*wanted, *stored}):
        here, there = wanted.get(name), stored.get(name)
        if here != there:
            raise RequestError(
                f"--job: {name} is {_shown(there)} in the checkpoint and {_shown(here)} in the "
                "model; give the file of the job that wrote it"
            )


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"


def transfers(
    architecture: Architecture, model: ModelConfig, *, merged: bool = False
) -> tuple[Transfer, ...]:
    """Every tensor of the architecture's files, in the model's order.

    ``merged``: the experts of a layer are merged, as version 5 of transformers can save them.
    """
    found: list[Transfer] = []
    for name, shape in parameter_shapes(model).items():
        if is_state(name):
            continue
        short = name.split(".", 2)[-1]
        if merged and short in _MERGED:
            found.append(Transfer(_in_layer(name, _MERGED[short]), shape, name, "none"))
        elif short in _MERGED and architecture.experts is not None:
            found += _of_experts(architecture.experts, name, shape)
        else:
            found.append(_transfer(architecture, name, shape))
    names = {each.foreign for each in found}
    # Biases that the architecture has and the job lacks are written as zeros.
    zeros = [each for each in _biases(architecture, found) if each.foreign not in names]
    return (*found, *zeros)


def is_merged(names: Container[str], model: ModelConfig) -> bool:
    """Whether files with tensors of these ``names`` hold the experts of a layer merged."""
    layers = range(model.experts.dense_layers, model.layers if model.experts.count else 0)
    return any(f"model.layers.{layer}.{_MERGED['experts_in.weight']}" in names for layer in layers)


def is_state(name: str) -> bool:
    """Whether a job's parameter is a count of its router, which no other software has."""
    return name.endswith(".router.load")


def _of_experts(names: ForeignExperts, logical: str, shape: tuple[int, ...]) -> Iterator[Transfer]:
    """The router, or every expert's tensors: rows of gate, then of up, and the output."""
    _, _, short, _ = logical.split(".")
    if short == "router":
        yield Transfer(_in_layer(logical, f"{names.router}.weight"), shape, logical, "none")
        return
    count, rows, columns = shape
    parts = (names.gate, names.up) if short == "experts_in" else (names.down,)
    part = (rows // len(parts), columns)
    for number in range(count * len(parts)):
        expert, which = divmod(number, len(parts))
        foreign = _in_layer(logical, f"{parts[which].format(expert)}.weight")
        yield Transfer(foreign, part, logical, "none", at=number * math.prod(part))


def _in_layer(logical: str, name: str) -> str:
    """``name`` in the layer of a job's parameter."""
    return f"model.layers.{logical.split('.')[1]}.{name}"


def _transfer(architecture: Architecture, name: str, shape: tuple[int, ...]) -> Transfer:
    parameter, _, kind = name.rpartition(".")
    change: Change = "none"
    if parameter.startswith("layers."):
        _, _, short = parameter.split(".")
        foreign = _in_layer(name, architecture.layer_names[short])
        if short in ("attention_out", "ffn_out") and kind == "weight":
            change, shape = "transposed", shape[::-1]
        elif short in ("q", "k") and architecture.rotation == "pairs":
            change = "pairs"
    else:
        foreign = {
            "embedding": "model.embed_tokens",
            "final_norm": architecture.final_norm,
            "head": "lm_head",
        }[parameter]
    return Transfer(f"{foreign}.{kind}", shape, name, change)


def _biases(architecture: Architecture, weights: list[Transfer]) -> Iterator[Transfer]:
    """Every bias that the architecture always has, as zeros."""
    for weight in weights:
        if not weight.logical.endswith(".weight") or weight.logical == EMBEDDING:
            continue
        if weight.logical == HEAD:
            has = architecture.head_bias
        elif len(weight.shape) == 1:
            has = architecture.norm_bias
        else:
            has = architecture.bias == "always"
        if has:
            foreign = weight.foreign.removesuffix("weight") + "bias"
            yield Transfer(foreign, weight.shape[:1], "", "none")

"""config.json of a Hugging Face model: from a job's model, and back. Pure.

Every field is written out, so that no reader fills in a default of the architecture. Ids of special
tokens come from the tokenizer and are null here, because a wrong end token would cut texts short.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megascale_checkpoint.export.architectures import (
    ARCHITECTURES,
    Architecture,
    ForeignExperts,
)
from megascale_common.service.errors import RequestError, invalid
from megascale_job.config import (
    ExpertsConfig,
    ModelConfig,
    RopeScalingConfig,
    rotation_problems,
)
from megascale_job.sections.fields import bound_problems
from megascale_job.visible import counted

_ORIGINAL = "original_max_position_embeddings"
_LLAMA3 = {
    "low_frequency_factor": "low_freq_factor",
    "high_frequency_factor": "high_freq_factor",
    "original_sequence_length": _ORIGINAL,
}

# Fields of yarn, which transformers knows by the same names; None and 0 stand for these numbers.
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
# Fields of yarn that other readers know, and the values that change nothing.
_YARN_FIXED = {"truncate": True, "attn_factor": 1.0, "extrapolation_factor": 1.0}

MOST = 1e300  # of a number in config.json, which a float holds
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# Names of the same field: since version 5 of transformers, and before, with rope_theta at the root.
_ROPE, _OLD_ROPE = "rope_parameters", "rope_scaling"
_FFN_WIDTH = "intermediate_size"
_TOP_K, _BALANCE = "num_experts_per_tok", "router_aux_loss_coef"


@dataclass(frozen=True, slots=True)
class ForeignModel:
    """A Hugging Face model that a job can train.

    ``head_scale`` multiplies the head's weights, because a job has no scale of logits. ``copied``:
    the head shares the embedding's table but has such a scale, so the job needs a scaled copy.
    ``global_balance``: of trainer.loss, the coefficient of the balance of experts; 0: none.
    """

    architecture: Architecture
    model: ModelConfig
    head_scale: float
    copied: bool
    global_balance: float = 0.0


def config_values(architecture: Architecture, model: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json for ``model``; ``dtype`` is bf16 or fp32."""
    rope = _rope_values(model)
    if "partial_rotary_factor" in architecture.fixed:
        rope["partial_rotary_factor"] = architecture.fixed["partial_rotary_factor"]
    values = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        _FFN_WIDTH: model.ffn_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.key_value_heads,
        "head_dim": model.head_size,
        "hidden_act": architecture.activations[0],
        "max_position_embeddings": model.sequence_length,
        "initializer_range": model.initializer_std,
        architecture.epsilon: model.norm_epsilon,
        "rope_theta": model.rope_theta,
        _ROPE: rope,
        # Its name before version 5 of transformers.
        **({"rope_scaling": rope} if model.rope_scaling.kind != "none" else {}),
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attention_dropout": 0.0,
        "use_cache": True,
        # Both names: "dtype" since version 4.56 of transformers.
        "dtype": DTYPES[dtype],
        "torch_dtype": DTYPES[dtype],
        **architecture.fixed,
        **dict.fromkeys(architecture.bias_fields, model.bias),
        **_window_values(architecture, model),
        **_expert_values(architecture.experts, model),
    }
    if architecture.model_type == "cohere":
        values["logit_scale"] = 1.0
    return values


def _rope_values(model: ModelConfig) -> dict[str, Any]:
    scaling = model.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if scaling.kind != "none":
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        rope |= {foreign: getattr(scaling, name) for name, foreign in _LLAMA3.items()}
    if scaling.kind == "yarn":
        rope |= {name: getattr(scaling, name) for name in _YARN}
        rope[_ORIGINAL] = scaling.original_sequence_length
        # Left out, all readers compute the paper's; not all of them know the field.
        if scaling.attention_factor:
            rope["attention_factor"] = scaling.attention_factor
    return rope


def _window_values(architecture: Architecture, model: ModelConfig) -> dict[str, Any]:
    if architecture.windows == "none":
        return {}
    windows = [model.window_of(layer) for layer in range(model.layers)]
    values: dict[str, Any] = {"sliding_window": max(windows) or None}
    if architecture.windows == "mixed":
        values["layer_types"] = [
            "sliding_attention" if window else "full_attention" for window in windows
        ]
    return values


def _expert_values(foreign: ForeignExperts | None, model: ModelConfig) -> dict[str, Any]:
    if foreign is None:
        return {}
    values: dict[str, Any] = {
        foreign.counts[0]: model.experts.count,
        foreign.width: model.expert_width,
        _TOP_K: model.experts.top_k,
        "output_router_logits": False,
        # A checkpoint does not record the job's losses: this is the default of transformers, which
        # has no effect unless the logits of routers are asked for.
        _BALANCE: 0.001,
    }
    if foreign.normalise:
        values[foreign.normalise] = model.experts.normalise
    if foreign.dense_layers:
        values[foreign.dense_layers] = list(range(model.experts.dense_layers))
    return values


def read_config(values: Mapping[str, Any], *, head_stored: bool) -> ForeignModel:
    """The model that config.json describes; ``head_stored``: the files have a tensor lm_head.

    Raises:
        RequestError: a job cannot compute it; names the field of config.json.
    """
    model_type = values.get("model_type")
    found = next((each for each in ARCHITECTURES if each.model_type == model_type), None)
    if found is None:
        known = ", ".join(each.model_type for each in ARCHITECTURES)
        raise invalid(
            "config.json: model_type",
            f"{model_type!r} cannot be imported",
            f"give a model of one of these: {known}",
        )
    rope = _rope(found, values)
    # Later ones win: the architecture's defaults, the file's fields, the fields of rotary
    # embedding.
    values = {**found.absent, **values, **rope}
    _check_fixed(found, values)
    cohere = model_type == "cohere"
    heads, hidden = _whole(values, "num_attention_heads"), _whole(values, "hidden_size")
    head_dim = hidden // heads if values.get("head_dim") is None else _whole(values, "head_dim")
    alike = head_dim * heads == hidden
    _need("head_dim", head_dim, alike or found.head_dim, f"hidden_size / heads, {hidden}/{heads}")
    layers = _whole(values, "num_hidden_layers")
    window, layer_windows = _windows(found, values, layers)
    scale = _number({"logit_scale": 0.0625, **values}, "logit_scale") if cohere else 1.0
    # Versions of transformers differ in what an absent field means, so the files decide.
    tied = _truth({"tie_word_embeddings": not head_stored, **values}, "tie_word_embeddings")
    model = ModelConfig(
        layers=layers,
        hidden_size=hidden,
        heads=heads,
        vocab_size=_whole(values, "vocab_size"),
        sequence_length=_whole(values, "max_position_embeddings"),
        ffn_size=_whole(values, _FFN_WIDTH),
        kv_heads=_key_value_heads(values, heads),
        bias=_bias(found, values),
        norm_bias=found.norm_bias or found.needs["norm"] == "rmsnorm",  # the default: of no effect
        rope_theta=_number(values, "rope_theta"),
        rope_scaling=_rope_scaling(rope),
        head_dim=0 if alike else head_dim,
        tie_embeddings=tied and scale == 1.0,
        window=window,
        layer_windows=layer_windows,
        norm_epsilon=_number(values, found.epsilon),
        initializer_std=_number({"initializer_range": 0.02, **values}, "initializer_range"),
        experts=_experts(found.experts, values, layers),
        **found.needs,  # block, mlp, norm, and fields that are on
    )
    for problem in (*bound_problems(model.rope_scaling, ""), *rotation_problems(model)):
        name = problem.field.rpartition(".")[2]
        raise invalid(f"config.json: {_LLAMA3.get(name, name)}", problem.problem, problem.remedy)
    balance = _number({_BALANCE: 0.0, **values}, _BALANCE) if found.experts else 0.0
    _need(_BALANCE, balance, balance >= 0, "0 or more")
    return ForeignModel(found, model, scale, tied and scale != 1.0, balance)


def _check_fixed(architecture: Architecture, values: Mapping[str, Any]) -> None:
    for name, needed in architecture.fixed.items():
        value = values.get(name)
        _need(name, value, value == needed, "null" if needed is None else repr(needed))
    activation = values.get("hidden_act", architecture.activations[0])
    choices = " or ".join(dict.fromkeys(architecture.activations))
    _need("hidden_act", activation, activation in architecture.activations, choices)
    quantized = values.get("quantization_config")
    _need("quantization_config", "set", quantized is None, "to be absent: unquantized weights")


def _rope(architecture: Architecture, values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of rotary embedding, from the place from which transformers takes them.

    If both exist, rope_scaling replaces rope_parameters. Version 5 reads fields that it lacks from
    the root, and else takes the architecture's default. Earlier versions have rope_theta at the
    root, so values in several places must agree.
    """
    given = {name: values[name] for name in (_ROPE, _OLD_ROPE) if values.get(name) is not None}
    for name, fields in given.items():
        flat = isinstance(fields, dict) and not any(isinstance(v, dict) for v in fields.values())
        _need(name, fields, flat, "one object for all layers")
    chosen: dict[str, Any] = dict(given.get(_OLD_ROPE) or given.get(_ROPE) or {})
    for name in ("rope_theta", "partial_rotary_factor", _ORIGINAL):
        places = (values, *given.values())
        found = [each[name] for each in places if each.get(name) is not None]
        if any(other != found[0] for other in found):
            raise invalid(
                f"config.json: {name}",
                f"{' and '.join(map(repr, found))} in {' and '.join(('the root', *given))}: "
                "versions of transformers differ in which of them they take",
                "leave the one that the model was trained with",
            )
        if name not in chosen and name in {**architecture.absent, **values}:
            chosen[name] = {**architecture.absent, **values}[name]
        elif name not in chosen and found:
            raise invalid(
                f"config.json: {name}",
                f"only in {_ROPE}, which transformers ignores in favour of {_OLD_ROPE}",
                f"put it into {_OLD_ROPE}, or remove one of the two",
            )
    return chosen


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScalingConfig:
    kind = rope.get("rope_type", rope.get("type", "default"))
    known = ("default", "linear", "llama3", "yarn")
    _need("rope_type", kind, kind in known, "default, linear, llama3 or yarn")
    part = rope.get("partial_rotary_factor", 1.0)
    _need("partial_rotary_factor", part, part in (None, 1.0), "1.0")
    if kind == "default":
        return RopeScalingConfig()
    if kind == "linear":
        return RopeScalingConfig(kind="linear", factor=_number(rope, "factor"))
    if kind == "yarn":
        return _yarn(rope)
    return RopeScalingConfig(
        kind="llama3",
        factor=_number(rope, "factor"),
        low_frequency_factor=_number(rope, "low_freq_factor"),
        high_frequency_factor=_number(rope, "high_freq_factor"),
        original_sequence_length=_whole(rope, _ORIGINAL),
    )


def _yarn(rope: Mapping[str, Any]) -> RopeScalingConfig:
    for name, neutral in _YARN_FIXED.items():
        value = neutral if rope.get(name) is None else rope[name]
        _need(name, value, value == neutral, repr(neutral))
    given = {name: value for name, value in rope.items() if value is not None}
    betas = {name: _number({**_YARN, **given}, name) or usual for name, usual in _YARN.items()}
    factor = _number(rope, "factor")
    _need("factor", factor, factor >= 1, "1 or more")  # before its logarithm
    return RopeScalingConfig(
        kind="yarn",
        factor=factor,
        original_sequence_length=_whole(rope, _ORIGINAL),
        attention_factor=_attention_factor(given, factor),
        **betas,
    )


def _attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """That of the job: 0 if the file leaves it to the paper."""
    if "attention_factor" in given:
        found = _number(given, "attention_factor")
        _need("attention_factor", found, found > 0, "a number above 0, or none")
        return found
    # DeepSeek's quotient, which counts only if both are there.
    scales = [_number({name: 0, **given}, name) for name in ("mscale", "mscale_all_dim")]
    for name, scale in zip(("mscale", "mscale_all_dim"), scales, strict=True):
        _need(name, scale, scale >= 0, "0 or more")
    if not all(scales):
        return 0.0
    above, below = (0.1 * scale * math.log(factor) + 1.0 for scale in scales)
    return above / below


def _key_value_heads(values: Mapping[str, Any], heads: int) -> int:
    if values.get("num_key_value_heads", 0) is None:
        return heads
    return _whole(values, "num_key_value_heads")


def _experts(
    foreign: ForeignExperts | None, values: Mapping[str, Any], layers: int
) -> ExpertsConfig:
    if foreign is None:
        return ExpertsConfig()
    count = _count_of_experts(foreign, values)
    top_k = _whole(values, _TOP_K)
    _need(_TOP_K, top_k, top_k <= count, f"at most {foreign.counts[0]}, {count}")
    dense = 0
    if foreign.dense_layers:
        # None and [] mean the same.
        given = values.get(foreign.dense_layers) or []
        first = isinstance(given, list) and sorted(map(repr, given)) == sorted(
            map(repr, range(len(given)))
        )
        _need(foreign.dense_layers, given, first, "the first layers, such as [0, 1], or none")
        dense = len(given)
        _need(foreign.dense_layers, given, dense < layers, f"fewer than {counted(layers, 'layer')}")
    return ExpertsConfig(
        count=count,
        top_k=top_k,
        # With the width of the FFN's own field there is no other FFN in the model.
        ffn_size=0 if foreign.width == _FFN_WIDTH else _whole(values, foreign.width),
        dense_layers=dense,
        normalise=_truth(values, foreign.normalise) if foreign.normalise else True,
    )


def _count_of_experts(foreign: ForeignExperts, values: Mapping[str, Any]) -> int:
    given = [name for name in foreign.counts if values.get(name) is not None]
    found = {_whole(values, name) for name in given or foreign.counts[:1]}
    shown = [values.get(name) for name in given]
    _need(", ".join(given), shown, len(found) == 1, "one number of experts")
    return found.pop()


def _bias(architecture: Architecture, values: Mapping[str, Any]) -> bool:
    if architecture.bias != "set":
        return architecture.bias == "always"
    given = {**architecture.bias_fields, **values}
    found = {name: _truth(given, name) for name in architecture.bias_fields}
    names = ", ".join(found)
    _need(names, found, len(set(found.values())) == 1, "one value: a job has all biases or none")
    return next(iter(found.values()))


def _windows(
    architecture: Architecture, values: Mapping[str, Any], layers: int
) -> tuple[int, tuple[int, ...]]:
    """window and layer_windows of the job."""
    # Qwen's files have a sliding_window that use_sliding_window turns off.
    unused = values.get("use_sliding_window") is False
    given = values.get("sliding_window")
    window = 0 if unused or given is None else given
    if architecture.windows == "none" or type(window) is not int or window < 0:
        _need("sliding_window", window, window == 0, "null, or the number of tokens")
    kinds = [] if values.get("layer_types") is None else values["layer_types"]
    texts = isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)
    _need("layer_types", kinds, texts, "a list of names")
    if not kinds:
        return window, ()
    _need(
        "layer_types",
        kinds,
        len(kinds) == layers,
        f"{counted(layers, 'entry')}, one for each layer",
    )
    known = {"full_attention": 0, "sliding_attention": window}
    _need("layer_types", kinds, set(kinds) <= set(known), " or ".join(known))
    chosen = tuple(known[kind] for kind in kinds)
    # One window for all layers is the job's `window`, which more architectures can hold.
    return (chosen[0], ()) if len(set(chosen)) == 1 else (0, chosen)


def _need(name: str, value: object, fits: bool, needed: str) -> None:
    if not fits:
        raise invalid(
            f"config.json: {name}",
            f"{reprlib.repr(value)} where a job needs {needed}",
            "such a model cannot be imported",
        )


def _whole(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if type(value) is not int or not 1 <= value < 1 << 63:
        raise _unfit(values, name, "a whole number above 0")
    return value


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    # Python's JSON reader accepts NaN, and whole numbers that are too large for a float.
    if type(value) not in (int, float) or not abs(values[name]) < MOST:
        raise _unfit(values, name, "a number")
    return float(values[name])


def _truth(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name)
    if not isinstance(value, bool):
        raise _unfit(values, name, "true or false")
    return value


def _unfit(values: Mapping[str, Any], name: str, wanted: str) -> RequestError:
    value = values.get(name)
    shown = "null" if value is None else reprlib.repr(value)
    problem = f"{shown} is not {wanted}" if name in values else "missing"
    return invalid(f"config.json: {name}", problem, f"set it to {wanted}, as the model was trained")

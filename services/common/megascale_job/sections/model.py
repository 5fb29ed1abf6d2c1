"""A job's section ``trainer.model``, and the checks of its relations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from megascale_job.problems import JobProblem
from megascale_job.sections.fields import ADDED, bounds
from megascale_job.visible import counted

# Limits of sizes are far above the models of today, and far below sizes with which the driver or
# the CLI would exhaust their memory.
_MAX_SEQUENCE = 2**24
_MAX_EXPERTS = 2**14

# The choices are in the order of the proto's enums, so that all messages list them alike.
Block = Literal["parallel", "serial"]
Mlp = Literal["gelu", "swiglu"]
Norm = Literal["layernorm", "rmsnorm"]
Positions = Literal["rope", "learned"]
RopeScalingKind = Literal["none", "linear", "llama3", "yarn"]
ExpertScore = Literal["softmax", "sigmoid"]
QkNormOver = Literal["heads", "projection"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScalingConfig:
    """Change of the rotary frequencies of ``rope_theta``; lengths are in tokens.

    ``linear``: all are divided by ``factor``. ``llama3``: frequencies with a wavelength above
    ``original_sequence_length / low_frequency_factor`` are divided by it, those with a wavelength
    below ``original_sequence_length / high_frequency_factor`` stay, and those between are blended.
    ``yarn`` (Peng et al., arXiv 2309.00071): those that turn fewer than ``beta_slow`` times in
    ``original_sequence_length`` are divided by it, those that turn more than ``beta_fast`` times
    stay, those between are blended, and rotated q and k are multiplied by ``attention_factor``.
    """

    kind: RopeScalingKind = "none"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_sequence_length: int = 8192
    beta_fast: float = field(
        default=32.0, metadata=bounds(above=0, remedy="give a number of turns, as 32", added=True)
    )
    beta_slow: float = field(
        default=1.0, metadata=bounds(above=0, remedy="give a number of turns, as 1", added=True)
    )
    attention_factor: float = field(
        default=0.0,
        metadata=bounds(0, 1000, remedy="give up to 1000, or 0 for 0.1 ln(factor) + 1", added=True),
    )

    @property
    def rotated_scale(self) -> float:
        """Factor of rotated q and k: ``attention_factor``, or the paper's for 0; 1 without yarn."""
        if self.kind != "yarn":
            return 1.0
        return self.attention_factor or 0.1 * math.log(self.factor) + 1.0


_OF_YARN = ("beta_fast", "beta_slow", "attention_factor")


def shown_scaling(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a :class:`RopeScalingConfig` without those of yarn, unless ``kind`` is yarn.

    So checkpoints and answers of other models are as they were before there was yarn.
    """
    return {
        name: value
        for name, value in values.items()
        if values.get("kind") == "yarn" or name not in _OF_YARN
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsConfig:
    """Experts in the place of a layer's feed-forward layer; ``count`` 0: a dense model.

    A router scores the experts for each token, ``score`` over all of them, and the ``top_k`` best
    compute it. With ``normalise`` a token's weights add up to ``scale``, else each score is
    multiplied by it. With ``groups`` the choice is made within the ``groups_kept`` best groups of
    experts (DeepSeek-V3, arXiv 2412.19437). ``bias_rate``: the router has a bias per expert that
    decides the choice alone, and that moves by this much after each update, against the sign of the
    expert's excess load. ``ffn_size`` is the width of one expert, 0: the model's ``ffn_width``;
    ``shared_ffn_size`` that of all shared experts together, which compute every token, 0: none.
    ``dense_layers``: number of first layers with a feed-forward layer instead.
    """

    count: int = field(
        default=0, metadata=bounds(0, _MAX_EXPERTS, low="give a positive number, or 0 for none")
    )
    top_k: int = field(default=2, metadata=bounds(1, _MAX_EXPERTS))
    ffn_size: int = field(
        default=0, metadata=bounds(0, 2**20, low="give a positive number, or leave it out")
    )
    shared_ffn_size: int = field(
        default=0, metadata=bounds(0, 2**20, low="give a positive number, or 0 for none")
    )
    dense_layers: int = field(
        default=0, metadata=bounds(0, 4096, low="give a number of layers, or 0 for none")
    )
    score: ExpertScore = "softmax"
    normalise: bool = True
    scale: float = field(
        default=1.0, metadata=bounds(above=0, most=1000, remedy="give a number above 0, up to 1000")
    )
    groups: int = field(default=1, metadata=bounds(1, _MAX_EXPERTS))
    groups_kept: int = field(default=1, metadata=bounds(1, _MAX_EXPERTS))
    bias_rate: float = field(
        default=0.0, metadata=bounds(0, 1, remedy="give 0 (no bias) to 1, such as 0.001")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    ``ffn_size`` 0 means 4 * hidden_size; ``kv_heads`` 0 means heads; ``window`` 0 means full causal
    attention; ``head_dim`` 0 means hidden_size / heads. ``attention_bias`` gives q, k and v a bias
    without ``bias``; ``qk_norm`` normalises every head of q and of k, or with ``qk_norm_over``
    projection all heads of a token together. ``experts`` with a ``count`` take the place of the
    feed-forward layer.
    """

    layers: int = field(metadata=bounds(1, 4096))
    hidden_size: int = field(metadata=bounds(1, 2**20))
    heads: int = field(metadata=bounds(1, 2**16))
    vocab_size: int = field(metadata=bounds(1, 2**24))
    sequence_length: int = field(metadata=bounds(1, _MAX_SEQUENCE))
    ffn_size: int = field(
        default=0, metadata=bounds(0, 2**20, low="give a positive number, or leave it out")
    )
    kv_heads: int = field(
        default=0, metadata=bounds(0, 2**16, low="give a positive number, or leave it out")
    )
    block: Block = "parallel"
    mlp: Mlp = "gelu"
    norm: Norm = "layernorm"
    bias: bool = False
    norm_bias: bool = True
    positions: Positions = "rope"
    rope_theta: float = field(
        default=10_000.0, metadata=bounds(above=1, remedy="give a number above 1")
    )
    tie_embeddings: bool = False
    window: int = field(
        default=0, metadata=bounds(0, _MAX_SEQUENCE, low="give a width in tokens, or 0 for none")
    )
    norm_epsilon: float = field(
        default=1e-5, metadata=bounds(above=0, below=1, remedy="give a number between 0 and 1")
    )
    initializer_std: float = field(
        default=0.02, metadata=bounds(above=0, below=1, remedy="give a number between 0 and 1")
    )
    layer_windows: tuple[int, ...] = ()
    head_dim: int = field(
        default=0,
        metadata=bounds(0, 2**16, low="give a positive number, or leave it out", added=True),
    )
    attention_bias: bool = field(default=False, metadata=ADDED)
    qk_norm: bool = field(default=False, metadata=ADDED)
    qk_norm_over: QkNormOver = field(default="heads", metadata=ADDED)
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig, metadata=ADDED)
    experts: ExpertsConfig = field(default_factory=ExpertsConfig, metadata=ADDED)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has experts instead of a feed-forward layer."""
        return self.experts.count > 0 and layer >= self.experts.dense_layers

    def window_of(self, layer: int) -> int:
        """Sliding window of one layer in tokens; 0 is full causal attention."""
        return self.layer_windows[layer] if self.layer_windows else self.window

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layer before any padding for tensor parallelism."""
        return self.ffn_size or 4 * self.hidden_size

    @property
    def expert_width(self) -> int:
        """Width of one expert's feed-forward layer."""
        return self.experts.ffn_size or self.ffn_width

    @property
    def key_value_heads(self) -> int:
        """Number of key/value heads (grouped-query attention when below ``heads``)."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden_size // self.heads


def window_problems(model: ModelConfig) -> Iterator[JobProblem]:
    """A list of windows that does not fit the layers."""
    if model.layer_windows and (
        len(model.layer_windows) != model.layers or min(model.layer_windows) < 0
    ):
        windows, layers = len(model.layer_windows), model.layers
        yield JobProblem(
            "trainer.model.layer_windows",
            f"{'1 window' if windows == 1 else f'{windows} windows'} for "
            f"{'1 layer' if layers == 1 else f'{layers} layers'}, the smallest is "
            f"{min(model.layer_windows)}",
            "give one width in tokens per layer, 0 for none, or leave the list out and set "
            "trainer.model.window",
        )


def model_problems(model: ModelConfig) -> Iterator[JobProblem]:
    """Relations between the model's sizes."""
    if model.hidden_size % model.heads and not model.head_dim:
        multiple = model.hidden_size // model.heads * model.heads or model.heads
        yield JobProblem(
            "trainer.model.hidden_size",
            f"{model.hidden_size} is not a multiple of trainer.model.heads = {model.heads}",
            f"use {multiple} or another multiple, or give trainer.model.head_dim",
        )
    elif model.positions == "rope" and model.head_dim % 2:
        yield JobProblem(
            "trainer.model.head_dim", f"{model.head_dim} is odd; rope rotates pairs", "make it even"
        )
    elif model.positions == "rope" and model.head_size % 2:
        yield JobProblem(
            "trainer.model.heads",
            f"the head size {model.hidden_size}/{model.heads} = {model.head_size} is odd; "
            "rope rotates pairs",
            "choose heads so that hidden_size/heads is even, or positions: learned",
        )
    if model.heads % model.key_value_heads:
        yield JobProblem(
            "trainer.model.kv_heads",
            f"trainer.model.heads = {model.heads} is not a multiple of {model.key_value_heads}",
            "use a divisor of trainer.model.heads",
        )
    if model.attention_bias and not model.bias and model.block == "parallel":
        yield JobProblem(
            "trainer.model.attention_bias",
            "the parallel block has one bias for q, k, v and the feed-forward layer",
            "set trainer.model.bias: true, or trainer.model.block: serial",
        )
    if model.qk_norm_over != "heads" and not model.qk_norm:
        yield JobProblem(
            "trainer.model.qk_norm_over",
            f"{model.qk_norm_over}, and the model does not normalise q and k",
            "set trainer.model.qk_norm: true, or leave it out",
        )
    yield from rotation_problems(model)
    yield from _experts(model)


def _experts(model: ModelConfig) -> Iterator[JobProblem]:
    """Problems of experts, and of their fields in a dense model."""
    experts, path = model.experts, "trainer.model.experts"
    if not experts.count:
        if experts != ExpertsConfig():
            yield JobProblem(
                f"{path}.count",
                f"0 with other fields of {path}: the model is dense",
                "give the number of experts, or leave the other fields out",
            )
        return
    if experts.dense_layers >= model.layers:
        yield JobProblem(
            f"{path}.dense_layers",
            f"{experts.dense_layers} leaves no layer of trainer.model.layers = {model.layers} "
            "with experts",
            f"use at most {model.layers - 1}, or leave experts out",
        )
    yield from _layer_with_experts(model)
    yield from _choice(experts, path)


def _layer_with_experts(model: ModelConfig) -> Iterator[JobProblem]:
    """Shapes of a layer that experts cannot have."""
    if model.block != "serial":
        yield JobProblem(
            "trainer.model.block",
            f"{model.block} with experts: the parallel block merges the feed-forward layer with "
            "attention",
            "set it to serial",
        )
    if model.mlp != "swiglu":
        yield JobProblem(
            "trainer.model.mlp", f"{model.mlp} with experts, which are swiglu", "set it to swiglu"
        )
    if model.bias:
        yield JobProblem(
            "trainer.model.bias",
            "true with experts, which have no bias",
            "set it to false; trainer.model.attention_bias gives q, k and v one",
        )


def _choice(experts: ExpertsConfig, path: str) -> Iterator[JobProblem]:
    """Numbers of experts and of their groups from which a router cannot choose."""
    if experts.count % experts.groups:
        yield JobProblem(
            f"{path}.groups",
            f"{path}.count = {experts.count} is not a multiple of {experts.groups}",
            f"use a divisor of {experts.count}",
        )
    elif experts.groups_kept > experts.groups:
        yield JobProblem(
            f"{path}.groups_kept",
            f"{experts.groups_kept} is above {path}.groups = {experts.groups}",
            f"use at most {experts.groups}",
        )
    elif experts.top_k > (kept := experts.count // experts.groups * experts.groups_kept):
        where = "of the kept groups" if experts.groups > 1 else "of the model"
        more = f", or a larger {path}.groups_kept" if experts.groups_kept < experts.groups else ""
        yield JobProblem(
            f"{path}.top_k",
            f"{experts.top_k} is above the {counted(kept, 'expert')} {where}",
            f"use at most {kept}{more}",
        )


def rotation_problems(model: ModelConfig) -> Iterator[JobProblem]:
    """Problems of the scaling of rotary frequencies."""
    scaling, path = model.rope_scaling, "trainer.model.rope_scaling"
    if scaling.kind == "none":
        return
    if model.positions != "rope":
        yield JobProblem(
            f"{path}.kind",
            f"{scaling.kind} with positions: {model.positions}",
            "leave rope_scaling out, or set trainer.model.positions: rope",
        )
    if not (math.isfinite(scaling.factor) and scaling.factor >= 1):
        yield JobProblem(f"{path}.factor", f"{scaling.factor} is out of range", "give 1 or more")
    if scaling.kind == "linear":
        return
    if scaling.kind == "llama3":
        low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
        if not (math.isfinite(high) and 0 < low < high):
            yield JobProblem(
                f"{path}.high_frequency_factor",
                f"{high} is not above low_frequency_factor = {low}, which is above 0",
                "give those of the model, such as 4 and 1",
            )
    else:
        yield from _yarn(model)
    if not 0 < scaling.original_sequence_length <= _MAX_SEQUENCE:
        yield JobProblem(
            f"{path}.original_sequence_length",
            f"{scaling.original_sequence_length} is out of range",
            "give the tokens of the sequences that the model was first trained on, such as 8192",
        )


def model_values(model: ModelConfig) -> dict[str, Any]:
    """Plain values of ``model``, with the fields of yarn only if it is used."""
    values = asdict(model)
    return {**values, "rope_scaling": shown_scaling(values["rope_scaling"])}


def _yarn(model: ModelConfig) -> Iterator[JobProblem]:
    """Problems of the fields of yarn alone."""
    scaling, path = model.rope_scaling, "trainer.model.rope_scaling"
    slow, fast = scaling.beta_slow, scaling.beta_fast
    if fast <= slow:
        yield JobProblem(
            f"{path}.beta_fast",
            f"{fast:g} is not above beta_slow = {slow:g}",
            "give those of the model, such as 32 and 1",
        )
        return
    # The first pair turns most often; the last one's frequency is hardly above 1 / rope_theta.
    turns = scaling.original_sequence_length / (2 * math.pi)
    words = ""
    if 0 < turns < slow:
        words = f"no pair turns as often as beta_slow = {slow:g}"
    elif turns >= fast * model.rope_theta:
        words = f"every pair turns as often as beta_fast = {fast:g}"
    if words:
        yield JobProblem(
            f"{path}.original_sequence_length",
            f"{words} in {counted(scaling.original_sequence_length, 'token')}",
            "give the tokens of the sequences that the model was first trained on, and its betas",
        )

"""A job's section ``trainer.model``, and the checks of its relations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from megascale_job.problems import JobProblem
from megascale_job.sections.fields import ADDED, bounds

# Limits of sizes are far above the models of today, and far below sizes with which the driver or
# the CLI would exhaust their memory.
_MAX_SEQUENCE = 2**24

# The choices are in the order of the proto's enums, so that all messages list them alike.
Block = Literal["parallel", "serial"]
Mlp = Literal["gelu", "swiglu"]
Norm = Literal["layernorm", "rmsnorm"]
Positions = Literal["rope", "learned"]
RopeScalingKind = Literal["none", "linear", "llama3"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScalingConfig:
    """Change of the rotary frequencies of ``rope_theta``; lengths are in tokens.

    ``linear``: all are divided by ``factor``. ``llama3``: frequencies with a wavelength above
    ``original_sequence_length / low_frequency_factor`` are divided by it, those with a wavelength
    below ``original_sequence_length / high_frequency_factor`` stay, and those between are blended.
    """

    kind: RopeScalingKind = "none"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_sequence_length: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only transformer.

    ``ffn_size`` 0 means 4 * hidden_size; ``kv_heads`` 0 means heads; ``window`` 0 means full causal
    attention; ``head_dim`` 0 means hidden_size / heads. ``attention_bias`` gives q, k and v a bias
    without ``bias``; ``qk_norm`` normalises every head of q and of k.
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
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig, metadata=ADDED)

    def window_of(self, layer: int) -> int:
        """Sliding window of one layer in tokens; 0 is full causal attention."""
        return self.layer_windows[layer] if self.layer_windows else self.window

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward layer before any padding for tensor parallelism."""
        return self.ffn_size or 4 * self.hidden_size

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
    yield from _rotation(model)


def _rotation(model: ModelConfig) -> Iterator[JobProblem]:
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
    if scaling.kind != "llama3":
        return
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    if not (math.isfinite(high) and 0 < low < high):
        yield JobProblem(
            f"{path}.high_frequency_factor",
            f"{high} is not above low_frequency_factor = {low}, which is above 0",
            "give those of the model, such as 4 and 1",
        )
    if not 0 < scaling.original_sequence_length <= _MAX_SEQUENCE:
        yield JobProblem(
            f"{path}.original_sequence_length",
            f"{scaling.original_sequence_length} is out of range",
            "give the tokens of the sequences that the model was first trained on, such as 8192",
        )

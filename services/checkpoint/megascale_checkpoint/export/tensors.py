"""Which tensor of a Hugging Face model is which parameter of a job, and what changes between them.

Pure, and the same list for both directions. A job's parameters are whole here: padding of the
vocabulary and of the FFN exists only in a rank's memory, so it is neither exported nor imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from megascale_checkpoint.export.architectures import Architecture
from megascale_common.service.errors import RequestError
from megascale_job.config import JobConfig, ModelConfig, TrainingConfig
from megascale_job.sizes.parameter_table import parameter_table

Change = Literal["none", "transposed", "pairs"]
HEAD = "head.weight"
EMBEDDING = "embedding.weight"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor.

    Attributes:
        foreign: its name in the Hugging Face files, of shape ``shape``.
        logical: the job's parameter; "" where the job has none: zeros.
        change: ``transposed``: the job stores output projections as [in, out]; ``pairs``: rows of
            each head stand in another order, because rotary embedding turns pairs of them.
    """

    foreign: str
    shape: tuple[int, ...]
    logical: str
    change: Change


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
    """Raise RequestError where the checkpoint's parameters are not those of ``model``."""
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


def transfers(architecture: Architecture, model: ModelConfig) -> tuple[Transfer, ...]:
    """Every tensor of the architecture's files, in the model's order."""
    found = [
        _transfer(architecture, name, shape) for name, shape in parameter_shapes(model).items()
    ]
    names = {each.foreign for each in found}
    zeros = [each for each in _biases(architecture, found) if each.foreign not in names]
    return (*found, *zeros)


def _transfer(architecture: Architecture, name: str, shape: tuple[int, ...]) -> Transfer:
    parameter, _, kind = name.rpartition(".")
    change: Change = "none"
    if parameter.startswith("layers."):
        _, index, short = parameter.split(".")
        foreign = f"model.layers.{index}.{architecture.layer_names[short]}"
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


# The values of a tensor between a job's form and a foreign one: order, and float formats.
#
# numpy has no bfloat16, so 16-bit integers carry its bits. Rounding to it is to nearest, ties to
# even: what torch does, and so what a bf16 run computed with.

Floats = NDArray[np.float32]
# By safetensors' names: the type that carries the bits.
CARRIERS = {"F32": "<f4", "BF16": "<u2", "F16": "<f2"}


def to_foreign(values: Floats, change: Change, head_size: int) -> Floats:
    """A job's parameter as the foreign tensor; C order."""
    if change == "transposed":
        return np.ascontiguousarray(values.T)
    if change == "pairs":  # rows (i, i + d/2) of each head become (2 i, 2 i + 1)
        return _swapped(values, (-1, 2, head_size // 2, *values.shape[1:]))
    return values


def to_logical(values: Floats, change: Change, head_size: int) -> Floats:
    """The inverse of :func:`to_foreign`."""
    if change == "pairs":
        return _swapped(values, (-1, head_size // 2, 2, *values.shape[1:]))
    return to_foreign(values, change, head_size)


def narrow(values: Floats, dtype: str) -> memoryview:
    """The bytes of float32 ``values`` in ``dtype``, F32 or BF16; little-endian."""
    flat = np.ascontiguousarray(values, dtype="<f4").reshape(-1)
    carried: NDArray[Any] = flat
    if dtype == "BF16":
        bits = flat.view("<u4")
        # Half of what is cut off, and one less before an even number, so that ties go to it.
        rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        quiet = (bits >> 16) | 0x40  # a NaN whose bits are all cut off would become an infinity
        carried = np.where(np.isnan(flat), quiet, rounded).astype("<u2")
    return carried.data.cast("B")


def widen(data: memoryview, dtype: str) -> Floats:
    """Float32 values of ``data`` in ``dtype``, F32, BF16 or F16; 1-D; exact."""
    carried = np.frombuffer(data, CARRIERS[dtype])
    if dtype == "BF16":
        return (carried.astype("<u4") << 16).view("<f4")
    return carried.astype(np.float32, copy=False)


def _swapped(values: Floats, shape: tuple[int, ...]) -> Floats:
    return np.ascontiguousarray(values.reshape(shape).swapaxes(1, 2)).reshape(values.shape)

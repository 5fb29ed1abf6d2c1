"""Configurations of a training run: input rows, checks and defaults, and arrays for the step model.

The step model computes with :class:`Points`: many configurations at once, as arrays of one length.
A single configuration is represented by numbers instead of arrays (float64, the same arithmetic),
because operations on arrays of one element take several times as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from megascale_job.visible import agreed, counted
from megascale_planner.devices import GPUS, Gpu
from megascale_planner.systems import SYSTEMS

Array = npt.NDArray[np.float64]

NONE, SELECTIVE, FULL = 0.0, 1.0, 2.0
RECOMPUTE = {"none": NONE, "selective": SELECTIVE, "full": FULL}


def where(condition: Any, yes: Any, no: Any) -> Array:
    """``np.where``; for a single configuration it chooses without creating an array."""
    one = not isinstance(condition, np.ndarray)
    found: Array = (yes if condition else no) if one else np.where(condition, yes, no)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """Configurations; each field is an array [n] of float64, or one number.

    ``vpp``: chunks per rank. ``window``: tokens (0: none). ``recompute``: a value of RECOMPUTE.
    ``parallel_block``, ``swiglu`` and ``zero_bubble``: 0 or 1. ``fp8``: share of the layers in FP8,
    assumed to be equal on all stages. Batches are in sequences. ``first_layers``,
    ``middle_layers`` and ``last_layers``: layers of the first, the fullest middle (0: there is
    none) and the last pipeline stage; a single stage is all of them.
    """

    layers: Array
    hidden: Array
    heads: Array
    kv_heads: Array
    ffn: Array
    sequence: Array
    vocabulary: Array
    tp: Array
    pp: Array
    vpp: Array
    dp: Array
    micro_batch: Array
    global_batch: Array
    recompute: Array
    window: Array
    parallel_block: Array
    swiglu: Array
    fp8: Array
    zero_bubble: Array
    first_layers: Array
    middle_layers: Array
    last_layers: Array

    @property
    def devices(self) -> Array:
        """Number of devices."""
        return self.tp * self.pp * self.dp

    @property
    def micro_batches(self) -> Array:
        """Micro-batches per replica and step."""
        return self.global_batch / (self.dp * self.micro_batch)

    @property
    def kv_width(self) -> Array:
        """Width of the keys, which is also that of the values."""
        return self.hidden * self.kv_heads / self.heads

    @property
    def layer_weights(self) -> Array:
        """Weights of one layer's matrices."""
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_width)
        return attention + self.hidden * self.ffn * (2 + self.swiglu)

    @property
    def most_layers(self) -> Array:
        """Layers of the pipeline stage with the most layers."""
        ends = np.maximum(self.first_layers, self.last_layers)
        most: Array = np.maximum(ends, self.middle_layers)
        return most

    @property
    def stage_parameters(self) -> Array:
        """Parameters of the fullest rank: a stage's layers and one embedding, split over tp.

        The first stage has the embedding and the last the head. A middle stage with more layers
        than both is counted as if it had an embedding too.
        """
        layers = self.most_layers * (self.layer_weights + 13 * self.hidden)
        return (layers + self.vocabulary * self.hidden) / self.tp

    def norm_split(self, sequence_parallel: bool, selective_splits: bool) -> Array:
        """Number of ranks over which norms, residuals and dropout are split."""
        split = sequence_parallel | (selective_splits & (self.recompute == SELECTIVE))
        return where(split, self.tp, 1.0)


_SWIGLU_MULTIPLE = 256
_MOST = 10**9  # largest number in a row
_POINT_FIELDS = tuple(field.name for field in fields(Points))
_REQUIRED = ("layers", "hidden", "heads")
_FROM_ZERO = ("window", "bf16_layers")
_COUNTS = (
    *_REQUIRED,
    "kv_heads",
    "ffn",
    "sequence",
    "vocab",
    "gpus",
    "tp",
    "pp",
    "vpp",
    "dp",
    "micro_batch",
    "global_batch",
)
_CHOICES: dict[str, tuple[str, ...]] = {
    "system": tuple(SYSTEMS),
    "gpu": tuple(GPUS),
    "recompute": tuple(RECOMPUTE),
    "block": ("serial", "parallel"),
    "mlp": ("gelu", "swiglu"),
    "precision": ("bf16", "fp8"),
    "schedule": ("1f1b", "zero_bubble"),
}


class Refused(ValueError):
    """A configuration that cannot run, or an invalid row; the message names the key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model on devices; names as in the rows of ``predict``, batches in sequences.

    ``stage_layers``: layers of each virtual stage in the order of the model; () for an even split.
    ``bf16_layers``: number of layers in bf16 in a model in FP8.
    """

    system: str
    gpu: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    sequence: int
    vocab: int
    gpus: int
    tp: int
    pp: int
    vpp: int
    dp: int
    micro_batch: int
    global_batch: int
    recompute: str
    block: str
    window: int
    mlp: str
    precision: str
    schedule: str
    stage_layers: tuple[int, ...] = ()
    bf16_layers: int = 0


_NAMES = tuple(field.name for field in fields(Workload))


def from_row(row: Mapping[str, Any]) -> tuple[Workload, dict[str, Any]]:
    """The workload of a row, and the defaults that were used, by key.

    Absent keys: ``system`` ours, ``gpu`` h100, ``sequence`` 2048, ``vocab`` 51200, ``tp``, ``pp``,
    ``vpp``, ``micro_batch`` 1, ``kv_heads`` as heads, ``mlp`` gelu, ``precision`` bf16,
    ``schedule`` 1f1b, ``stage_layers`` even, ``bf16_layers`` 0; ``ffn`` 4 hidden, with swiglu 8/3
    hidden rounded up to 256; ``dp`` from ``gpus`` or the other way round; ``global_batch`` one
    micro-batch per stage and replica; ``block``, ``window`` and ``recompute`` from the system.

    Raises:
        Refused: a key is missing or has the wrong type, or the configuration cannot run.
    """
    given = {key: value for key, value in row.items() if value is not None}
    _check_kinds(given)
    values = _with_defaults(given)
    workload = Workload(**{name: values[name] for name in _NAMES})
    problem = illegal(workload)
    if problem:
        raise Refused(problem)
    return workload, {name: values[name] for name in _NAMES if name not in given}


def _check_kinds(given: Mapping[str, Any]) -> None:
    unknown = set(given) - {"id", "stage_layers", *_FROM_ZERO, *_COUNTS, *_CHOICES}
    if unknown:
        raise Refused(f"{', '.join(sorted(unknown))}: unknown; see docs/planner.md for the keys")
    for name in _REQUIRED:
        if name not in given:
            raise Refused(f"{name}: missing")
    for name in (*_COUNTS, *_FROM_ZERO):
        value, least = given.get(name, 1), 0 if name in _FROM_ZERO else 1
        whole = isinstance(value, int | float) and not isinstance(value, bool)
        if not whole or not least <= value <= _MOST or value != int(value):
            shown = repr(value)[:40]
            raise Refused(f"{name}: {shown} is not a whole number of {least} to {_MOST}")
    listed = given.get("stage_layers", [])
    if not isinstance(listed, list | tuple) or not all(
        isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= _MOST
        for count in listed
    ):
        raise Refused(f"stage_layers: {repr(listed)[:40]} is not a list of positive whole numbers")
    for name, choices in _CHOICES.items():
        if name in given and given[name] not in choices:
            raise Refused(f"{name}: {given[name]!r} is none of {', '.join(choices)}")


def _with_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "system": "ours",
        "gpu": "h100",
        "sequence": 2048,
        "vocab": 51200,
        "tp": 1,
        "pp": 1,
        "vpp": 1,
        "micro_batch": 1,
        "mlp": "gelu",
        "precision": "bf16",
        "schedule": "1f1b",
        "bf16_layers": 0,
        **{
            key: int(value) if key in (*_COUNTS, *_FROM_ZERO) else value
            for key, value in given.items()
        },
    }
    values["stage_layers"] = tuple(values.get("stage_layers", ()))
    system = SYSTEMS[values["system"]]
    wide = -(-8 * values["hidden"] // (3 * _SWIGLU_MULTIPLE)) * _SWIGLU_MULTIPLE
    values.setdefault("kv_heads", values["heads"])
    values.setdefault("ffn", wide if values["mlp"] == "swiglu" else 4 * values["hidden"])
    for name in ("block", "window", "recompute"):
        values.setdefault(name, getattr(system, name))
    replica = values["tp"] * values["pp"]
    if "dp" not in values:
        values["dp"] = max(1, values.get("gpus", replica) // replica)
    values.setdefault("gpus", replica * values["dp"])
    values.setdefault("global_batch", values["dp"] * values["micro_batch"] * values["pp"])
    return values


def illegal(w: Workload, gpu: Gpu | None = None) -> str:
    """Why a configuration cannot run; "" if it can. ``gpu``: a device that is not in the table."""
    device = gpu or GPUS[w.gpu]
    unit = w.dp * w.micro_batch
    problems = (
        (w.tp * w.pp * w.dp != w.gpus, f"gpus: {w.gpus} is not tp {w.tp} x pp {w.pp} x dp {w.dp}"),
        (w.hidden % w.heads != 0, f"heads: hidden {w.hidden} is not a multiple of {w.heads}"),
        (w.heads % w.tp != 0, f"tp: heads {w.heads} are not a multiple of {w.tp}"),
        (w.heads % w.kv_heads != 0, f"kv_heads: heads {w.heads} are not a multiple of them"),
        (
            w.system == "ours" and w.kv_heads % w.tp != 0,
            f"tp: kv_heads {w.kv_heads} are not a multiple of {w.tp}",
        ),
        (w.pp > w.layers, f"pp: {counted(w.pp, 'stage')} for {counted(w.layers, 'layer')}"),
        (
            not w.stage_layers and w.layers % (w.pp * w.vpp) != 0,
            f"vpp: layers {w.layers} are not a multiple of pp {w.pp} x vpp {w.vpp}",
        ),
        (
            bool(w.stage_layers)
            and (len(w.stage_layers) != w.pp * w.vpp or sum(w.stage_layers) != w.layers),
            f"stage_layers: {str(list(w.stage_layers))[:40]} are not "
            f"{counted(w.pp * w.vpp, 'number')} that "
            f"add up to {w.layers}",
        ),
        (
            w.schedule != "1f1b" and w.pp == 1,
            f"schedule: {w.schedule} needs more than one stage",
        ),
        (w.vpp > 1 and w.pp == 1, f"vpp: {counted(w.vpp, 'chunk')} need more than one stage"),
        (
            w.global_batch % unit != 0,
            f"global_batch: {w.global_batch} is not a multiple of dp {w.dp} x micro_batch "
            f"{w.micro_batch}",
        ),
        (
            w.vpp > 1 and w.global_batch // unit % w.pp != 0,
            f"vpp: {counted(w.global_batch // unit, 'micro-batch')} "
            f"{agreed(w.global_batch // unit, 'are')} not a multiple of pp {w.pp}",
        ),
        (
            w.precision == "fp8" and not device.peak_fp8_flops,
            f"precision: {w.gpu} has no fp8",
        ),
        (w.bf16_layers > w.layers, f"bf16_layers: {w.bf16_layers} of {counted(w.layers, 'layer')}"),
    )
    return next((text for holds, text in problems if holds), "")


def points_of(workloads: Sequence[Workload]) -> Points:
    """The workloads as arrays of one length."""
    rows = [_numbers(workload) for workload in workloads]
    columns = np.array(rows, dtype=np.float64).reshape(len(rows), len(_POINT_FIELDS)).T.copy()
    return Points(**dict(zip(_POINT_FIELDS, columns, strict=True)))


def point_of(workload: Workload) -> Points:
    """One workload; each field is a number."""
    numbers: list[Any] = [np.float64(number) for number in _numbers(workload)]
    return Points(**dict(zip(_POINT_FIELDS, numbers, strict=True)))


def _numbers(w: Workload) -> tuple[float, ...]:
    """The values for the fields of Points, in their order."""
    return (
        w.layers,
        w.hidden,
        w.heads,
        w.kv_heads,
        w.ffn,
        w.sequence,
        w.vocab,
        w.tp,
        w.pp,
        w.vpp,
        w.dp,
        w.micro_batch,
        w.global_batch,
        RECOMPUTE[w.recompute],
        w.window,
        w.block == "parallel",
        w.mlp == "swiglu",
        _fp8_share(w),
        w.schedule == "zero_bubble",
        *_end_layers(w),
    )


def _fp8_share(w: Workload) -> float:
    return 1 - w.bf16_layers / w.layers if w.precision == "fp8" else 0.0


def _end_layers(w: Workload) -> tuple[float, float, float]:
    """Layers of the first, the fullest middle and the last pipeline stage."""
    if not w.stage_layers:
        each = w.layers / w.pp
        return each, each if w.pp > 2 else 0.0, each
    stages = [sum(w.stage_layers[stage :: w.pp]) for stage in range(w.pp)]
    return stages[0], max(stages[1:-1], default=0), stages[-1]

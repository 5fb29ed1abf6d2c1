"""Configurations of a training run: input rows, checks and defaults, and arrays for the step model.

The step model computes with :class:`Points`: many configurations at once, as arrays of one length.
A single configuration is represented by numbers instead of arrays (float64, the same arithmetic),
because operations on arrays of one element take several times as long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
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

    ``query_width``, ``kv_width``: columns of the queries, and of the keys, which is also that of
    the values. ``projection_weights``: weights of a layer's attention projections. ``qk_norm``: 0
    or 1. ``experts`` per layer with experts (0: a dense model), of which a token chooses ``top_k``;
    ``reach``: share of the experts among which it chooses, after the choice of groups;
    ``expert_ffn``, ``shared_ffn``: widths. ``imbalance``: rows of the fullest rank of ep over the
    mean. ``dense_layers``: layers without experts, the first ones; ``first_dense``,
    ``middle_dense``, ``last_dense``: those of the stages. In a dense model they are all layers.
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
    query_width: Array
    kv_width: Array
    projection_weights: Array
    qk_norm: Array
    experts: Array
    top_k: Array
    reach: Array
    expert_ffn: Array
    shared_ffn: Array
    ep: Array
    imbalance: Array
    dense_layers: Array
    first_dense: Array
    middle_dense: Array
    last_dense: Array

    @property
    def devices(self) -> Array:
        """Number of devices."""
        return self.tp * self.pp * self.dp

    @property
    def micro_batches(self) -> Array:
        """Micro-batches per replica and step."""
        return self.global_batch / (self.dp * self.micro_batch)

    @property
    def has_experts(self) -> bool:
        """True if any of the configurations has experts."""
        return bool(np.any(self.experts > 0))

    @property
    def stages(self) -> tuple[tuple[Array, Array], ...]:
        """(layers, those without experts) of the first, the middle and the last stage."""
        return (
            (self.first_layers, self.first_dense),
            (self.middle_layers, self.middle_dense),
            (self.last_layers, self.last_dense),
        )

    @property
    def expert_layers(self) -> Array:
        """Layers with experts."""
        return self.layers - self.dense_layers

    @property
    def layer_weights(self) -> Array:
        """Weights of the matrices of a layer without experts."""
        return self.projection_weights + self.hidden * self.ffn * (2 + self.swiglu)

    @property
    def expert_weights(self) -> Array:
        """Weights of one expert."""
        return 3 * self.hidden * self.expert_ffn

    @property
    def shared_layer_weights(self) -> Array:
        """Weights of a layer with experts that every token meets: all but the experts'."""
        always = self.hidden * (3 * self.shared_ffn + self.experts)
        return self.projection_weights + always

    @property
    def active_weights(self) -> Array:
        """Weights of all matrices that a token is multiplied by, the head's among them."""
        layers = self.dense_layers * self.layer_weights
        if self.has_experts:
            active = self.shared_layer_weights + self.top_k * self.expert_weights
            layers = layers + self.expert_layers * active
        return layers + self.vocabulary * self.hidden

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
        than both is counted as if it had an embedding too. Experts are not counted.
        """
        most = self.most_layers * (self.layer_weights + 13 * self.hidden)
        if self.has_experts:
            more = 13 * self.hidden
            sizes = [
                dense * (self.layer_weights + more)
                + (layers - dense) * (self.shared_layer_weights + more)
                for layers, dense in self.stages
            ]
            most = np.maximum(np.maximum(sizes[0], sizes[1]), sizes[2])
        return (most + self.vocabulary * self.hidden) / self.tp

    @property
    def stage_expert_parameters(self) -> Array:
        """Parameters of experts on the fullest rank, split over ep."""
        if not self.has_experts:
            return 0 * self.layers
        most = [layers - dense for layers, dense in self.stages]
        layers = np.maximum(np.maximum(most[0], most[1]), most[2])
        found: Array = layers * self.experts * self.expert_weights / self.ep
        return found

    @property
    def expert_replicas(self) -> Array:
        """Ranks of a stage with the same experts."""
        return self.tp * self.dp / self.ep

    def norm_split(self, sequence_parallel: bool, selective_splits: bool) -> Array:
        """Number of ranks over which norms, residuals and dropout are split."""
        split = sequence_parallel | (selective_splits & (self.recompute == SELECTIVE))
        return where(split, self.tp, 1.0)


_SWIGLU_MULTIPLE = 256
_MOST = 10**9  # largest number in a row
_MOST_IMBALANCE = 1000.0
# Relative deviation of the loads of a balanced router's experts within a micro-batch, assumed. The
# sum of a rank's E / n experts deviates by less, as sums of independent values do, and the fullest
# of n ranks lies above the mean by the expected largest of n normal values (Blom, 1958).
LOAD_DEVIATION = 0.3
_NORMAL = NormalDist()
_POINT_FIELDS = tuple(field.name for field in fields(Points))
_REQUIRED = ("layers", "hidden", "heads")
_FROM_ZERO = (
    "window",
    "bf16_layers",
    "head_dim",
    "projection_weights",
    "qk_norm",
    "experts",
    "shared_ffn",
    "dense_layers",
)
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
    "top_k",
    "expert_ffn",
    "ep",
    "groups",
    "groups_kept",
)
# Keys that only rows with experts have.
EXPERT_KEYS = (
    "experts",
    "top_k",
    "expert_ffn",
    "shared_ffn",
    "dense_layers",
    "ep",
    "groups",
    "groups_kept",
    "imbalance",
    "ep_across_nodes",
)
_ATTENTION_KEYS = ("head_dim", "projection_weights", "qk_norm")
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
    ``bf16_layers``: number of layers in bf16 in a model in FP8. ``head_dim``, ``expert_ffn``,
    ``projection_weights``, ``imbalance`` 0: by the other sizes (:func:`from_row`).
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
    head_dim: int = 0
    projection_weights: int = 0
    qk_norm: int = 0
    experts: int = 0
    top_k: int = 2
    expert_ffn: int = 0
    shared_ffn: int = 0
    dense_layers: int = 0
    ep: int = 1
    groups: int = 1
    groups_kept: int = 1
    imbalance: float = 0.0
    ep_across_nodes: bool = False

    @property
    def load(self) -> float:
        """Rows of the fullest rank of ep over the mean: as stated, or assumed."""
        if self.imbalance or not self.experts or self.ep == 1:
            return self.imbalance or 1.0
        fullest = _NORMAL.inv_cdf((self.ep - 0.375) / (self.ep + 0.25))
        return 1 + LOAD_DEVIATION * fullest * math.sqrt(self.ep / self.experts)


_NAMES = tuple(field.name for field in fields(Workload))
# The values of absent keys that do not depend on others.
_OTHERWISE = {
    field.name: field.default
    for field in fields(Workload)
    if field.name in (*EXPERT_KEYS, *_ATTENTION_KEYS)
}


def from_row(row: Mapping[str, Any]) -> tuple[Workload, dict[str, Any]]:
    """The workload of a row, and the defaults that were used, by key.

    Absent keys: ``system`` ours, ``gpu`` h100, ``sequence`` 2048, ``vocab`` 51200, ``tp``, ``pp``,
    ``vpp``, ``micro_batch`` 1, ``kv_heads`` as heads, ``mlp`` gelu, ``precision`` bf16,
    ``schedule`` 1f1b, ``stage_layers`` even, ``bf16_layers`` 0; ``ffn`` 4 hidden, with swiglu 8/3
    hidden rounded up to 256; ``dp`` from ``gpus`` or the other way round; ``global_batch`` one
    micro-batch per stage and replica; ``block``, ``window`` and ``recompute`` from the system;
    ``head_dim`` hidden / heads, ``projection_weights`` those of grouped-query attention.

    A row with ``experts`` is of serial swiglu layers; its absent keys: ``top_k`` 2, ``expert_ffn``
    as ffn, ``shared_ffn`` and ``dense_layers`` 0, ``ep`` 1, ``groups`` and ``groups_kept`` 1,
    ``imbalance`` by LOAD_DEVIATION, ``ep_across_nodes`` false.

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
    hidden = {*_ATTENTION_KEYS} | (set() if workload.experts else {*EXPERT_KEYS})
    assumed = {name: values[name] for name in _NAMES if name not in hidden | given.keys()}
    return workload, assumed | ({"imbalance": workload.load} if "imbalance" in assumed else {})


def _check_kinds(given: Mapping[str, Any]) -> None:
    known = {"id", "stage_layers", "imbalance", "ep_across_nodes"}
    unknown = set(given) - {*known, *_FROM_ZERO, *_COUNTS, *_CHOICES}
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
    load = given.get("imbalance", 1.0)
    is_number = isinstance(load, int | float) and not isinstance(load, bool)
    if not is_number or not 1 <= load <= _MOST_IMBALANCE:
        raise Refused(f"imbalance: {repr(load)[:40]} is not a number of 1 to {_MOST_IMBALANCE:g}")
    if not isinstance(across := given.get("ep_across_nodes", False), bool):
        raise Refused(f"ep_across_nodes: {repr(across)[:40]} is neither true nor false")
    extra = [name for name in EXPERT_KEYS if name in given and name != "experts"]
    if extra and not given.get("experts"):
        raise Refused(f"{extra[0]}: the row has no experts; give experts, or leave it out")


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
        "mlp": "swiglu" if given.get("experts") else "gelu",
        "precision": "bf16",
        "schedule": "1f1b",
        "bf16_layers": 0,
        **_OTHERWISE,
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
    if values["experts"]:
        values.setdefault("block", "serial")
        values["expert_ffn"] = values["expert_ffn"] or values["ffn"]
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
        (
            not w.head_dim and w.hidden % w.heads != 0,
            f"heads: hidden {w.hidden} is not a multiple of {w.heads}",
        ),
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
        (w.qk_norm > 1, f"qk_norm: {w.qk_norm} is neither 0 nor 1"),
        *(_expert_problems(w, device) if w.experts else ()),
    )
    return next((text for holds, text in problems if holds), "")


def _expert_problems(w: Workload, device: Gpu) -> tuple[tuple[bool, str], ...]:
    """Layers of experts, and groups of ep, that cannot be: the rules of a job's validation."""
    stage, within = w.tp * w.dp, max(1, w.experts // w.groups * w.groups_kept)
    return (
        (w.block != "serial", f"block: {w.block} with experts; they need serial"),
        (w.mlp != "swiglu", f"mlp: {w.mlp} with experts, which are swiglu"),
        (
            w.dense_layers >= w.layers,
            f"dense_layers: {w.dense_layers} leaves no layer of {w.layers} with experts",
        ),
        (w.experts % w.groups != 0, f"groups: experts {w.experts} are no multiple of {w.groups}"),
        (w.groups_kept > w.groups, f"groups_kept: {w.groups_kept} of {w.groups}"),
        (w.top_k > within, f"top_k: {w.top_k} of {counted(within, 'expert')}"),
        (w.experts % w.ep != 0, f"ep: experts {w.experts} are not a multiple of {w.ep}"),
        (stage % w.ep != 0, f"ep: tp {w.tp} x dp {w.dp} is not a multiple of {w.ep}"),
        (
            w.system == "ours" and not w.ep_across_nodes and w.ep > device.devices_per_node,
            f"ep: {w.ep} on nodes of {counted(device.devices_per_node, 'device')}; give "
            "ep_across_nodes",
        ),
    )


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
        *(stages := _end_layers(w)),
        *_attention(w),
        w.experts,
        w.top_k,
        w.groups_kept / w.groups,
        w.expert_ffn or w.ffn,
        w.shared_ffn,
        w.ep,
        w.load,
        *_dense_layers(w, stages),
    )


def _attention(w: Workload) -> tuple[float, float, float, float]:
    """Columns of the queries and of the keys, weights of the projections, norms of heads."""
    query = w.heads * w.head_dim if w.head_dim else w.hidden
    key_value = query * w.kv_heads / w.heads
    weights = w.projection_weights or w.hidden * (2 * query + 2 * key_value)
    return query, key_value, weights, w.qk_norm


def _dense_layers(
    w: Workload, stages: tuple[float, float, float]
) -> tuple[float, float, float, float]:
    """Layers without experts: of the model, and of the first, the middle and the last stage."""
    if not w.experts:
        return w.layers, *stages
    if w.pp == 1:
        return (w.dense_layers,) * 4
    split = w.stage_layers or (w.layers // (w.pp * w.vpp),) * (w.pp * w.vpp)
    dense, first = [0] * w.pp, 0
    for virtual_stage, layers in enumerate(split):
        dense[virtual_stage % w.pp] += min(layers, max(0, w.dense_layers - first))
        first += layers
    middle = stages[1] and dense[_fullest_middle(w)]
    return w.dense_layers, dense[0], middle, dense[-1]


def _fp8_share(w: Workload) -> float:
    return 1 - w.bf16_layers / w.layers if w.precision == "fp8" else 0.0


def _end_layers(w: Workload) -> tuple[float, float, float]:
    """Layers of the first, the fullest middle and the last pipeline stage."""
    if not w.stage_layers:
        each = w.layers / w.pp
        return each, each if w.pp > 2 else 0.0, each
    stages = [sum(w.stage_layers[stage :: w.pp]) for stage in range(w.pp)]
    return stages[0], max(stages[1:-1], default=0), stages[-1]


def _fullest_middle(w: Workload) -> int:
    """The middle stage with the most layers; of equals the last, which has the most experts."""
    if not w.stage_layers:
        return w.pp - 2
    sizes = [sum(w.stage_layers[stage :: w.pp]) for stage in range(w.pp)]
    return max(range(1, w.pp - 1), key=lambda stage: (sizes[stage], stage))

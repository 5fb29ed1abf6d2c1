"""Search of layouts: every layout of a model on a number of devices, ranked by predicted step time.

Candidates form a grid: every tp that fits a node, every pp that divides the remaining devices,
every number of chunks that a stage's layers allow, micro-batches of 1, 2, 4, 8, 16, recompute and
block; of experts also every ep that divides them and the ranks of a stage, up to a node, or beyond
with ``ep_across_nodes``. A candidate that cannot run keeps its first reason. The whole grid is
predicted at once, and a second time with balanced stages, which this project's trainer can run; the
faster one is kept.

Balanced stages (:func:`balanced`): the head (logits and loss) is on the last pipeline stage, in
bf16 even if layers are in FP8. With an even split all other stages wait for it in every
micro-batch, so the last stage gets fewer layers. Within a stage the chunk with the head gets the
fewest, because stages also take turns chunk by chunk. First layers without experts count as the
others.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megascale_planner.devices import Gpu
from megascale_planner.prediction import Predictions, plain, predict
from megascale_planner.step_time import step_time, unit_times
from megascale_planner.systems import System
from megascale_planner.workload import RECOMPUTE, Refused, Workload, illegal, point_of, points_of

LEAST_GAIN = 0.01  # smaller gains are not reported
Split = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Seconds per micro-batch, forward and backward: one layer, the head, the embedding."""

    layer_s: float
    head_s: float
    embedding_s: float

    @property
    def head_layers(self) -> float:
        """Cost of the head, in layers."""
        return self.head_s / self.layer_s


@dataclass(frozen=True, slots=True)
class Balance:
    """A split that is faster than a configuration's own.

    ``gain``: predicted relative gain in tokens per second. ``head_layers``: cost of the head, in
    layers.
    """

    stage_layers: Split
    gain: float
    head_layers: float


def balanced(
    layers: int,
    pp: int,
    virtual_stages: int,
    costs: UnitCosts,
    fits: Callable[[Split], bool] = lambda split: True,
) -> Split:
    """The split whose slowest pipeline stage is fastest, as ``trainer.parallelism.stage_layers``.

    All stages except the last are as even as possible, with the remainder on the first ones, as in
    an even split. Among equally fast splits the most even one is chosen, because stages with more
    layers keep more activations.

    Args:
        layers: layers of the model.
        virtual_stages: chunks per pipeline stage; each gets at least one layer.
        fits: True for a split that fits in memory; the fastest such split is chosen.

    Returns:
        () for one stage, for too few layers, or if no split fits.
    """
    if pp == 1 or layers < pp * virtual_stages:
        return ()

    def slowest_s(last: int) -> float:
        first = -(-(layers - last) // (pp - 1))
        return max(first * costs.layer_s + costs.embedding_s, last * costs.layer_s + costs.head_s)

    # The number of layers on the last stage decides the split. Python's sort is stable, so among
    # equally fast splits the first, most even one stays in front.
    found = sorted(range(layers // pp, virtual_stages - 1, -1), key=slowest_s)
    splits = (_split(layers, last, pp, virtual_stages, costs.head_layers) for last in found)
    return next(filter(fits, splits), ())


def balance_of(
    workload: Workload,
    gpu: Gpu,
    system: System,
    fits: Callable[[Split], bool] = lambda split: True,
) -> Balance | None:
    """A split that is predicted to be faster than the workload's own by more than LEAST_GAIN."""
    if workload.pp == 1:
        return None
    costs = costs_of(workload, gpu, system)
    split = balanced(workload.layers, workload.pp, workload.vpp, costs, fits)
    if not split or split == workload.stage_layers:
        return None
    gain = gain_of(replace(workload, stage_layers=split), workload, gpu, system)
    return Balance(split, gain, costs.head_layers) if gain > LEAST_GAIN else None


def gain_of(changed: Workload, own: Workload, gpu: Gpu, system: System) -> float:
    """Predicted relative gain in tokens per second of ``changed`` over ``own``."""
    own_s, changed_s = (
        float(step_time(point_of(each), gpu, system).total) for each in (own, changed)
    )
    return own_s / changed_s - 1


def costs_of(workload: Workload, gpu: Gpu, system: System) -> UnitCosts:
    """The predicted times of a layer and of both ends of the model."""
    units = unit_times(point_of(workload), gpu, system)
    return UnitCosts(float(units.layer), float(units.head), float(units.embedding))


def _split(layers: int, last: int, pp: int, chunks: int, head_layers: float) -> Split:
    """The split with ``last`` layers on the last stage."""
    each, rest = divmod(layers - last, pp - 1)
    stages = [_chunks(each + (stage < rest), chunks, 0.0) for stage in range(pp - 1)]
    stages.append(_chunks(last, chunks, head_layers))
    return tuple(stage[chunk] for chunk in range(chunks) for stage in stages)


def _chunks(layers: int, chunks: int, head_layers: float) -> list[int]:
    """A stage's layers per chunk, such that its slowest chunk is fastest; the last has the head."""
    counts, loads = [1] * chunks, [1.0] * (chunks - 1) + [1.0 + head_layers]
    for _ in range(layers - chunks):
        # Always add to the chunk with the least load, which is optimal for equal layers.
        least = loads.index(min(loads))
        counts[least] += 1
        loads[least] += 1
    return counts


MICRO_BATCHES = (1, 2, 4, 8, 16)
BLOCKS = ("serial", "parallel")
MAX_DEVICES = 200_000
# Share of a device's memory for its context, libraries' workspaces and the allocator's fragments.
SPARE_MEMORY_SHARE = 0.06


@dataclass(frozen=True, slots=True)
class Rejected:
    """A candidate that cannot run, and the reason."""

    candidate: Workload
    reason: str


@dataclass(frozen=True, slots=True)
class Found:
    """The candidates that can run, fastest first, with predictions, and the rejected ones."""

    ranked: tuple[Workload, ...]
    predictions: Predictions
    order: tuple[int, ...]
    rejected: tuple[Rejected, ...]

    def rows(self, top: int) -> list[dict[str, Any]]:
        """The fastest ``top`` as plain values."""
        return [
            {**layout(workload), **plain(self.predictions, index)}
            for workload, index in zip(self.ranked[:top], self.order[:top], strict=True)
        ]

    def reasons(self) -> list[tuple[str, int]]:
        """Number of rejected candidates per kind of reason, the most frequent first."""
        return Counter(item.reason.split(":", 1)[0] for item in self.rejected).most_common()


def search(model: Workload, gpu: Gpu, system: System, blocks: tuple[str, ...] = BLOCKS) -> Found:
    """Rank the layouts of ``model`` on its ``gpus`` with its ``global_batch``.

    The layout of ``model`` itself is ignored.

    Raises:
        Refused: there are too many devices for a search.
    """
    if model.gpus > MAX_DEVICES:
        raise Refused(f"gpus: {model.gpus} are more than the {MAX_DEVICES} that a search covers")
    if model.experts and "serial" not in blocks:
        raise Refused("block: experts need serial layers; leave the option out")
    blocks = ("serial",) if model.experts else blocks
    legal: list[Workload] = []
    rejected: list[Rejected] = []
    for candidate in _candidates(model, gpu, blocks):
        reason = illegal(candidate)
        if reason:
            rejected.append(Rejected(candidate, reason))
        else:
            legal.append(candidate)
    if not legal:
        return Found((), predict(points_of([]), gpu, system), (), tuple(rejected))
    limit = gpu.memory_bytes * (1 - SPARE_MEMORY_SHARE)
    if system.name == "ours":
        legal = _balanced(legal, gpu, system, limit)
    found = predict(points_of(legal), gpu, system)
    # Memory is only known after the prediction, unlike the reasons of `illegal`.
    for index in np.flatnonzero(found.memory_bytes > limit):
        need, usable = found.memory_bytes[index] / 2**30, limit / 2**30
        text = f"memory: needs {need:.1f} GiB of {usable:.1f} usable"
        rejected.append(Rejected(legal[index], text))
    fits = np.flatnonzero(found.memory_bytes <= limit)
    order = fits[np.argsort(found.step_time_s[fits], kind="stable")]
    return Found(
        tuple(legal[index] for index in order), found, tuple(map(int, order)), tuple(rejected)
    )


def _balanced(candidates: list[Workload], gpu: Gpu, system: System, limit: float) -> list[Workload]:
    """The candidates, with balanced stages where these are faster and fit in ``limit`` bytes."""
    points = points_of(candidates)
    even, units = predict(points, gpu, system), unit_times(points, gpu, system)
    splits = [
        balanced(one.layers, one.pp, one.vpp, UnitCosts(*map(float, costs)))
        for one, *costs in zip(candidates, units.layer, units.head, units.embedding, strict=True)
    ]
    uneven = [
        replace(one, stage_layers=split) for one, split in zip(candidates, splits, strict=True)
    ]
    found = predict(points_of(uneven), gpu, system)
    better = (found.memory_bytes <= limit) & (
        even.step_time_s > (1 + LEAST_GAIN) * found.step_time_s
    )
    return [uneven[index] if better[index] else one for index, one in enumerate(candidates)]


def _candidates(model: Workload, gpu: Gpu, blocks: tuple[str, ...]) -> list[Workload]:
    """The grid of candidates; dp follows from the other sizes."""
    found = []
    for tp in _divisors(min(gpu.devices_per_node, model.gpus)):
        if model.gpus % tp:
            continue
        for pp in _divisors(model.gpus // tp):
            if pp > model.layers:
                break
            dp = model.gpus // (tp * pp)
            chunks = _divisors(max(1, model.layers // pp)) if pp > 1 else [1]
            groups = _ep_sizes(model, gpu, tp * dp)
            for ep, vpp, micro_batch, recompute, block in itertools.product(
                groups, chunks, MICRO_BATCHES, RECOMPUTE, blocks
            ):
                found.append(
                    replace(
                        model,
                        tp=tp,
                        pp=pp,
                        dp=dp,
                        vpp=vpp,
                        micro_batch=micro_batch,
                        recompute=recompute,
                        block=block,
                        ep=ep,
                    )
                )
    return found


def _ep_sizes(model: Workload, gpu: Gpu, stage: int) -> list[int]:
    """Sizes of ep that divide the experts and the ``stage`` ranks of a pipeline stage."""
    if not model.experts:
        return [1]
    sizes = _divisors(math.gcd(model.experts, stage))
    return [ep for ep in sizes if model.ep_across_nodes or ep <= gpu.devices_per_node]


def _divisors(number: int) -> list[int]:
    return [value for value in range(1, number + 1) if number % value == 0]


def layout(workload: Workload) -> dict[str, Any]:
    """The layout of a workload as plain values; ``stage_layers`` [] is an even split."""
    names = ["tp", "pp", "vpp", "dp", "micro_batch", "recompute", "block"]
    names += ["ep"] if workload.experts else []
    chosen = {name: getattr(workload, name) for name in names}
    return {**chosen, "stage_layers": list(workload.stage_layers)}


def sources(gpu: Gpu, system: System) -> list[dict[str, Any]]:
    """Every constant of a prediction, with its value and source."""
    return [
        {"of": owner.name, "constant": name, "value": getattr(owner, name), "source": source}
        for owner in (gpu, system)
        for name, source in owner.sources
    ]

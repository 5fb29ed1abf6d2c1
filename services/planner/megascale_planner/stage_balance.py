"""Layers of each virtual stage such that no pipeline stage waits for the one with the head; pure.

The head (logits and loss) is on the last pipeline stage, in bf16 also where layers are in FP8, and
an even split makes all other stages wait for it in every micro-batch. The last stage gets fewer
layers instead; within a stage the chunk with the head gets fewest, as stages also take turns chunk
by chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megascale_planner.gpus import Gpu
from megascale_planner.step_time import step_time, unit_times
from megascale_planner.systems import System
from megascale_planner.workload import Workload, point_of

LEAST_GAIN = 0.01  # of a split that is worth being named
Split = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """Seconds of a micro-batch, forward and backward: one layer, the head, the embedding."""

    layer_s: float
    head_s: float
    embedding_s: float

    @property
    def head_layers(self) -> float:
        """The head in layers."""
        return self.head_s / self.layer_s


@dataclass(frozen=True, slots=True)
class Balance:
    """A split that is faster than a configuration's own.

    ``gain``: how much more tokens a second it is predicted to train, relative. ``head_layers``: how
    many layers the head costs.
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

    All stages but the last are as even as they can be, the remainder on the first ones, as in an
    even split. Of equally fast splits the most even one is taken: stages with more layers keep more
    activations.

    Args:
        layers: of the model.
        virtual_stages: chunks of each pipeline stage; each gets a layer at least.
        fits: whether a split can be used (memory); the fastest that can is taken.

    Returns:
        () for one stage, too few layers, or if none fits.
    """
    if pp == 1 or layers < pp * virtual_stages:
        return ()

    def slowest_s(last: int) -> float:
        first = -(-(layers - last) // (pp - 1))
        return max(first * costs.layer_s + costs.embedding_s, last * costs.layer_s + costs.head_s)

    found = sorted(range(layers // pp, virtual_stages - 1, -1), key=slowest_s)
    splits = (_split(layers, last, pp, virtual_stages, costs.head_layers) for last in found)
    return next(filter(fits, splits), ())


def balance_of(
    workload: Workload,
    gpu: Gpu,
    system: System,
    fits: Callable[[Split], bool] = lambda split: True,
) -> Balance | None:
    """A split that is predicted to train more than LEAST_GAIN faster than the workload's own."""
    if workload.pp == 1:
        return None
    costs = costs_of(workload, gpu, system)
    split = balanced(workload.layers, workload.pp, workload.vpp, costs, fits)
    if not split or split == workload.stage_layers:
        return None
    gain = gain_of(replace(workload, stage_layers=split), workload, gpu, system)
    return Balance(split, gain, costs.head_layers) if gain > LEAST_GAIN else None


def gain_of(changed: Workload, own: Workload, gpu: Gpu, system: System) -> float:
    """How much more tokens a second ``changed`` is predicted to train than ``own``, relative."""
    own_s, changed_s = (
        float(step_time(point_of(each), gpu, system).total) for each in (own, changed)
    )
    return own_s / changed_s - 1


def costs_of(workload: Workload, gpu: Gpu, system: System) -> UnitCosts:
    """The planner's times of a layer and of both ends."""
    units = unit_times(point_of(workload), gpu, system)
    return UnitCosts(float(units.layer), float(units.head), float(units.embedding))


def _split(layers: int, last: int, pp: int, chunks: int, head_layers: float) -> Split:
    """The split with ``last`` layers on the last stage."""
    each, rest = divmod(layers - last, pp - 1)
    stages = [_chunks(each + (stage < rest), chunks, 0.0) for stage in range(pp - 1)]
    stages.append(_chunks(last, chunks, head_layers))
    return tuple(stage[chunk] for chunk in range(chunks) for stage in stages)


def _chunks(layers: int, chunks: int, head_layers: float) -> list[int]:
    """A stage's layers, such that its slowest chunk, the last with the head, is fastest."""
    counts, loads = [1] * chunks, [1.0] * (chunks - 1) + [1.0 + head_layers]
    for _ in range(layers - chunks):
        least = loads.index(min(loads))
        counts[least] += 1
        loads[least] += 1
    return counts

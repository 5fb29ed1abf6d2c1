"""Measured terms of steps: the seconds of each term of a plan, step by step.

A step is averaged over the ranks and split into computation (without the collectives inside it),
collectives, transfers between stages, optimizer and pauses of the host. The time that the last rank
to enter spends in a collective counts for the network; the other ranks' time above that is their
wait for it. Time in no span counts for the host, or with a pipeline for the wait for other stages.
So the terms add up to the step.

With experts there is one more term: their dispatch and combine, and all waits for the rank with the
most rows. Routing decides these, and no slow node. Other collectives wait for that rank too, but no
longer than its rows explain (:func:`megascale_driver.analysis.spans.routing.routing_ns`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megascale_common.node.spans.ops import (
    BACKWARD,
    BACKWARD_WEIGHT,
    COMBINE,
    DISPATCH,
    EVALUATION,
    FORWARD,
    OPTIMIZER,
    STEP,
)
from megascale_driver.analysis.spans.routing import routing_ns
from megascale_driver.analysis.spans.table import SpanTable, collectives, own_ns

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_COMPUTATIONS = (FORWARD.name, BACKWARD.name, BACKWARD_WEIGHT.name)
TERMS = (
    "compute",
    "tensor_parallel",
    "pipeline",
    "data_parallel",
    "optimizer",
    "host",
    "straggler",
)
EXPERT_TERM = "expert_parallel"  # only of jobs whose ranks exchange rows of experts


MAX_COLLECTIVES = 32  # per job; a step has about ten operations and groups


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredSteps:
    """Whole steps in order: their numbers, seconds, and seconds of each term; arrays [n].

    ``terms``: each of TERMS, and EXPERT_TERM where ranks exchange rows of experts.

    ``collectives``: by (operation, group), seconds per step and rank on the network, and of waiting
    for the last rank to enter; only the longest, at most MAX_COLLECTIVES.
    """

    steps: npt.NDArray[np.int64]
    step_s: Floats
    terms: Mapping[str, Floats]
    collectives: Mapping[tuple[str, str], tuple[Floats, Floats]] = field(default_factory=dict)


def measured_steps(table: SpanTable, micro_batches: int) -> MeasuredSteps:
    """The steps that all ranks with spans have ended.

    ``micro_batches``: those of a replica per step. At level "phases" only the first ones have
    spans, which are scaled up to all.
    """
    whole = table.of_op(STEP.name)
    numbers, ended = np.unique(whole.step, return_counts=True)
    ranks = max(len(np.unique(table.rank)), 1)
    steps = numbers[ended >= ranks].astype(np.int64)
    table = table.where(np.isin(table.step, steps))
    column = np.searchsorted(steps, table.step)

    def mean_s(chosen: Bools, values_ns: Floats) -> Floats:
        sums = np.bincount(column[chosen], values_ns[chosen], len(steps))
        seconds: Floats = sums[: len(steps)] / ranks / 1e9
        return seconds

    duration = table.duration_ns.astype(np.float64)
    own = own_ns(table)
    factor = _unmeasured(table, column, micro_batches)
    computing = table.is_op(*_COMPUTATIONS)
    # An evaluation is between two steps.
    no_part = table.is_op(EVALUATION.name)
    step_s = mean_s(table.is_op(STEP.name), duration) - mean_s(no_part, duration)
    shortest = _shortest_ns(table)
    late = duration - shortest
    rows = table.is_op(DISPATCH.name, COMBINE.name)
    collective, tp = table.is_kind("collective") & ~rows, table.mask(lambda op: op.group == "tp")
    host = table.is_kind("host") & ~table.is_op(STEP.name, EVALUATION.name)
    terms = {
        "compute": mean_s(computing, own * factor),
        "tensor_parallel": mean_s(collective & tp, shortest),
        "pipeline": mean_s(table.is_kind("p2p"), duration),
        "data_parallel": mean_s(collective & ~tp, shortest),
        "optimizer": mean_s(table.is_op(OPTIMIZER.name), own),
        "host": mean_s(host, duration),
        "straggler": mean_s(collective, late),
    }
    if rows.any():
        terms[EXPERT_TERM] = mean_s(rows, duration * factor)
        elsewhere = _routing_wait_s(table, column, factor, len(steps)) - mean_s(rows, late * factor)
        moved = np.clip(elsewhere, 0, terms["straggler"])
        terms[EXPERT_TERM] += moved
        terms["straggler"] -= moved
    # Positive: time in no span. Negative: spans that overlapped, which would count twice.
    rest: Floats = step_s - np.sum(list(terms.values()), axis=0)
    into = "pipeline" if table.layout.pp > 1 else "host"
    terms[into] = terms[into] + np.maximum(rest, 0)
    terms["compute"] = terms["compute"] + np.minimum(rest, 0)  # transfers that it overlapped
    single = {
        (op.name, op.group): (mean_s(table.op == at, shortest), mean_s(table.op == at, late))
        for at, op in enumerate(table.ops)
        if op.kind == "collective"
    }
    longest = sorted(single.items(), key=lambda one: -float(np.sum(one[1])))[:MAX_COLLECTIVES]
    return MeasuredSteps(steps, step_s, terms, dict(longest))


def _routing_wait_s(
    table: SpanTable, column: npt.NDArray[np.int64], factor: Floats, steps: int
) -> Floats:
    """Seconds per step and rank of waiting for the rank whose rows cost the most; array [steps]."""
    added = routing_ns(table) * factor
    present, place = np.unique(table.rank, return_inverse=True)
    flat = place.reshape(-1) * steps + column
    by_rank = np.bincount(flat, added, len(present) * steps).reshape(len(present), steps)
    waits: Floats = (by_rank.max(axis=0) - by_rank.mean(axis=0)) / 1e9
    return waits


def _unmeasured(table: SpanTable, column: npt.NDArray[np.int64], wanted: int) -> Floats:
    """Factor per span: for forwards and backwards their number per step, over those measured.

    The rows of experts travel inside of them, so these spans have the factor of the forwards in the
    same place. For all other spans the factor is 1.

    Args:
        column: the index of each span's step.
        wanted: micro-batches per step, each of which visits every chunk.
    """
    factor: Floats = np.ones(len(table))
    place = table.rank.astype(np.int64) * (int(column.max(initial=0)) + 1) + column
    place = place * (int(table.chunk.max(initial=0)) + 1) + table.chunk
    for name in _COMPUTATIONS:
        own = table.is_op(name)
        count = np.bincount(place[own], minlength=int(place.max(initial=0)) + 1)
        factor[own] = np.maximum(wanted / count[place[own]], 1.0)
        if name == FORWARD.name:
            inside = table.is_op(DISPATCH.name, COMBINE.name)
            factor[inside] = np.maximum(wanted / np.maximum(count[place[inside]], 1), 1.0)
    return factor


def _shortest_ns(table: SpanTable) -> Floats:
    """For each span of a collective the time of its last member; else the span's own time."""
    found = collectives(table)
    shortest = table.duration_ns.astype(np.float64)
    shortest[found.place] = found.shortest_ns[found.number]
    return shortest
